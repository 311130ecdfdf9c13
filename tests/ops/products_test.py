"""Products over rows against NumPy in float64, and what the CPU's compiler makes of them."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.ops import products
from tfm.ops.products import contract, row_product, stored_after, times_matrix, turned
from tfm.ops.projection import projection

CPU = Path("/proc/cpuinfo")
with_bfloat16 = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not CPU.exists() or "avx512_bf16" not in CPU.read_text(),
    reason="about XLA's CPU backend on a processor that multiplies bfloat16")


def _normal(shape: tuple[int, ...], dtype: jnp.dtype, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows, inner, outer", [(6, 32, 5), (7, 9, 4), (5, 1, 1), (0, 4, 3)])
def test_row_product_is_the_transposed_product(rows: int, inner: int, outer: int, dtype: jnp.dtype) -> None:
    """The operands are exact in float64, so only the float32 sums differ."""
    x, y = _normal((rows, inner), dtype), _normal((rows, outer), dtype, 1)
    found = jax.jit(row_product)(x, y)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.float64(x).T @ np.float64(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("first", [1.0, -1.0, np.nan])
@pytest.mark.parametrize("rows, inner, outer", [(6, 32, 5), (7, 9, 4), (1, 1, 1)])
def test_row_product_after_an_array(rows: int, inner: int, outer: int, first: float, dtype: jnp.dtype,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the array is: both branches give the same, in value, gradient and under vmap."""
    monkeypatch.setattr(products, "LARGE", 0)
    x, y, after = _normal((3, rows, inner), dtype), _normal((3, rows, outer), dtype, 1), jnp.full((rows, 2), first)
    exact = np.einsum("bni,bno->bio", np.float64(x), np.float64(y))
    np.testing.assert_allclose(jax.jit(row_product)(x[0], y[0], after), exact[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(row_product, (0, 0, None))(x, y, after), exact, rtol=1e-5, atol=1e-5)
    d_x, d_y = jax.grad(lambda a, b: jnp.sum(row_product(a, b, after)), argnums=(0, 1))(x[0], y[0])
    tolerance = dict(rtol=float(jnp.finfo(dtype).eps) * 2, atol=1e-2 if dtype != jnp.float32 else 1e-5)
    for found, other in ((d_x, y), (d_y, x)):
        sums = np.float64(other[0]).sum(1, keepdims=True)
        np.testing.assert_allclose(np.float64(found), np.broadcast_to(sums, found.shape), **tolerance)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_stored_after(shape: tuple[int, ...]) -> None:
    x = jnp.arange(np.prod(shape, dtype=int)).reshape(shape)
    for computed in (jnp.ones(()), -jnp.ones((2, 2)), jnp.full(3, jnp.nan)):
        np.testing.assert_array_equal(stored_after(x, computed), x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2,), (2, 3)])
@pytest.mark.parametrize("inner, outer", [(6, 5), (7, 4), (512, 256)])
def test_times_matrix(rows: tuple[int, ...], inner: int, outer: int, dtype: jnp.dtype,
                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A single row, in halves where their number is even, and several."""
    monkeypatch.setattr(products, "LARGE", 0)
    x, matrix = _normal((*rows, inner), dtype), _normal((inner, outer), dtype, 1)
    found = times_matrix(x, matrix)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.float64(x) @ np.float64(matrix), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU backend")
def test_a_single_row_is_multiplied_in_two_products_without_a_copy_of_the_matrix() -> None:
    x, matrix = _normal((1, 1, 512), jnp.float32), _normal((512, 256), jnp.float32)
    compiled = jax.jit(times_matrix).lower(x, matrix).compile()
    assert re.search(r"f32\[2,1,256\]\S* dot\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < matrix.nbytes / 8


@pytest.mark.parametrize("shape", [(3, 32), (4, 7), (1, 1), (5, 2), (0, 3), (2, 0)])
def test_turned(shape: tuple[int, int]) -> None:
    x = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(turned(jnp.asarray(x)), x.T)


def test_contract_keeps_float64() -> None:
    with jax.enable_x64(True):
        a, b = _normal((3, 5), jnp.float64), _normal((4, 5), jnp.float64, 1)
        np.testing.assert_allclose(contract(a, b, (1, 1)), np.asarray(a) @ np.asarray(b).T, rtol=1e-14)


@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_of_a_bfloat16_projection(with_bias: bool) -> None:
    """Against float64 on the same rounded numbers: products and the bias's sum are off by float32's rounding alone."""
    x, kernel = _normal((4, 96, 48), jnp.bfloat16), _normal((48, 32), jnp.float32, 1)
    bias, dy = _normal((32,), jnp.float32, 2) if with_bias else None, _normal((4, 96, 32), jnp.bfloat16, 3)
    y, pull = jax.vjp(lambda x, kernel, bias: projection(x, kernel, bias), x, kernel, bias)
    dx, dw, db = pull(dy)
    rows, wide = np.float64(x).reshape(-1, 48), np.float64(dy).reshape(-1, 32)
    rounded = np.float64(jnp.bfloat16(kernel))
    expected = rows @ rounded + (np.float64(bias) if with_bias else 0.0)
    np.testing.assert_allclose(np.float64(y).reshape(-1, 32), expected, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(np.float64(dx).reshape(-1, 48), wide @ rounded.T, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(dw, rows.T @ wide, rtol=1e-5, atol=1e-4)
    if with_bias:
        np.testing.assert_allclose(db, wide.sum(0), rtol=1e-5, atol=1e-4)


@with_bfloat16
def test_narrow_operands_stay_narrow() -> None:
    """The three products of a step read bfloat16 as it lies, none of them a float32 copy."""

    def products(function, *arguments) -> list[str]:
        text = jax.jit(function).lower(*arguments).compile().as_text()
        types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
        return [types[name] for pair in re.findall(r" dot\(%?([\w.-]+), %?([\w.-]+)\)", text) for name in pair]

    x, kernel = jnp.ones((2, 128, 64), jnp.bfloat16), jnp.ones((64, 32))
    step = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(projection(x, kernel)).astype(jnp.float32)), argnums=(0, 1))
    found = products(step, x, kernel)
    assert len(found) == 6 and set(found) == {"bf16"}
