"""Models with narrowed weights compute what the rounded weights say, in every pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.inference import Search, generate, score_pairs
from tfm.models import build
from tfm.models.narrow import narrow_weights
from tfm.models.output import output_matrix
from tfm.models.scanned import unstack_layers

ROWS = [[5, 6, 7], [8, 9, 4, 3, 7]]


def rounded(params, weights, parent=""):
    """The tree in float32 with every matrix rounded, in NumPy."""
    found = {}
    for name, x in params.items():
        if isinstance(x, dict):
            found[name] = rounded(x, weights, name)
        elif name == "kernel" or (name == "table" and parent != "positions"):
            x = np.asarray(x)
            if weights == "int8":
                scale = np.abs(x).max(0 if name == "kernel" else 1, keepdims=True) / 127
                found[name] = jnp.asarray(np.round(x / scale) * scale)
            else:
                found[name] = x.astype(jnp.bfloat16).astype(np.float32)
        else:
            found[name] = x
    return found


@pytest.mark.parametrize(("weights", "changes"), [
    ("int8", {}), ("bfloat16", {}), ("int8", {"encoder_layers": 0, "position": "learned", "tie_embeddings": "none"})])
def test_logits_are_those_of_the_rounded_weights(small, weights, changes):
    config = small.config(**changes)
    params = small.params(config)
    _, narrow = narrow_weights(config, params, weights)
    ids = (small.ids(0, (2, 5)),) if config.is_decoder_only else (small.ids(0, (2, 5)), small.ids(1, (2, 4)))
    actual = build(config).apply({"params": narrow}, *ids)
    expected = build(config).apply({"params": rounded(params, weights)}, *ids)
    plain = build(config).apply({"params": params}, *ids)
    far = np.abs(np.asarray(expected - plain)).max()
    assert np.abs(np.asarray(actual - expected)).max() < max(0.05, 3 * far)  # activations are rounded to bfloat16
    assert far > 1e-4
    matrix, _ = output_matrix(config, narrow)
    expected, _ = output_matrix(config, rounded(params, weights))
    np.testing.assert_allclose(matrix.astype(jnp.float32), expected, atol=1e-6)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_decoding_scores_its_tokens_as_one_pass_does(small, weights):
    config = small.config(decoder_layers=1)
    _, params = narrow_weights(config, small.params(config), weights)
    found = generate(config, params, ROWS, Search(beam_size=2, alpha=0.0), limits=[4, 4], start_id=1)
    scored = score_pairs(config, params, ROWS, [row[0].ids for row in found], start_id=1)
    for row, log_probs in zip(found, scored, strict=True):
        np.testing.assert_allclose(row[0].log_probs, log_probs, atol=0.03)


def test_stacked_layers_narrow_like_separate_ones(small):
    config = small.config(encoder_layers=0, decoder_layers=2, scan_layers=True)
    params = small.params(config)
    apart, narrow = narrow_weights(config, params, "int8")
    assert not apart.scan_layers
    expected = narrow_weights(apart, unstack_layers(params, apart), "int8")[1]
    jax.tree.map(np.testing.assert_array_equal, narrow, expected)


def test_an_unknown_type_is_refused(small):
    with pytest.raises(ValueError, match=r"weights is 'int4'.*bfloat16, int8"):
        narrow_weights(small.config(), {}, "int4")


@pytest.mark.parametrize("tie", ["all", "none"])
@pytest.mark.parametrize(("stored", "given"), [("float32", "float64"), ("float32", "float16"), ("bfloat16", "float32")])
def test_parameters_cast_to_another_type_are_not_taken_for_narrowed_ones(small, tie, stored, given):
    """A product of bfloat16 operands would be off by a hundredth."""
    config, plain = small.config(param_dtype=stored, tie_embeddings=tie), small.config(tie_embeddings=tie)
    halves = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), small.params(plain))
    ids = small.ids(0, (2, 5)), small.ids(1, (2, 4))
    expected = build(plain).apply({"params": halves}, *ids)
    with jax.enable_x64(given == "float64"):
        cast = jax.tree.map(lambda x: x.astype(given), halves)
        np.testing.assert_allclose(build(config).apply({"params": cast}, *ids), expected, atol=1e-5)
        found = generate(config, cast, ROWS, Search(beam_size=1), limits=[4, 4], start_id=1)
    wanted = generate(plain, halves, ROWS, Search(beam_size=1), limits=[4, 4], start_id=1)
    for (ours,), (theirs,) in zip(found, wanted, strict=True):
        assert ours.ids == theirs.ids
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5)
