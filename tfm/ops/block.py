"""One block of the score matrix: what the forward and the backward pass of blockwise attention share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tfm.ops.dense import Scoring
from tfm.ops.dropout import keep_mask
from tfm.ops.plan import Plan, Visits, block_positions, may_see
from tfm.ops.tokens import Array, Tokens

Sides = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # positions and places, queries and keys


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What every block of a chunk of rows of the batch and heads has in common."""

    plan: Plan
    scoring: Scoring
    batch: jax.Array  # [b]
    heads: jax.Array  # [h]
    positions: tuple[jax.Array, jax.Array]  # [n, B|1, block] of both sides
    places: tuple[jax.Array, jax.Array]  # [n, block] of both sides
    may_see: jax.Array | None  # [nq, nk] bool
    dropout_key: Any

    def tokens(self, i: Array, j: Array) -> tuple[Tokens, Tokens]:
        """The queries of block row i and the keys of block column j."""

        def side(axis: int, at: Array) -> Tokens:
            positions = self.positions[axis][at]
            positions = positions if positions.shape[0] == 1 else positions[self.batch]
            return Tokens(positions, self.places[axis][at], self.batch, self.heads, self.plan.consecutive)

        return side(0, i), side(1, j)

    def keep(self, i: Array, j: Array) -> jax.Array:
        """Which weights of block (i, j) dropout keeps."""
        rows, columns = self.places[0][i], self.places[1][j]
        at = self.batch[:, None, None, None], self.heads[:, None, None], rows[:, None], columns
        return keep_mask(self.dropout_key, self.scoring.dropout_rate, *at)

    def scores(self, products: jax.Array, q_i: jax.Array, scoring: Scoring, i: Array, j: Array) -> jax.Array:
        """The scores of block (i, j) [b, h, bq, bk] from its products, the rule aside."""
        query, key = self.tokens(i, j)
        return scoring.from_products(products, q_i, query, key)

    def visible(self, i: Array, j: Array) -> jax.Array:
        query, key = self.tokens(i, j)
        inside = self.places[1][j] < self.plan.key_length
        return inside if self.scoring.rule is None else inside & self.scoring.rule.visible(query, key)

    def four(self, x: jax.Array) -> jax.Array:
        """[b*k, G*bq, n] -> [b, h, bq, n]; the order of the numbers stays."""
        return x.reshape(len(self.batch), len(self.heads), -1, x.shape[-1])

    def three(self, x: jax.Array) -> jax.Array:
        """The inverse of `four`."""
        return x.reshape(-1, self.plan.group * x.shape[2], x.shape[-1])


def dot(x: jax.Array, y: jax.Array, axes: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Products over one axis of each, for every leading index."""
    return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((0,), (0,))), preferred_element_type=dtype)


def visit(visits: Visits, row: Array, add: Callable, state: Any, may_see: jax.Array | None) -> Any:
    """Adds all blocks of a row to the state, those that the values empty left out."""
    indices, starts = visits
    if not len(indices):
        return state

    def step(at: Array, state: Any) -> Any:
        column = jnp.asarray(indices)[at]
        if may_see is None:
            return add(column, state)
        return lax.cond(may_see[row, column], lambda s: add(column, s), lambda s: s, state)

    bounds = jnp.asarray(starts)
    return lax.fori_loop(bounds[row], bounds[row + 1], step, state)


def make_chunks(plan: Plan, batch: int, scoring: Scoring, at: Sides, dropout_key: jax.Array | None) -> tuple:
    """Makes a `Chunk` from the indices of its rows and heads; and these indices, for all chunks."""
    (query_positions, query_places), (key_positions, key_places) = at
    blocked = block_positions(query_positions, plan.blocks[0]), block_positions(key_positions, plan.blocks[1])
    index = query_places, key_places
    seen = None
    if plan.dynamic and scoring.rule is not None:
        query, key = (Tokens(x, index.reshape(-1)[: x.shape[1]]) for x, index in at)
        seen = may_see(scoring.rule, query, key, plan.blocks)

    def make(rows: jax.Array, heads: jax.Array) -> Chunk:
        mine = None if seen is None else (seen if len(seen) == 1 else seen[rows]).any(0)
        return Chunk(plan, scoring, rows, heads, blocked, index, mine, dropout_key)

    return make, plan.chunk_indices(batch)


def drop(here: Chunk, x: jax.Array, i: Array, j: Array) -> jax.Array:
    """Dropout of a block [b*k, G*bq, bk]: of weights, and likewise of their cotangents."""
    kept = jnp.where(here.keep(i, j), here.four(x) * (1 / (1 - here.scoring.dropout_rate)), 0)
    return here.three(kept)
