"""Dropout whose bits come from a counter hash: cheap enough to be made again in the backward pass."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.arguments import float_array

Bits = Literal["hash", "threefry"]

# Odd multipliers near 2**32 / golden ratio: (row, column) pairs closer than about 2**16 never share a counter.
_ROW = np.uint32(0x9E3779B1)
_COLUMN = np.uint32(0x85EBCA77)


def hash_bits(key: jax.Array, *coordinates: jax.Array) -> jax.Array:
    """Make 32 random bits for every tuple of integer coordinates.

    The bits depend on the key and on the coordinates alone, never on the shape of the array or of the mesh: whoever
    asks for one block of an array gets the bits that the whole array has there.

    The two last coordinates make a counter, `row * c1 + column * c2`; leading ones are mixed into the seed first. A
    counter goes through the two multiply and xor-shift rounds of a 32-bit finaliser, with one half of the 64-bit
    seed added before each round.

    Quality, as the tests measure it: every byte and every run of eight keep bits uniform (chi-square), no correlation
    between neighbours, rows, keys folded from neighbouring numbers or shards, half of the bits changed by each bit of
    a coordinate, and 1e8 draws uniform in 16-bit words and without serial correlation. Within one plane of rows and
    columns the words are those of a permutation: they do not repeat, as random ones would now and then.

    Args:
        key: a typed random key, or the legacy `[2] uint32` kind.
        *coordinates: one or more integer arrays, broadcastable against each other.

    Returns:
        uint32 array of the broadcast shape.

    Example:
        >>> rows, columns = jnp.arange(4)[:, None], jnp.arange(6)
        >>> whole = hash_bits(jax.random.key(0), rows, columns)
        >>> bool((hash_bits(jax.random.key(0), rows[2:], columns[3:]) == whole[2:, 3:]).all())
        True

    Reference: Wellons, "Prospecting for Hash Functions", 2018 (multipliers and shifts); Salmon et al., "Parallel
    Random Numbers: As Easy as 1, 2, 3", 2011 (counter-based generators).
    """
    if not coordinates:
        raise ValueError("hash_bits needs one coordinate at least, got none")
    return _hash(_words(key), *map(_u32, coordinates))


def keep_mask(key: jax.Array, rate: float, *coordinates: jax.Array) -> jax.Array:
    """Say which entries dropout keeps, from the entries' coordinates.

    Args:
        key: random key.
        rate: probability of dropping, in [0, 1).
        *coordinates: integer arrays, broadcastable, e.g. batch, head, query and key index of attention weights.

    Returns:
        bool array of the broadcast shape: True = keep, with probability 1 - rate.

    Raises:
        ValueError: a rate outside [0, 1).

    Example:
        >>> keep = keep_mask(jax.random.key(0), 0.25, jnp.arange(100)[:, None], jnp.arange(100))
        >>> keep.shape, bool(abs(keep.mean() - 0.75) < 0.02)
        ((100, 100), True)
    """
    _check_rate(rate)
    return hash_bits(key, *coordinates) < np.uint32(min(round((1.0 - rate) * 2**32), 2**32 - 1))


def dropout(x: jax.Array, rate: float, key: jax.Array | None, *, bits: Bits = "hash") -> jax.Array:
    """Set entries to zero with probability `rate` and scale the others up, so that the mean stays.

        y = keep * x / (1 - rate),   keep ~ Bernoulli(1 - rate)

    Args:
        x: [..., M] float.
        rate: probability of dropping, in [0, 1); 0 gives x back.
        key: random key; the same key and shape give the same mask on every mesh. May be None where the rate is 0.
        bits: "hash", the counter hash of `hash_bits`, or "threefry", jax.random's own generator.

    Returns:
        array of x's shape and dtype.

    Raises:
        ValueError: an x of integers, a rate outside [0, 1), an absent key, an unknown kind of bits.

    Example:
        >>> y = dropout(jnp.ones(8), 0.5, jax.random.key(0))
        >>> sorted(set(y.tolist()))
        [0.0, 2.0]

    Reference: Srivastava et al., "Dropout", 2014, section 4.
    """
    _check_rate(rate)
    x = float_array(x, "x")
    if rate == 0.0:
        return x
    if key is None:
        raise ValueError(f"dropout with rate {rate} needs a key, got None")
    if bits == "hash":
        keep = keep_mask(key, rate, *_coordinates(x.shape))
    elif bits == "threefry":
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    else:
        raise ValueError(f"bits must be 'hash' or 'threefry', got {bits!r}")
    return jnp.where(keep, x * jnp.asarray(1.0 / (1.0 - rate), x.dtype), jnp.zeros((), x.dtype))


def _check_rate(rate: float) -> None:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate must be in [0, 1), got {rate}")


@functools.partial(jax.jit, inline=True)  # traced once for all the arrays of one shape
def _hash(words: jax.Array, *coordinates: jax.Array) -> jax.Array:
    first, second = _seed(words)
    *outer, row, column = (jnp.uint32(0), *coordinates) if len(coordinates) == 1 else coordinates
    for coordinate in outer:
        first, second = _mix(coordinate * _ROW + first, second), _mix(coordinate * _COLUMN + second, first)
    return _mix(row * _ROW + column * _COLUMN + first, second)


def _words(key: jax.Array) -> jax.Array:
    """The words of one random key."""
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if getattr(key, "ndim", None) != (0 if typed else 1):
        given = f"of shape {key.shape}" if hasattr(key, "shape") else repr(key)
        raise ValueError(f"the random key is {given}; it must be one key, as `jax.random.key` makes it")
    return jax.random.key_data(key) if typed else key


def _seed(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two words that depend on every bit of a key's."""
    first, second = jnp.uint32(0x243F6A88), jnp.uint32(0x85A308D3)
    for word in words.reshape(-1):
        first, second = _mix(word * _ROW + first, second), _mix(word * _COLUMN + second, first)
    return first, second


def _mix(counter: jax.Array, salt: jax.Array) -> jax.Array:
    x = counter ^ (counter >> 16)
    x *= np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) + salt
    x *= np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _u32(x: jax.Array) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _coordinates(shape: tuple[int, ...]) -> list[jax.Array]:
    """One index array per axis of a shape, broadcastable against each other; one number for a scalar."""
    rank = len(shape)
    return [jnp.arange(n, dtype=jnp.uint32).reshape([n if a == axis else 1 for a in range(rank)])
            for axis, n in enumerate(shape)] or [jnp.uint32(0)]
