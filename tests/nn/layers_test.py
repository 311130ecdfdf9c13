"""How residual, dropout and norm are put around the sub-layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import AttentionPattern, ModelConfig
from tfm.nn import Layer

X = jax.random.normal(jax.random.key(5), (2, 3, 8))


def build(cross=False, **changes):
    config = ModelConfig(vocab_size=8, d_model=8, d_ff=12, num_heads=2, **changes)
    layer = Layer(config, AttentionPattern(), cross=cross)
    params = layer.init(jax.random.key(0), X, method="touch")["params"]
    return layer, jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), params)


def parts(layer, params):
    """The sub-layers as functions of one array."""
    def method(name, *args):
        return lambda x: layer.apply({"params": params}, x, *args, method=lambda m, x, *a: getattr(m, name)(x, *a))
    memory = layer.apply({"params": params}, X, method="project_memory") if layer.cross else None
    names = ["self_attention", "cross_attention", "feed_forward"] if layer.cross else ["self_attention", "feed_forward"]
    return [(method(n, memory) if n == "cross_attention" else method(n), method(f"{n}_norm")) for n in names], memory


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_order_of_norm_and_residual(norm_position, cross):
    layer, params = build(cross, norm_position=norm_position)
    sublayers, memory = parts(layer, params)
    x = X
    for sublayer, norm in sublayers:
        x = norm(x + sublayer(x)) if norm_position == "post" else x + sublayer(norm(x))
    actual, after = layer.apply({"params": params}, X, memory, self_arguments={})
    np.testing.assert_allclose(actual, x, atol=1e-5)
    assert after is None


def test_parallel_residual():
    layer, params = build(norm_position="pre", parallel_residual=True)
    ((attend, attend_norm), (transform, transform_norm)), _ = parts(layer, params)
    expected = X + attend(attend_norm(X)) + transform(transform_norm(X))
    np.testing.assert_allclose(layer.apply({"params": params}, X, self_arguments={})[0], expected, atol=1e-5)


def test_dropout_acts_on_the_output_of_a_sublayer_and_not_on_the_residual():
    """Pre-LN, attention switched off: x + dropout(f(norm(x))) differs from x by either 0 or f / (1 - rate)."""
    layer, params = build(norm_position="pre", dropout_rate=0.5)
    params = {**params, "self_attention": jax.tree.map(jnp.zeros_like, params["self_attention"])}
    (_, (transform, norm)), _ = parts(layer, params)
    y, _ = layer.apply({"params": params}, X, self_arguments={}, deterministic=False,
                       rngs={"dropout": jax.random.key(1)})
    difference, full = np.asarray(y - X), 2 * np.asarray(transform(norm(X)))
    dropped = np.abs(difference) < 1e-6
    np.testing.assert_allclose(difference[~dropped], full[~dropped], atol=1e-5)
    assert 0.2 < dropped.mean() < 0.8
