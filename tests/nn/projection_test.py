"""The dense layer and the statistics of the initialisers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import ModelConfig
from tfm.nn import Projection
from tfm.nn.projection import embedding_initializer, kernel_initializer


@pytest.mark.parametrize("shape", [(64, 256), (512, 100)])
def test_xavier_uniform_kernels(shape):
    """U(-a, a) with a = sqrt(6 / (in + out)) (Glorot and Bengio, 2010, equation 16)."""
    kernel = np.asarray(kernel_initializer(ModelConfig(vocab_size=8))(jax.random.key(0), shape, jnp.float32))
    limit = np.sqrt(6 / sum(shape))
    assert 0.99 * limit < np.abs(kernel).max() <= limit
    np.testing.assert_allclose(kernel.std(), limit / np.sqrt(3), rtol=0.02)
    assert abs(kernel.mean()) < 4 * kernel.std() / np.sqrt(kernel.size)
    np.testing.assert_allclose(np.mean(kernel < limit / 2), 0.75, atol=0.01)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"embedding_init": "scaled"}, 256**-0.5), ({"embedding_init": "normal"}, 0.02),
    ({"embedding_init": "normal", "init_std": 0.1}, 0.1)])
def test_embedding_initialisers(changes, expected):
    config = ModelConfig(vocab_size=8, d_model=256, **changes)
    table = np.asarray(embedding_initializer(config)(jax.random.key(0), (1000, 256), jnp.float32))
    np.testing.assert_allclose(table.std(), expected, rtol=0.01)
    np.testing.assert_allclose(np.mean(np.abs(table) < expected), 0.6827, atol=0.005)


def test_normal_kernels():
    config = ModelConfig(vocab_size=8, kernel_init="normal", init_std=0.05)
    kernel = np.asarray(kernel_initializer(config)(jax.random.key(0), (300, 300), jnp.float32))
    np.testing.assert_allclose(kernel.std(), 0.05, rtol=0.02)


def test_bias_starts_at_zero_and_is_added():
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    module = Projection(5, use_bias=True)
    params = module.init(jax.random.key(0), x)["params"]
    assert not params["bias"].any()
    assert "bias" not in Projection(5).init(jax.random.key(0), x)["params"]
    params = {**params, "bias": jnp.arange(5.0)}
    expected = np.asarray(x, np.float64) @ np.asarray(params["kernel"], np.float64) + np.arange(5)
    np.testing.assert_allclose(module.apply({"params": params}, x), expected, atol=1e-5)


def test_parameters_may_be_stored_in_another_type_than_activations():
    x = jnp.ones((1, 4))
    module = Projection(5, use_bias=True, dtype="bfloat16", param_dtype="float32")
    params = module.init(jax.random.key(0), x)["params"]
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert module.apply({"params": params}, x).dtype == jnp.bfloat16
    narrow = Projection(5, param_dtype="bfloat16").init(jax.random.key(0), x)["params"]
    assert narrow["kernel"].dtype == jnp.bfloat16
