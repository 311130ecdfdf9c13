"""Weights in fewer bits than the model was trained with: bfloat16, or int8 with a scale for each output channel."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LARGE, PADDED_ROWS = 1 << 19, 8
"""A CPU multiplies one row of bfloat16 number by number, on one core. From so many weights on, a product of so many
rows, all but one of them zeros, takes less time."""


def quantize(weight: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 with one scale for each output channel, symmetric: w ~ scale * q with scale = max |w| / 127 over `axis`.

    Every weight is off by at most scale / 2, so an output sum_i x_i w_i is off by at most scale / 2 * sum_i |x_i|.

    Args:
        weight: float, such as a kernel [in, out] with axis 0, or an output table [V, M] with axis 1.
        axis: what a product with the weight sums over.

    Returns:
        int8 of the weight's shape, and float32 without that axis.

    Example:
        >>> q, scale = quantize(jnp.array([[1.0, 0.0], [-2.0, 0.0]]), axis=0)
        >>> q.tolist(), (127 * scale).tolist()
        ([[64, 0], [-127, 0]], [2.0, 0.0])
    """
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / 127.0
    q = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return q, jnp.squeeze(scale, axis)


def is_narrowed(matrix: jax.Array, stored: DTypeLike) -> bool:
    """Whether a matrix of parameters of the type `stored` was narrowed after training; one cast to another type, such
    as all of a model's to float64, is not.

    Example:
        >>> [is_narrowed(jnp.zeros((2, 2), kind), jnp.float32) for kind in (jnp.bfloat16, jnp.float16, jnp.float32)]
        [True, False, False]
    """
    return matrix.dtype in (jnp.bfloat16, jnp.int8) and matrix.dtype != jnp.dtype(stored)


def narrow_projection(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, *,
                      scale: jax.Array | None = None, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """y = x W + b for a matrix stored in fewer bits than activations: W = kernel, or scale * kernel where it is int8.

    The operands of the product are bfloat16, which holds every int8 exactly; it is summed in float32.

    Args:
        x: [..., in] float.
        kernel: [in, out] bfloat16 or int8.
        bias: [out] float, or None.
        scale: [out] float32 for an int8 kernel.
        dtype: of the result.

    Returns:
        [..., out] array of `dtype`.

    Example:
        >>> narrow_projection(jnp.ones((1, 2)), *map(jnp.asarray, ([[64], [-127]],)), scale=jnp.array([0.5])).tolist()
        [[-31.5]]
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)
    if len(rows) == 1 and kernel.size >= LARGE and jax.default_backend() == "cpu":
        rows = jnp.pad(rows, ((0, PADDED_ROWS - 1), (0, 0)))
    y = jnp.matmul(rows, kernel.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    y = y[: x.size // x.shape[-1]].reshape(*x.shape[:-1], -1)
    y = y if scale is None else y * scale
    return (y if bias is None else y + bias).astype(dtype)
