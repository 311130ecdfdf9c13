"""What callers give, as arrays: a list or a NumPy array is taken, integers where floats are meant are refused."""

from typing import Any

import jax
import jax.numpy as jnp


def float_array(x: Any, name: str) -> jax.Array:
    """An array of floats; a result of the input's dtype would cut the fractions off integers.

    Example:
        >>> float_array([1.0, 2.0], "x").dtype
        dtype('float32')
    """
    return _array_of(x, name, jnp.floating, "float")


def integer_array(x: Any, name: str) -> jax.Array:
    """An array of integers.

    Example:
        >>> integer_array([1, 2], "targets").dtype
        dtype('int32')
    """
    return _array_of(x, name, jnp.integer, "int")


def _array_of(x: Any, name: str, kind: Any, wanted: str) -> jax.Array:
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} has dtype {array.dtype}; it must be {wanted}")
    return array
