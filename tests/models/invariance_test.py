"""A sentence has the same logits alone, in a batch, padded on either side, and packed with others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import AttentionPattern
from tfm.models import build

POSITIONS = ("sinusoidal", "learned", "shaw", "t5", "rotary", "alibi", "none")
PATTERN = (AttentionPattern("window", window=3), AttentionPattern())
SOURCES, TARGETS = (4, 2), (2, 4)  # lengths of the two sentences


def padded(rows, side, length=5):
    """Rows of ids in one array, and which of them are real."""
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[i, place], mask[i, place] = row, True
    return jnp.asarray(ids), jnp.asarray(mask)


def packed(rows, length=8):
    """All rows one after the other, with a segment number each and 0 for padding."""
    ids, segments = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
    start = 0
    for i, row in enumerate(rows):
        ids[0, start:start + len(row)], segments[0, start:start + len(row)] = row, i + 1
        start += len(row)
    return jnp.asarray(ids), jnp.asarray(segments)


@pytest.mark.parametrize("position", POSITIONS)
def test_translation_of_a_sentence_does_not_depend_on_its_company(small, position):
    config = small.config(position=position, norm_position="pre", attention_pattern=PATTERN)
    model, variables = build(config), {"params": small.params(config)}
    sources = [np.asarray(small.ids(i, (n,))) for i, n in enumerate(SOURCES)]
    targets = [np.asarray(small.ids(i + 9, (n,))) for i, n in enumerate(TARGETS)]
    alone = [np.asarray(model.apply(variables, s[None], t[None]))[0] for s, t in zip(sources, targets, strict=True)]
    for sides in (("right", "right"), ("left", "right"), ("right", "left")):
        (source, source_mask), (target, target_mask) = (padded(r, s) for r, s in zip((sources, targets), sides,
                                                                                     strict=True))
        logits = model.apply(variables, source, target, source_mask=source_mask, target_mask=target_mask)
        for row, mask, expected in zip(np.asarray(logits), np.asarray(target_mask), alone, strict=True):
            np.testing.assert_allclose(row[mask], expected, atol=3e-5)
    (source, source_segments), (target, target_segments) = packed(sources), packed(targets)
    logits = model.apply(variables, source, target, source_segments=source_segments, target_segments=target_segments,
                         source_mask=source_segments > 0, target_mask=target_segments > 0)
    np.testing.assert_allclose(np.asarray(logits)[np.asarray(target_segments) > 0], np.concatenate(alone), atol=3e-5)


@pytest.mark.parametrize("pattern", ["full", "window", "longformer", "linear"])
def test_an_encoder_does_not_see_padding(small, pattern):
    config = small.config(decoder_layers=0, position="rotary", attention_pattern=(AttentionPattern(pattern, window=2),))
    model, variables = build(config), {"params": small.params(config)}
    rows = [np.asarray(small.ids(i, (n,))) for i, n in enumerate((5, 3))]
    alone = [np.asarray(model.apply(variables, row[None]))[0] for row in rows]
    for side in ("right", "left"):
        ids, mask = padded(rows, side)
        hidden = np.asarray(model.apply(variables, ids, mask=mask))
        for row, real, expected in zip(hidden, np.asarray(mask), alone, strict=True):
            np.testing.assert_allclose(row[real], expected, atol=3e-5)


def test_a_position_sees_what_the_causal_rule_and_the_window_allow(small):
    """The receptive field by gradients: two layers of a causal window of 2 reach 2 tokens back."""
    config = small.config(encoder_layers=0, position="none", attention_pattern=(AttentionPattern("window", window=2),))
    params, ids = small.params(config), jnp.arange(1, 7)[None]

    def sixth_logit(table):
        tokens = {**params, "token_embedding": {"table": table}}
        hidden = build(config).apply({"params": tokens}, ids, method="hidden")
        return jnp.sin(hidden[0, 4]).sum()

    gradient = np.abs(np.asarray(jax.grad(sixth_logit)(params["token_embedding"]["table"]))).sum(-1)
    assert (np.flatnonzero(gradient) == [3, 4, 5]).all()  # ids at places 2, 3, 4


def test_a_prefix_is_seen_from_both_sides(small):
    config = small.config(encoder_layers=0)
    model, variables, ids = build(config), {"params": small.params(config)}, small.ids(0, (1, 6))
    changed = ids.at[0, 2].set(ids[0, 2] % 12 + 1)

    def first_change(**arguments):
        difference = model.apply(variables, ids, **arguments) - model.apply(variables, changed, **arguments)
        return int(np.flatnonzero(np.abs(np.asarray(difference)[0]).max(-1) > 1e-6)[0])

    assert first_change() == 2
    assert first_change(prefix_length=jnp.array([3])) == 0
    assert first_change(prefix_length=jnp.array([2])) == 2


def test_explicit_positions_take_the_place_of_counting(small):
    config = small.config(encoder_layers=0, position="learned", max_positions=20)
    model, variables, ids = build(config), {"params": small.params(config)}, small.ids(0, (1, 4))
    counted = model.apply(variables, ids)
    np.testing.assert_array_equal(counted, model.apply(variables, ids, positions=np.arange(4)))
    assert np.abs(np.asarray(counted - model.apply(variables, ids, positions=np.arange(4) + 9))).max() > 1e-2
    backwards = model.apply(variables, ids[:, ::-1], positions=np.arange(4)[::-1].copy())
    np.testing.assert_allclose(backwards[:, ::-1], counted, atol=3e-5)


def test_sequences_past_the_position_table_are_refused(small):
    config = small.config(encoder_layers=0, position="learned")
    variables = {"params": small.params(config)}
    for mask in (None, jnp.ones((1, 9), bool)):
        with pytest.raises(ValueError, match="max_positions=8"):
            build(config).apply(variables, small.ids(0, (1, 9)), mask=mask)
    bigbird = small.config(encoder_layers=0, attention_pattern=(AttentionPattern("bigbird", block_size=2),))
    with pytest.raises(ValueError, match="max_positions=8"):
        build(bigbird).apply({"params": small.params(bigbird)}, small.ids(0, (1, 9)))


def test_packed_rows_and_prefixes_are_refused_by_linear_attention(small):
    config = small.config(encoder_layers=0, attention_pattern=(AttentionPattern("linear"),))
    variables, ids = {"params": small.params(config)}, small.ids(0, (1, 4))
    for arguments in ({"segments": jnp.ones((1, 4), jnp.int32)}, {"prefix_length": jnp.array([2])}):
        with pytest.raises(ValueError, match="linear attention"):
            build(config).apply(variables, ids, **arguments)
