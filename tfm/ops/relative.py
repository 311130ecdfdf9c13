"""Sums over the pairs of a block that share a distance.

Where queries and keys are at consecutive positions, n of one and m of the other have n + m - 1 distances.  Entry (i, j)
of the block belongs to distance j - i, so with row i shifted by i the distances stand in columns.

Reference: Huang et al. (2018), Music Transformer, section 3.4.1, the skewing of relative logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.tokens import Array, Tokens


def key_run(query: Tokens, key: Tokens) -> int | None:
    """The keys come in runs of that many consecutive positions, and the queries in one; None: not known to."""
    runs = _run(query), _run(key)
    return runs[1] if runs[0] == query.positions.shape[1] else None


def _run(tokens: Tokens) -> int | None:
    if tokens.run is not None:
        return tokens.run
    positions = tokens.positions
    if isinstance(positions, np.ndarray) and len(positions) == 1 and (np.diff(positions[0]) == 1).all():
        return positions.shape[1]
    return None


def distances(query: Tokens, key: Tokens, run: int) -> Array:
    """The distances, key minus query, from each run of keys to the queries: [s, n + run - 1]."""
    n = query.positions.shape[1]
    first = jnp.asarray(key.positions)[0, ::run] - jnp.asarray(query.positions)[0, 0]
    return first[:, None] + np.arange(1 - n, run)


def look_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """table[rows] as a product, whose gradient is a product too: [R, D], [...] -> [..., D]."""
    chosen = jax.nn.one_hot(rows, table.shape[0], dtype=table.dtype)
    return jnp.matmul(chosen, table, precision=lax.Precision.HIGHEST)


def collect(x: jax.Array, run: int) -> jax.Array:
    """Numbers per query and key [..., n, s * m] -> per query and distance [..., s, n, n + m - 1], zeros where none is.

    Example:
      >>> collect(jnp.array([[1, 2, 3], [4, 5, 6]]), 3).tolist()
      [[[0, 1, 2, 3], [4, 5, 6, 0]]]
    """
    *leading, n, keys = x.shape
    x = jnp.moveaxis(x.reshape(*leading, n, keys // run, run), -2, -3)
    if n == 1:
        return x
    count = n + run - 1
    none = [(0, 0)] * len(leading) + [(0, 0)]
    flat = jnp.pad(x, [*none, (0, 0), (0, n - 2)]).reshape(*x.shape[:-2], -1)
    return jnp.pad(flat, [*none, (n - 1, 1)]).reshape(*x.shape[:-1], count)
