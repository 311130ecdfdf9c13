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


LARGE = 1 << 16
"""From so many weights on, two cores multiply a row faster than one, and activations are worth being stored."""


def times_matrix(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply the last axis of x by a matrix.

    XLA's CPU backend multiplies a single row on one core, but the products of a batch on all of them. So the row is cut
    in two, each half with its half of the matrix, which stays as it lies: x W = x_1 W_1 + x_2 W_2.

    Args:
        x: [..., in] float.
        matrix: [in, out] float of x's type.

    Returns:
        [..., out], float32 or wider.

    Example:
        >>> times_matrix(jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0], [1.0, 3.0]])).tolist()
        [[3.0, 6.0]]
    """
    size, features = matrix.shape
    alone = x.size == size and size % 2 == 0 and matrix.size >= LARGE and jnp.finfo(x.dtype).bits >= 32
    if not (alone and jax.default_backend() == "cpu"):
        return contract(x, matrix, (x.ndim - 1, 0))
    batched = (((2,), (1,)), ((0,), (0,)))
    parts = jax.lax.dot_general(x.reshape(2, 1, size // 2), matrix.reshape(2, size // 2, features), batched)
    return (parts[0] + parts[1]).reshape(*x.shape[:-1], features)


def row_product(x: jax.Array, y: jax.Array, after: jax.Array | None = None) -> jax.Array:
    """Multiply two matrices over their rows, as the gradient of a weight matrix needs it: x^T y.

    A CPU multiplies fastest where the left operand is summed over its last axis: else XLA's CPU backend packs a large
    float32 operand number by number, and makes float32 copies of bfloat16 ones. So x is turned over first, for a tenth
    of the product's time: a float32 one only where `after` is given and there is one device, since several would have
    to exchange a number of it.

    Args:
        x: [N, I] float.
        y: [N, O] float of x's type.
        after: an array that has to be there before the product is begun, as far as XLA can tell.

    Returns:
        [I, O], float32 or wider.

    Example:
        >>> row_product(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.ones((2, 1))).tolist()
        [[4.0], [6.0]]
    """
    if jax.default_backend() != "cpu":
        return contract(x, y, (0, 0))
    if after is not None and after.size and jax.device_count() == 1 and x.shape[1] * y.shape[1] >= LARGE:
        return contract(turned(stored_after(x, after)), y, (1, 0))
    if jnp.finfo(x.dtype).bits < 32:
        return contract(turned(x), y, (1, 0))
    return contract(x, y, (0, 0))


@jax.jit
def stored_after(x: jax.Array, computed: jax.Array) -> jax.Array:
    """x, as an array of its own that is not there before `computed` is.

    Barriers are gone when XLA's CPU backend decides what to fuse, and a reader in another order, such as a
    transposition, makes x again from its inputs, element by element. XLA sees no further than a conditional, whose
    branches give the same here.

    Args:
        x: any shape.
        computed: any shape, of at least one number.

    Returns:
        array of x's shape and type.

    Example:
        >>> stored_after(jnp.arange(3), jnp.zeros((2, 2))).tolist()
        [0, 1, 2]
    """
    first = computed[(0,) * computed.ndim]
    return jax.lax.cond(first > 0, lambda: x, lambda: jax.lax.optimization_barrier(x))


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
