"""The projection against NumPy in float64, in value and gradient, and its backward pass in the compiled program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.ops.projection import projection


def _inputs(shape: tuple[int, ...], features: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=shape),
        rng.normal(size=(shape[-1], features)),
        rng.normal(size=features),
        rng.normal(size=(*shape[:-1], features)),
    )


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradients(shape: tuple[int, ...], with_bias: bool) -> None:
    x, kernel, bias, outer = _inputs(shape, 6)
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, kernel, bias)]
    y, pull = jax.vjp(lambda x, k, b: projection(x, k, b if with_bias else None), *arrays)
    dx, dk, db = pull(jnp.asarray(outer, jnp.float32))
    np.testing.assert_allclose(y, x @ kernel + with_bias * bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, outer @ kernel.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dk, np.einsum("ni,no->io", x.reshape(-1, 5), outer.reshape(-1, 6)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(db, with_bias * outer.reshape(-1, 6).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_types(dtype: jnp.dtype | None) -> None:
    """Operands are rounded once, and 4,096 products of 1 do not stop at 256, as sums in bfloat16 would."""
    x, kernel = jnp.ones((2, 4096), dtype or jnp.float32), jnp.ones((4096, 3), jnp.float32)
    y, pull = jax.vjp(lambda x, k: projection(x, k, dtype=dtype), x, kernel)
    dx, dk = pull(jnp.ones_like(y))
    assert y.dtype == dx.dtype == (dtype or jnp.float32) and dk.dtype == jnp.float32
    np.testing.assert_array_equal(np.float32(y), 4096.0)
    rounded = projection(jnp.ones((1, 1)), jnp.full((1, 1), 1.001, jnp.float32), dtype=jnp.bfloat16)
    assert float(rounded[0, 0]) == 1.0


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        x, kernel, bias, _ = _inputs((3, 5), 4)
        y = projection(jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(bias))
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, x @ kernel + bias, rtol=1e-13)


def test_gradient_of_the_weights_needs_no_transposed_activations() -> None:
    """dW contracts the tokens of x and dy as they lie, and dy is stored before its readers."""

    def loss(x, kernel):
        return jnp.sum(jnp.sin(projection(jnp.tanh(x), kernel)))

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(jnp.ones((2, 3, 8)), jnp.ones((8, 4))).as_text()
    assert "optimization_barrier" in text
    assert "contracting_dims = [0] x [0]" in text


def _updated(layers, x, outer, product):
    """Two layers' matrices after a step of gradient descent."""

    def loss(layers):
        y = x
        for kernel in layers:
            y = jnp.where(y > 0.5, y, 0.1 * y)  # cheap, so that XLA makes it again for a reader in another order
            y = product(y, kernel)
        return jnp.sum(y * outer)

    return jax.tree.map(lambda kernel, d_kernel: kernel - 0.1 * d_kernel, layers, jax.grad(loss)(layers))


@pytest.mark.skipif(jax.default_backend() != "cpu" or jax.device_count() > 1, reason="about one CPU device")
def test_a_large_step_reads_stored_activations_and_updates_matrices_in_place() -> None:
    layers, x = [jnp.ones((256, 256)) * 0.1] * 2, jnp.ones((64, 256))
    compiled = {}
    for product in (projection, jnp.matmul):
        step = jax.jit(functools.partial(_updated, product=product), donate_argnums=0)
        compiled[product] = step.lower(layers, x, x).compile().as_text()
    copies = {product: len(re.findall(r"copy\(%layers", text)) for product, text in compiled.items()}
    assert copies[projection] == 0 < copies[jnp.matmul]
    assert compiled[projection].count(" conditional(") == 2
    transposing = re.findall(r"%(\S*) \(.*\) -> f32\[256,64\] \{(.*?)^\}", compiled[projection], re.S | re.M)
    assert transposing and all("select" not in body for _, body in transposing)


@pytest.mark.parametrize("sought, products", [(0, 2), (1, 2), ((0, 1), 3)])
def test_only_gradients_that_are_sought_are_computed(sought: int | tuple, products: int) -> None:
    x, kernel = jnp.ones((64, 256)), jnp.ones((256, 512))
    gradient = jax.jit(jax.grad(lambda x, kernel: jnp.sum(jnp.sin(projection(x, kernel))), argnums=sought))
    analysis = gradient.lower(x, kernel).compile().cost_analysis()
    assert round(analysis["flops"] / (2 * 64 * 256 * 512)) == products


@pytest.mark.parametrize("shape", [(0, 256), (3, 0, 256)])
def test_a_large_matrix_and_no_rows(shape: tuple[int, ...]) -> None:
    gradients = jax.grad(lambda x, k: jnp.sum(projection(x, k)), argnums=(0, 1))(jnp.ones(shape), jnp.ones((256, 300)))
    assert gradients[0].shape == shape and not gradients[1].any()


def test_a_result_that_nobody_uses_has_zero_gradients() -> None:
    kernel = jnp.ones((256, 256))
    d_x, d_kernel = jax.grad(lambda x, k: (jnp.sum(x), projection(x, k))[0], argnums=(0, 1))(jnp.ones((2, 256)), kernel)
    assert float(d_x.min()) == float(d_x.max()) == 1.0 and not d_kernel.any()


def test_large_gradients_against_numpy() -> None:
    x, kernel, bias, outer = _inputs((3, 70, 256), 300)
    _, pull = jax.vjp(projection, *(jnp.asarray(a, jnp.float32) for a in (x, kernel, bias)))
    dx, dk, db = pull(jnp.asarray(outer, jnp.float32))
    np.testing.assert_allclose(dx, outer @ kernel.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dk, np.einsum("bni,bno->io", x, outer), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(db, outer.sum((0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x, kernel, bias", [((2, 5), (4, 3), None), ((5,), (5, 3, 1), None), ((2, 5), (5, 3), (4,))])
def test_axes_that_do_not_fit(x: tuple, kernel: tuple, bias: tuple | None) -> None:
    with pytest.raises(ValueError, match="projection needs"):
        projection(jnp.ones(x), jnp.ones(kernel), None if bias is None else jnp.ones(bias))
