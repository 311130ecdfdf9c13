"""int8 and bfloat16 weights against NumPy in float64, and the bound on an output's error."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tfm.ops.narrow import LARGE, narrow_projection, quantize


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_quantize_is_the_largest_over_127_in_each_channel(axis, size):
    weight = (size * np.random.default_rng(0).normal(size=(7, 12))).astype(np.float32)
    q, scale = quantize(jnp.asarray(weight), axis)
    expected = np.abs(weight.astype(np.float64)).max(axis, keepdims=True) / 127
    np.testing.assert_allclose(scale, expected.squeeze(axis), rtol=1e-6)
    assert q.dtype == jnp.int8 and np.abs(np.asarray(q, int)).max() == 127
    assert (np.abs(np.asarray(q, np.float64) * expected - weight) <= 0.5001 * expected).all()


def test_a_channel_of_zeros_stays_zero():
    q, scale = quantize(jnp.zeros((3, 2)), 0)
    assert not np.any(q) and not np.any(scale)


def test_an_output_is_off_by_no_more_than_stated():
    random = np.random.default_rng(1)
    weight, x = random.normal(size=(64, 10)), random.normal(size=(5, 64)).astype(ml_dtypes.bfloat16)
    q, scale = quantize(jnp.asarray(weight, jnp.float32), 0)
    y = np.asarray(narrow_projection(jnp.asarray(x), q, scale=scale), np.float64)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(y, wide @ (np.asarray(q, np.float64) * np.asarray(scale, np.float64)), atol=1e-4)
    bound = np.asarray(scale, np.float64) / 2 * np.abs(wide).sum(1, keepdims=True)
    error = np.abs(y - wide @ weight)
    assert (error <= bound * 1.001).all() and error.max() > 0.01 * bound.max()


@pytest.mark.parametrize(("rows", "width"), [(3, 4), (1, 4), (1, 4096)])
def test_bfloat16_products_round_both_operands_and_nothing_else(rows, width):
    random = np.random.default_rng(2)
    shapes = (rows, 200), (200, width), (width,)
    x, weight, bias = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    assert width == 4 or weight.size >= LARGE
    y = narrow_projection(jnp.asarray(x), jnp.asarray(weight, jnp.bfloat16), jnp.asarray(bias))
    rounded = [a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, weight)]
    np.testing.assert_allclose(y, rounded[0] @ rounded[1] + bias, atol=5e-5)
