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
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {array.dtype}; it must be float")
    return array


def integer_array(x: Any, name: str) -> jax.Array:
    """An array of integers.

    Example:
        >>> integer_array([1, 2], "targets").dtype
        dtype('int32')
    """
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {array.dtype}; it must be int")
    return array
