"""The product of activations with a weight matrix, with a backward pass of its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from tfm.ops.arguments import float_array
from tfm.ops.products import contract, row_product, times_matrix
from tfm.ops.tokens import vary_alike


def projection(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, *,
               dtype: DTypeLike | None = None) -> jax.Array:
    """Multiply the last axis of x by a matrix and add a bias.

        y = x W + b

    Operands are rounded to `dtype`; products and the bias are summed in float32 (or wider), and the sum is rounded to
    `dtype` once. The backward pass stores the incoming gradient before the two products that read it, dx = dy W^T and
    dW = x^T dy, so that the element-wise work behind it is not repeated in each reader's order, and sums db in float32.
    For a large matrix on one CPU device x is stored for its reader, too, and dx comes before dW, so that XLA knows the
    matrix to be read before an update that needs dW: else it would copy every matrix at each training step.

    Args:
        x: [..., in] float.
        kernel: [in, out] float.
        bias: [out] float, or None.
        dtype: of operands and result; x's where None.

    Returns:
        [..., out] array of `dtype`.

    Raises:
        ValueError: axes that do not fit, integers.

    Example:
        >>> projection(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4)).tolist()[0]
        [4.0, 4.0, 4.0, 4.0]
    """
    x, kernel = float_array(x, "x"), float_array(kernel, "kernel")
    bias = None if bias is None else jnp.asarray(bias)
    if kernel.ndim != 2 or x.shape[-1:] != kernel.shape[:1]:
        raise ValueError(f"projection needs x [..., in] and kernel [in, out], got {x.shape} and {kernel.shape}")
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"projection needs a bias of shape {kernel.shape[1:]}, got {bias.shape}")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    return _product(*vary_alike((x.astype(dtype), kernel, bias)), dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    y = times_matrix(x, kernel.astype(dtype))
    return (y if bias is None else y + bias.astype(y.dtype)).astype(dtype)


def _product_forward(x: Any, kernel: Any, bias: Any, dtype: jnp.dtype) -> tuple[jax.Array, tuple]:
    values = x.value, kernel.value, None if bias is None else bias.value
    return _product(*values, dtype), (*values, () if x.perturbed else None)


def _product_backward(dtype: jnp.dtype, saved: tuple, dy: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, kernel, bias, sought = saved  # `sought` is None where nobody asks for dx, which XLA then leaves out
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros(dy.shape, dy.dtype)
    dy = jax.lax.optimization_barrier(dy.reshape(-1, dy.shape[-1]))
    dx = contract(dy, kernel.astype(dtype), (1, 1)).astype(x.dtype)
    dw = row_product(x.reshape(dx.shape), dy, after=dy if sought is None else dx).astype(kernel.dtype)
    dx = dx.reshape(x.shape)
    if bias is None:
        return dx, dw, None
    return dx, dw, jnp.sum(dy, axis=0, dtype=jnp.promote_types(dtype, jnp.float32)).astype(bias.dtype)


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)
