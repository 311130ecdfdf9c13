"""Choosing from a large vocabulary: the first maximum, the k best, a random draw.

A row of logits is cut into blocks of neighbouring ids. One pass reduces each block to one number; the rest of the work
looks at those numbers and at the few blocks that matter. Sorting a whole row, or asking XLA for its argmax, costs the
CPU about ten times as much.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128


def _by_block(x: jax.Array, reduce: str) -> jax.Array:
    """Reduce x [N, V] over blocks of ids to [N, ceil(V / BLOCK)]."""
    rows, size = x.shape
    whole = size // BLOCK * BLOCK
    blocks = getattr(x[:, :whole].reshape(rows, -1, BLOCK), reduce)(axis=-1)
    if whole == size:
        return blocks
    rest = getattr(x[:, whole:], reduce)(axis=-1, keepdims=True)
    return jnp.concatenate([blocks, rest], axis=-1)


def _open_blocks(x: jax.Array, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The entries of the chosen blocks [N, C] of x [N, V]: values (-inf past V) and ids, both [N, C * BLOCK]."""
    ids = (blocks[:, :, None] * BLOCK + jnp.arange(BLOCK)).reshape(len(x), -1)
    values = jnp.take_along_axis(x, jnp.minimum(ids, x.shape[-1] - 1), axis=-1)
    return jnp.where(ids < x.shape[-1], values, -jnp.inf), ids


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of each row and their ids, largest first; of equals the smaller id first.

    The k blocks with the largest maxima hold the k largest entries, so only those blocks are looked into.

    Args:
        x: [N, V] float32.
        k: how many, 1 <= k <= V.

    Returns:
        Values [N, k] float32 and ids [N, k] int32.

    Example:
        >>> values, ids = top_k(jnp.array([[1.0, 3.0, 2.0, 3.0]]), 3)
        >>> ids.tolist()
        [[1, 3, 2]]
    """
    if x.shape[-1] <= max(2, k) * BLOCK:
        return lax.top_k(x, k)
    _, blocks = lax.top_k(_by_block(x, "max"), k)
    values, ids = _open_blocks(x, jnp.sort(blocks, axis=-1))
    values, place = lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, place, axis=-1)


def first_maximum(x: jax.Array) -> jax.Array:
    """The id of each row's largest entry, the smallest id where several are largest.

    Args:
        x: [N, V] float32.

    Returns:
        [N] int32.
    """
    return top_k(x, 1)[1][:, 0]


def log_sum_exp(x: jax.Array, near: jax.Array | None = None) -> jax.Array:
    """log(sum(exp(x))) of each row, [..., V] -> [...]; -inf entries count nothing.

    Args:
        x: [..., V] float32.
        near: [...] an entry of each row that is likely one of its largest, which saves looking for the largest. The
            result does not depend on it: where the exponentials overflow, they are computed again.

    Example:
        >>> x = jnp.array([0.0, 1000.0])
        >>> float(log_sum_exp(x)), float(log_sum_exp(x, near=x[0]))
        (1000.0, 1000.0)
    """
    if near is None:
        return _log_sum_exp(x, jnp.max(x, axis=-1))
    found = _log_sum_exp(x, near)
    return lax.cond(jnp.all(jnp.isfinite(found)), lambda: found, lambda: log_sum_exp(x))


def _log_sum_exp(x: jax.Array, shift: jax.Array) -> jax.Array:
    """shift + log(sum(exp(x - shift))), [..., V] and [...] -> [...].

    The sum is a product with ones: XLA's CPU backend would compute the exponentials of a plain sum one by one.
    """
    shift = jnp.where(jnp.isfinite(shift), shift, 0.0)[..., None]
    terms = jnp.where(x > -jnp.inf, jnp.exp(x - shift), 0.0)
    total = jnp.matmul(terms, jnp.ones((x.shape[-1], 1), x.dtype), precision=lax.Precision.HIGHEST)
    return (shift + jnp.log(total))[..., 0]


def take(x: jax.Array, ids: jax.Array) -> jax.Array:
    """One entry of each row: x [N, V], ids [N] -> [N]."""
    return jnp.take_along_axis(x, ids[:, None], axis=-1)[:, 0]


def _first_above(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per row the first place whose running sum exceeds target [N], never one of weight 0, and the sum before it."""
    sums = jnp.cumsum(weights, axis=-1)
    place = jnp.sum(sums <= target[:, None], axis=-1)
    places = jnp.arange(weights.shape[-1])
    place = jnp.minimum(place, jnp.max(jnp.where(weights > 0, places, 0), axis=-1))
    return place, take(sums, place) - take(weights, place)


def draw(x: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draw an id of each row with probability softmax(x), by inverting the cumulative distribution.

    Args:
        x: [N, V] float32; ids with -inf are never drawn.
        uniform: [N] float32 in [0, 1), one random number a row.

    Returns:
        [N] int32.

    Example:
        >>> draw(jnp.log(jnp.array([[0.5, 0.0, 0.5]])), jnp.array([0.7])).tolist()
        [2]
    """
    best = jnp.max(x, axis=-1, keepdims=True)
    best = jnp.where(jnp.isfinite(best), best, 0.0)
    sums = _by_block(jnp.exp(x - best), "sum")
    target = uniform * jnp.sum(sums, axis=-1)
    block, before = _first_above(sums, target)
    values, ids = _open_blocks(x, block[:, None])
    place, _ = _first_above(jnp.exp(values - best), target - before)
    return take(ids, place).astype(jnp.int32)
