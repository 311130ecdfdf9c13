"""Products of two matrices, summed in float32 at least, in the form that the device multiplies fastest."""

import math

import jax
import jax.numpy as jnp


def contract(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Multiply two arrays over one axis of each.

    Args:
        a, b: float arrays of one type.
        axes: the axis of a and the axis of b that are summed over.

    Returns:
        the other axes of a, then those of b; float32, or wider where the operands are.

    Example:
        >>> contract(jnp.ones((2, 3)), jnp.ones((4, 3)), (1, 1)).tolist()[0]
        [3.0, 3.0, 3.0, 3.0]
    """
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, ((axes[:1], axes[1:]), ((), ())), preferred_element_type=wide)


def row_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply two matrices over their rows, as the gradient of a weight matrix needs it: x^T y.

    XLA's CPU backend multiplies bfloat16 operands as they are only where the left one is summed over its last axis;
    else it makes float32 copies of both. So x is turned over first, for a tenth of the product's time, and the product
    takes less than half of it.

    Args:
        x: [N, I] float.
        y: [N, O] float of x's type.

    Returns:
        [I, O], float32 or wider.

    Example:
        >>> row_product(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.ones((2, 1))).tolist()
        [[4.0], [6.0]]
    """
    if jax.default_backend() == "cpu" and jnp.finfo(x.dtype).bits < 32:
        return contract(turned(x), y, (1, 0))
    return contract(x, y, (0, 0))


def turned(x: jax.Array) -> jax.Array:
    """x^T as an array of its own: XLA folds a plain transposition into the product that reads it, but not this one.

    Args:
        x: [N, I].

    Returns:
        [I, N].

    Example:
        >>> turned(jnp.array([[1, 2], [3, 4]])).tolist()
        [[1, 3], [2, 4]]
    """
    rows, columns = x.shape
    block = math.gcd(columns, 16)
    return x.reshape(rows, columns // max(block, 1), block).transpose(1, 2, 0).reshape(columns, rows)
