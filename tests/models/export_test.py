"""`jax.export` with symbolic sizes: one program for all batches and lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import export, symbolic_shape

from tfm.masks import Causal, sliding_window
from tfm.models import build
from tfm.ops import attention


@pytest.mark.parametrize("sizes", ["b, 600", "2, n", "b, n"])
def test_attention_is_its_formula(sizes):
    x = np.random.default_rng(0).standard_normal((2, 600, 1, 4)).astype(np.float32)
    program = jax.jit(lambda x: attention(x, x, x, mask=Causal() & sliding_window(9)))
    shape = jax.ShapeDtypeStruct((*symbolic_shape(sizes), 1, 4), jnp.float32)
    scores = np.float64(x[:, :, 0] @ x[:, :, 0].swapaxes(1, 2)) / 2
    distance = np.arange(600)[:, None] - np.arange(600)
    weights = np.exp(scores) * ((distance >= 0) & (distance < 9))
    expected = (weights / weights.sum(-1, keepdims=True)) @ x[:, :, 0]
    np.testing.assert_allclose(export(program)(shape).call(x)[:, :, 0], expected, atol=1e-5)


@pytest.mark.parametrize("changes", [
    {}, {"position": "t5"}, {"encoder_layers": 0, "position": "rotary"},
    {"encoder_layers": 0, "position": "learned", "max_positions": 20}, {"decoder_layers": 0, "position": "alibi"}])
def test_a_model_is_exported_for_all_batches_and_lengths(small, changes):
    config = small.config(**changes)
    params, inputs = small.params(config), 1 + config.is_encoder_decoder
    program = jax.jit(lambda *ids: build(config).apply({"params": params}, *ids))
    exported = export(program)(*[jax.ShapeDtypeStruct(symbolic_shape("b, n"), jnp.int32)] * inputs)
    for shape in ((2, 20), (3, 7)):
        ids = [small.ids(0, shape)] * inputs
        np.testing.assert_allclose(exported.call(*ids), program(*ids), atol=1e-5)
