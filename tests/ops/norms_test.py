"""The norms against their formulas in NumPy's float64, in value and gradient, and what their backward pass keeps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.ops.norms import layer_norm, rms_norm

EPSILON = 1e-3


def _formula(x: np.ndarray, scale: np.ndarray, bias: np.ndarray | float, centred: bool) -> np.ndarray:
    shifted = x - x.mean(-1, keepdims=True) * centred
    return shifted / np.sqrt((shifted**2).mean(-1, keepdims=True) + EPSILON) * scale + bias


def _slope(function: Callable[[np.ndarray], np.ndarray], at: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Gradient of sum(outer * function) by central differences, one entry at a time."""
    slope, step = np.zeros_like(at), 1e-6
    for place in np.ndindex(at.shape):
        change = np.zeros_like(at)
        change[place] = step
        slope[place] = (outer * (function(at + change) - function(at - change))).sum() / (2 * step)
    return slope


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4), (2, 1)])
def test_value_and_gradients(kind: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, outer = 3.0 + rng.normal(size=shape), rng.normal(size=shape)
    scale, bias = rng.normal(size=shape[-1]), rng.normal(size=shape[-1])
    with_bias, centred = kind == "layer", kind != "rms"
    norm = jax.jit(lambda x, scale, bias: layer_norm(x, scale, bias if with_bias else None, epsilon=EPSILON) if centred
                   else rms_norm(x, scale, epsilon=EPSILON))
    y, pull = jax.vjp(norm, *(jnp.asarray(a, jnp.float32) for a in (x, scale, bias)))
    dx, d_scale, d_bias = pull(jnp.asarray(outer, jnp.float32))
    shift = bias * with_bias
    np.testing.assert_allclose(y, _formula(x, scale, shift, centred), rtol=2e-5, atol=2e-5)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(dx, _slope(lambda x: _formula(x, scale, shift, centred), x, outer), **close)
    np.testing.assert_allclose(d_scale, _slope(lambda s: _formula(x, s, shift, centred), scale, outer), **close)
    np.testing.assert_allclose(d_bias, with_bias * outer.reshape(-1, shape[-1]).sum(0), **close)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_narrow_inputs_are_summed_in_float32(norm: Callable[..., jax.Array]) -> None:
    """The gradient of the scale sums 4,096 ones, which bfloat16 cannot; those of x and the output are x's type."""
    x, scale = jnp.tile(jnp.array([1.0, -1.0], jnp.bfloat16), (4096, 8)), jnp.ones(16)
    y, pull = jax.vjp(lambda x, scale: norm(x, scale, epsilon=0.0), x, scale)
    dx, d_scale = pull(x)
    assert y.dtype == dx.dtype == jnp.bfloat16 and d_scale.dtype == jnp.float32
    np.testing.assert_allclose(d_scale, 4096.0, rtol=1e-6)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_only_the_input_is_kept(norm: Callable[..., jax.Array]) -> None:
    x, scale = jnp.ones((8, 64), jnp.bfloat16), jnp.ones(64)
    kept = jax.tree.leaves(jax.vjp(norm, x, scale)[1])
    assert sum(a.size for a in kept if a.ndim == 2) <= x.size + 2 * len(x)
