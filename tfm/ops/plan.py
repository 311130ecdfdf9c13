"""Which blocks of the score matrix are visited, in which order, and how arrays are laid out for it."""

import dataclasses
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.masks import EMPTY, FULL, PARTIAL, Rule, static_bounds
from tfm.ops.tokens import Array, Tokens, spans

_BEYOND = np.iinfo(np.int32).max // 2
Visits = tuple[np.ndarray, np.ndarray]  # entries of row i: indices[starts[i]:starts[i + 1]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a blockwise computation.

    Args:
      lengths: T and S, with the filling of an order.
      key_length: S without it.
      blocks: rows and columns of a block.
      chunk: rows of the batch, and key heads, worked on at a time.
      heads: H and K.
      head_ids: the query heads' numbers in the whole.
      kinds: [nq, nk] int8 as bytes: EMPTY, PARTIAL or FULL, as far as it is known before the values.
      consecutive: positions are 0, 1, 2, ... on both sides.
      dynamic: whether a partial block is empty may depend on values.
    """

    lengths: tuple[int, int]
    key_length: int
    blocks: tuple[int, int]
    chunk: tuple[int, int]
    heads: tuple[int, int]
    head_ids: tuple[int, ...]
    kinds: bytes
    consecutive: bool
    dynamic: bool

    @property
    def counts(self) -> tuple[int, int]:
        """Number of blocks of queries and of keys."""
        (T, S), (block_q, block_k) = self.lengths, self.blocks
        return -(-T // block_q), -(-S // block_k)

    @property
    def group(self) -> int:
        return self.heads[0] // self.heads[1]

    @cached_property
    def map(self) -> np.ndarray:
        return np.frombuffer(self.kinds, np.int8).reshape(self.counts)

    def visits(self, kind: int, *, by_column: bool = False) -> Visits:
        """Blocks of one kind: for each row of blocks the columns, or for each column the rows."""
        chosen = self.map == kind
        chosen = chosen.T if by_column else chosen
        starts = np.concatenate([[0], chosen.sum(1).cumsum()])
        return np.nonzero(chosen)[1].astype(np.int32), starts.astype(np.int32)

    def chunk_indices(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the batch [C, b] and query heads [C, h] of each chunk."""
        rows, key_heads = self.chunk
        heads = key_heads * self.group
        row_chunks = np.arange(batch, dtype=np.int32).reshape(-1, 1, rows)
        head_chunks = np.asarray(self.head_ids, np.int32).reshape(1, -1, heads)
        shape = row_chunks.shape[0], head_chunks.shape[1]
        row_chunks, head_chunks = (np.broadcast_to(x, (*shape, x.shape[-1])) for x in (row_chunks, head_chunks))
        return row_chunks.reshape(-1, rows), head_chunks.reshape(-1, heads)


def make_plan(
    rule: Rule | None,
    sides: tuple[Tokens, Tokens],
    batch: int,
    heads: tuple[int, int],
    head_ids: tuple[int, ...],
    key_length: int,
    blocks: tuple[int, int],
    max_elements: int,
) -> Plan:
    """Chooses the blocks to visit, and chunks of at most `max_elements` scores per block.

    The tokens' index, where they have one, is a NumPy array; numbers beyond the keys' stand for filling.
    """
    query, key = sides
    T, S = query.positions.shape[1], key.positions.shape[1]
    blocks = min(blocks[0], T), min(blocks[1], S)
    counts = -(-T // blocks[0]), -(-S // blocks[1])
    if rule is None:
        kinds = np.full(counts, FULL, np.int8)
    else:
        some, every = static_bounds(rule, query, key, *blocks)
        kinds = np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)
    filled = (places(key, blocks[1]) >= key_length).any(1)
    kinds[:, filled] = np.minimum(kinds[:, filled], PARTIAL)
    chunk = _chunk(batch, heads, max(1, max_elements // (blocks[0] * blocks[1])))
    consecutive = _is_range(query.positions) and _is_range(key.positions)
    values = (query.positions, key.positions, *jax.tree.leaves(rule))
    known = not any(isinstance(x, jax.core.Tracer) for x in values)
    dynamic = rule is not None and not known and bool((kinds == PARTIAL).any())
    return Plan((T, S), key_length, blocks, chunk, heads, head_ids, kinds.tobytes(), consecutive, dynamic)


def choose_block(rule: Rule | None, query: Tokens, key: Tokens, sizes: tuple[int, ...], overhead: int) -> int:
    """The block size, of those given, for which the visited blocks cost least.

    A block costs its scores and an overhead, in scores.
    """
    if rule is None:
        return sizes[0]

    def cost(size: int) -> int:
        some, _ = static_bounds(rule, query, key, size, size)
        return int(some.sum()) * (size * size + overhead)

    return min(sizes, key=cost)


def places(tokens: Tokens, block: int) -> np.ndarray:
    """The tokens' places in their arrays, block by block: [n, block] int32; filling has the length's or more."""
    length = tokens.positions.shape[1]
    if tokens.index is None:
        return np.arange(-(-length // block) * block, dtype=np.int32).reshape(-1, block)
    return np.pad(tokens.index, (0, -length % block), constant_values=_BEYOND).reshape(-1, block)


def _is_range(positions: Array) -> bool:
    return isinstance(positions, np.ndarray) and bool((positions == np.arange(positions.shape[1])).all())


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


def to_blocks(x: jax.Array, block: int, chunk: tuple[int, int], group: int = 1) -> jax.Array:
    """[B, L, K*G, D] -> [C, L/block, b*k, G*block, D], for chunks of b rows and k key heads; L is filled with zeros."""
    B, L, H, D = x.shape
    b, k = chunk
    x = jnp.pad(x, [(0, 0), (0, -L % block), (0, 0), (0, 0)])
    x = x.reshape(B // b, b, -1, block, H // group // k, k, group, D).transpose(0, 4, 2, 1, 5, 6, 3, 7)
    return x.reshape(-1, x.shape[2], b * k, group * block, D)


def from_blocks(x: jax.Array, length: int, heads: int, chunk: tuple[int, int], group: int = 1) -> jax.Array:
    """The inverse of `to_blocks`, filling cut off: [C, n, b*k, G*block, D] -> [B, L, H, D]."""
    n, rows, D = x.shape[1], x.shape[3], x.shape[4]
    b, k = chunk
    x = x.reshape(-1, heads // group // k, n, b, k, group, rows // group, D).transpose(0, 3, 2, 6, 1, 4, 5, 7)
    return x.reshape(x.shape[0] * b, -1, heads, D)[:, :length]


def block_positions(positions: Array, block: int) -> jax.Array:
    """[B|1, L] -> [n, B|1, block]."""
    return jnp.moveaxis(jnp.asarray(spans(Tokens(positions), block).positions), 1, 0)
