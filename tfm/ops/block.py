"""One tile of the score matrix: what the forward and the backward pass of blockwise attention share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.dense import Scoring
from tfm.ops.dropout import keep_mask
from tfm.ops.plan import BEYOND, Plan, block_positions, may_see
from tfm.ops.tokens import Array, Tokens, vary_alike

Sides = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # positions and places, queries and keys


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What every tile of a chunk of rows of the batch and heads has in common."""

    plan: Plan
    size: tuple[int, int]  # rows of the batch and key heads, b and k
    scoring: Scoring
    batch: jax.Array  # [b]
    heads: jax.Array  # [h]
    first: tuple[jax.Array, jax.Array]  # the first row and the first key head in the arrays
    positions: tuple[jax.Array, jax.Array]  # [n, B|1, block] of both sides
    places: tuple[jax.Array, jax.Array]  # [n, block] of both sides; of the keys one block more, which nobody sees
    may_see: jax.Array | None  # [nq, nk + 1] bool
    dropout_key: Any

    def lanes(self) -> list["Chunk"]:
        """Parts whose operations cores can share, being kept apart: rows of the batch, in them key heads."""
        (b, k), (rows, heads) = self.size, self.plan.lane
        group, (row, head) = self.plan.group, self.first
        return [
            dataclasses.replace(
                self,
                size=self.plan.lane,
                batch=self.batch[r : r + rows],
                heads=self.heads[h * group : (h + heads) * group],
                first=(row + np.int32(r), head + np.int32(h)),
            )
            for r in range(0, b, rows)
            for h in range(0, k, heads)
        ]

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Each lane's part of an array broadcastable to [b, h, bq, n]."""
        (b, k), (rows, heads) = self.size, self.plan.lane
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        parts = [x] * (b // rows) if x.shape[0] == 1 else jnp.split(x, b // rows, 0)
        across = k // heads
        return [y for part in parts for y in ([part] * across if x.shape[1] == 1 else jnp.split(part, across, 1))]

    def gather(self, parts: list[jax.Array], axes: tuple[int, int]) -> jax.Array:
        """Puts the lanes' parts together; axes: of the rows of the batch and of the heads."""
        across = self.size[1] // self.plan.lane[1]
        rows = [jnp.concatenate(parts[n : n + across], axes[1]) for n in range(0, len(parts), across)]
        return jnp.concatenate(rows, axes[0])

    def tokens(self, i: Array, columns: Array) -> tuple[Tokens, Tokens]:
        """The queries of block row i and the keys of some block columns [slots]."""

        def side(axis: int, positions: jax.Array, places: jax.Array) -> Tokens:
            positions = positions.swapaxes(0, 1).reshape(positions.shape[1], -1)
            positions = positions if positions.shape[0] == 1 else positions[self.batch]
            run = self.plan.blocks[axis] if self.plan.consecutive else None
            return Tokens(positions, places.reshape(-1), self.batch, self.heads, run)

        return (
            side(0, self.positions[0][i][None], self.places[0][i]),
            side(1, self.positions[1][columns], self.places[1][columns]),
        )

    def keep(self, i: Array, columns: Array) -> jax.Array:
        """Which weights of a tile dropout keeps."""
        rows, keys = self.places[0][i], self.places[1][columns].reshape(-1)
        at = self.batch[:, None, None, None], self.heads[:, None, None], rows[:, None], keys
        return keep_mask(self.dropout_key, self.scoring.dropout_rate, *at)

    def scores(self, products: jax.Array, q_i: jax.Array, scoring: Scoring, i: Array, columns: Array) -> jax.Array:
        """The scores of a tile [b, h, bq, n] from its products, the rule aside."""
        query, key = self.tokens(i, columns)
        return scoring.from_products(products, q_i, query, key)

    def visible(self, i: Array, columns: Array) -> jax.Array:
        """Which queries see which keys of a tile: broadcastable to [b, h, bq, n].

        On a CPU, in a loop over two halves of the queries: XLA fuses what is not in a loop into each of its uses, and
        would make it again for every head there.
        """
        query, key = self.tokens(i, columns)
        index = self.places[0][i]
        inside = self.places[1][columns].reshape(-1) < self.plan.key_length
        rule, length = self.scoring.rule, self.plan.blocks[0]
        if rule is None:
            return inside
        if length % 2 or jax.default_backend() != "cpu":
            return inside & rule.visible(query, key)

        def half(tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
            seen = inside & rule.visible(dataclasses.replace(query, positions=tokens[0], index=tokens[1]), key)
            return jnp.broadcast_to(seen, (*seen.shape[:-2], length // 2, seen.shape[-1]))

        positions = query.positions.reshape(-1, 2, length // 2).swapaxes(0, 1)
        halves = lax.map(half, (positions, index.reshape(2, -1)))
        halves = jnp.moveaxis(halves, 0, -3)
        return halves.reshape(*halves.shape[:-3], length, -1)

    def take(self, x: jax.Array, i: Array, side: int) -> jax.Array:
        """Block i of one side, heads first: of [B, L, heads, D], [b*k, G*block, D] or, of the keys, [b*k, block, D]."""
        (b, k), block = self.size, self.plan.blocks[side]
        group = 1 if side else self.plan.group
        (row, head), zero = self.first, np.int32(0)
        part = lax.dynamic_slice(x, (row, i * block, head * group, zero), (b, block, k * group, x.shape[-1]))
        return part.reshape(b, block, k, group, -1).transpose(0, 2, 3, 1, 4).reshape(b * k, group * block, -1)

    def take_lse(self, lse: jax.Array, i: Array) -> jax.Array:
        """Block i of [B, H, T]: [b*k, G*block, 1]."""
        (b, k), block = self.size, self.plan.blocks[0]
        row, head = self.first
        part = lax.dynamic_slice(lse, (row, head * self.plan.group, i * block), (b, k * self.plan.group, block))
        return part.reshape(b * k, -1, 1)

    def put(self, x: jax.Array) -> jax.Array:
        """The inverse of `take`: [b*k, G*block, D] of the queries, or [b*k, block, D] -> [b, block, heads, D]."""
        b, k = self.size
        block = self.plan.blocks[0]
        x = x.reshape(b, k, self.plan.group, block, -1).transpose(0, 3, 1, 2, 4)
        return x.reshape(b, block, k * self.plan.group, -1)

    def four(self, x: jax.Array) -> jax.Array:
        """[b*k, G*bq, n] -> [b, h, bq, n]; the order of the numbers stays."""
        return x.reshape(len(self.batch), len(self.heads), -1, x.shape[-1])

    def three(self, x: jax.Array) -> jax.Array:
        """The inverse of `four`."""
        return x.reshape(-1, self.plan.group * x.shape[2], x.shape[-1])


def dot(x: jax.Array, y: jax.Array, axes: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Products over one axis of each, for every leading index."""
    return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((0,), (0,))), preferred_element_type=dtype)


def visit(here: Chunk, i: Array, load: Callable, add: Callable, state: Any, apart: bool = False) -> Any:
    """Adds the tiles of a row of blocks to a state, those that the values empty left out.

    Args:
      load: (slot, column, state) -> state with a block of keys in a slot.
      add: (state, columns, masked) -> state with the tile of the blocks in the slots.
      state: goes on from row to row, as the slots do.
      apart: each tile loads one block, and not in a loop, for which all lanes would have to wait.
    """
    tiles = here.plan.tiles
    columns, starts, load_starts, load_slots, load_columns = (jnp.asarray(x) for x in tiles)

    def step(t: Array, state: Any, masked: bool) -> Any:
        if apart:
            state = load(load_slots[t], load_columns[t], state)
        else:
            state = lax.fori_loop(
                load_starts[t], load_starts[t + 1], lambda n, s: load(load_slots[n], load_columns[n], s), state
            )
        if not masked or here.may_see is None:
            return add(state, columns[t], masked)
        some = here.may_see[i, columns[t]].any()
        return lax.cond(some, lambda s: add(s, columns[t], True), lambda s: s, state)

    if here.plan.single:
        return step(i, state, masked=bool((tiles.starts[:, 1] < tiles.starts[:, 2]).any()))
    for part, masked in ((0, False), (1, True)):
        if (tiles.starts[:, part] < tiles.starts[:, part + 1]).any():
            bounds = starts[i, part], starts[i, part + 1]
            state = lax.fori_loop(*bounds, functools.partial(step, masked=masked), state)
    return state


def empty_slots(here: Chunk, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Slots for blocks of arrays [B, S, K, D]: [b*k, slots*block, D] each."""
    rows, keys = here.size[0] * here.size[1], here.plan.slots * here.plan.blocks[1]
    return tuple(vary_alike(jnp.zeros((rows, keys, x.shape[-1]), x.dtype), x) for x in arrays)


def put_keys(held: tuple, blocks: tuple, slot: Array) -> tuple:
    """Puts blocks of keys [b*k, block, D] into a slot each."""
    return tuple(
        lax.dynamic_update_slice_in_dim(x, block, slot * block.shape[1], 1)
        for x, block in zip(held, blocks, strict=True)
    )


def make_chunks(plan: Plan, batch: int, scoring: Scoring, at: Sides, dropout_key: jax.Array | None) -> tuple:
    """Makes a `Chunk` from the indices of its rows and heads; and these indices, for all chunks."""
    (query_positions, query_places), (key_positions, key_places) = at
    index = query_places, jnp.pad(key_places, ((0, 1), (0, 0)), constant_values=BEYOND)
    keys = block_positions(key_positions, plan.blocks[1])
    blocked = block_positions(query_positions, plan.blocks[0]), jnp.pad(keys, ((0, 1), (0, 0), (0, 0)))
    seen = None
    if plan.dynamic and scoring.rule is not None:
        query, key = (Tokens(x, index.reshape(-1)[: x.shape[1]]) for x, index in at)
        seen = jnp.pad(may_see(scoring.rule, query, key, plan.blocks), ((0, 0), (0, 0), (0, 1)))

    def make(rows: jax.Array, heads: jax.Array, row: jax.Array, head: jax.Array) -> Chunk:
        mine = None if seen is None else (seen if len(seen) == 1 else seen[rows]).any(0)
        return Chunk(plan, plan.chunk, scoring, rows, heads, (row, head), blocked, index, mine, dropout_key)

    return make, plan.chunks(batch)


def drop(here: Chunk, x: jax.Array, i: Array, columns: Array) -> jax.Array:
    """Dropout of a tile [b*k, G*bq, n]: of weights, and likewise of their cotangents."""
    kept = jnp.where(here.keep(i, columns), here.four(x) * (1 / (1 - here.scoring.dropout_rate)), 0)
    return here.three(kept)


def fill(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Fills an axis with zeros up to a multiple of the block."""
    return jnp.pad(x, [(0, -n % block if a == axis else 0) for a, n in enumerate(x.shape)])


def join(x: jax.Array, plan: Plan, axis: int) -> jax.Array:
    """Chunks of blocks -> arrays [B, L, heads, D] (axis 2) or [B, heads, L] (axis 1); the axis is that of the heads.

    From [C, n, b, block, h, D] or [C, n, b, h, block].
    """
    C, n, b = x.shape[:3]
    chunks = plan.heads[0] // plan.group // plan.chunk[1]
    x = x.reshape(C // chunks, chunks, n, b, *x.shape[3:])
    if axis == 2:
        x = x.transpose(0, 3, 2, 4, 1, 5, 6)
        return x.reshape(C // chunks * b, n * x.shape[3], -1, x.shape[-1])
    x = x.transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(C // chunks * b, -1, n * x.shape[-1])
