"""Which blocks of the score matrix are visited, in which order, and how arrays are cut for it."""

import dataclasses
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.masks import EMPTY, FULL, PARTIAL, Rule, static_bounds
from tfm.ops.tiles import MAX_ELEMENTS, Tiles, make_tiles
from tfm.ops.tokens import Array, Tokens, spans

LANES = 8, 16  # fewest and most lanes of a chunk
MIN_ROWS = 16  # of blocks, for lanes
BEYOND = np.iinfo(np.int32).max // 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a blockwise computation.

    Args:
      lengths: T and S, with the filling of an order.
      key_length: S without it.
      blocks: rows and columns of a block.
      slots: blocks of keys per tile.
      chunk: rows of the batch, and key heads, worked on at a time.
      heads: H and K.
      head_ids: the query heads' numbers in the whole.
      kinds: [nq, nk] int8 as bytes: EMPTY, PARTIAL or FULL, as far as it is known before the values.
      dynamic: whether a partial block is empty may depend on values.
      consecutive: within a block positions are consecutive, on both sides.
    """

    lengths: tuple[int, int]
    key_length: int
    blocks: tuple[int, int]
    slots: int
    chunk: tuple[int, int]
    heads: tuple[int, int]
    head_ids: tuple[int, ...]
    kinds: bytes
    dynamic: bool
    consecutive: bool

    @property
    def counts(self) -> tuple[int, int]:
        """Number of blocks of queries and of keys."""
        (T, S), (block_q, block_k) = self.lengths, self.blocks
        return -(-T // block_q), -(-S // block_k)

    @property
    def group(self) -> int:
        return self.heads[0] // self.heads[1]

    @cached_property
    def tiles(self) -> Tiles:
        return make_tiles(np.frombuffer(self.kinds, np.int8).reshape(self.counts), self.slots)

    @cached_property
    def single(self) -> bool:
        """Every row of blocks has one tile."""
        starts = self.tiles.starts
        return bool((starts[:, 2] - starts[:, 0] == 1).all())

    @cached_property
    def lane(self) -> tuple[int, int]:
        """The part of a chunk whose operations are kept apart: a row of the batch and a key head, or all of the chunk.

        XLA's CPU backend lets cores share operations that wait for nothing where they are more than eight, and only
        then.  Heads apart are so spread over them, each staying in its core's cache, for programs that are longer.
        Done for long windows: tiles that each load one block of keys, one for each row of blocks.
        """
        apart = LANES[0] <= self.chunk[0] * self.chunk[1] <= LANES[1] and self.counts[0] >= MIN_ROWS
        steady = apart and self.single and set(np.diff(self.tiles.load_starts).tolist()) == {1}
        return (1, 1) if steady and jax.default_backend() == "cpu" else self.chunk

    def chunks(self, batch: int) -> tuple[np.ndarray, ...]:
        """Of each chunk: rows of the batch [C, b], query heads' numbers [C, h], first row and first key head [C]."""
        rows, key_heads = self.chunk
        row_chunks: np.ndarray = np.arange(batch, dtype=np.int32).reshape(-1, 1, rows)
        head_chunks: np.ndarray = np.asarray(self.head_ids, np.int32).reshape(1, -1, key_heads * self.group)
        shape = row_chunks.shape[0], head_chunks.shape[1]
        row_chunks, head_chunks = (
            np.broadcast_to(x, (*shape, x.shape[-1])).reshape(-1, x.shape[-1]) for x in (row_chunks, head_chunks)
        )
        first_heads = np.broadcast_to(np.arange(shape[1], dtype=np.int32) * key_heads, shape).reshape(-1)
        return row_chunks, head_chunks, row_chunks[:, 0], first_heads


def make_plan(
    rule: Rule | None,
    sides: tuple[Tokens, Tokens],
    batch: int,
    heads: tuple[int, int],
    head_ids: tuple[int, ...],
    key_length: int,
    size: int,
    slots: int,
) -> Plan:
    """Chooses the blocks to visit, and chunks of at most `MAX_ELEMENTS` scores per tile.

    The tokens' index, where they have one, is a NumPy array; numbers beyond the keys' stand for filling.
    """
    query, key = sides
    T, S = query.positions.shape[1], key.positions.shape[1]
    blocks = min(size, T), min(size, S)
    counts = -(-T // blocks[0]), -(-S // blocks[1])
    if rule is None:
        kinds = np.full(counts, FULL, np.int8)
    else:
        some, every = static_bounds(rule, query, key, *blocks)
        kinds = np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)
    filled = (places(key, blocks[1]) >= key_length).any(1)
    kinds[:, filled] = np.minimum(kinds[:, filled], PARTIAL)
    chunk = _chunk(batch, heads, max(1, MAX_ELEMENTS // (blocks[0] * blocks[1] * slots)))
    values = (query.positions, key.positions, *jax.tree.leaves(rule))
    known = not any(isinstance(x, jax.core.Tracer) for x in values)
    dynamic = rule is not None and not known and bool((kinds == PARTIAL).any())
    consecutive = all(_is_consecutive(x.positions, block) for x, block in zip(sides, blocks, strict=True))
    return Plan((T, S), key_length, blocks, slots, chunk, heads, head_ids, kinds.tobytes(), dynamic, consecutive)


def _is_consecutive(positions: Array, block: int) -> bool:
    """Positions are known to be consecutive within every block, the same for all rows of the batch."""
    if not isinstance(positions, np.ndarray) or len(positions) > 1:
        return False
    inside = np.arange(1, positions.shape[1]) % block != 0
    return bool((np.diff(positions[0])[inside] == 1).all())


def places(tokens: Tokens, block: int) -> np.ndarray:
    """The tokens' places in their arrays, block by block: [n, block] int32; filling has the length's or more."""
    length = tokens.positions.shape[1]
    if tokens.index is None:
        return np.arange(-(-length // block) * block, dtype=np.int32).reshape(-1, block)
    return np.pad(tokens.index, (0, -length % block), constant_values=BEYOND).reshape(-1, block)


def _chunk(batch: int, heads: tuple[int, int], room: int) -> tuple[int, int]:
    """Rows of the batch and key heads that together have at most `room` query heads."""
    group = heads[0] // heads[1]
    if room < heads[0]:
        return 1, _divisor(heads[1], room // group)
    return _divisor(batch, room // heads[0]), heads[1]


def _divisor(number: int, limit: int) -> int:
    """The greatest divisor of a number up to a limit, at least 1."""
    return next(d for d in range(min(number, max(limit, 1)), 0, -1) if number % d == 0)


def may_see(rule: Rule, query: Tokens, key: Tokens, blocks: tuple[int, int]) -> jax.Array:
    """Per row of the batch, may a pair of blocks see each other, from the values themselves: [B|1, nq, nk] bool."""
    some, _ = rule.bounds(spans(query, blocks[0]), spans(key, blocks[1]))
    counts = tuple(-(-x.positions.shape[1] // block) for x, block in zip((query, key), blocks, strict=True))
    some = jnp.asarray(some).reshape((1,) * (4 - some.ndim) + some.shape)
    return jnp.broadcast_to(some, (*some.shape[:2], *counts)).any(1)


def block_positions(positions: Array, block: int) -> jax.Array:
    """[B|1, L] -> [n, B|1, block]."""
    return jnp.moveaxis(jnp.asarray(spans(Tokens(positions), block).positions), 1, 0)
