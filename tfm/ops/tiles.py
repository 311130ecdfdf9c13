"""Tiles: the blocks of keys that a block of queries meets in one product, and which of them are in place already."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tfm.ops.masks import FULL, PARTIAL, Rule, static_bounds
from tfm.ops.tokens import Tokens

SIZES = 512, 256, 128, 64  # rows and columns of a block
MAX_SCORES = 128 * 768  # of a tile of several blocks, per head
MAX_ELEMENTS = 4 * 512 * 512  # scores of a tile, over the heads worked on together: they should stay in the cache
OVERHEAD = 68_000  # of a tile, in scores: what it costs beside them, per head
KEY = 8  # of a key in a tile, in scores; as much again for bringing it into place


class Tiles(NamedTuple):
    """The tiles of all rows of blocks, row by row; those of full blocks come first in a row.

    A tile has slots for blocks of keys.  What the tile before has left in a slot stays there if it is needed again, so
    that a window loads one block for each row.
    """

    columns: np.ndarray  # [n, slots] int32: the block in each slot; the number of blocks where the tile ignores a slot
    starts: np.ndarray  # [nq, 3] int32: where a row's tiles begin, where its partial ones begin, where they end
    load_starts: np.ndarray  # [n + 1] int32: the loads before tile t are load_starts[t] : load_starts[t + 1]
    load_slots: np.ndarray  # [m] int32
    load_columns: np.ndarray  # [m] int32


def make_tiles(kinds: np.ndarray, slots: int) -> Tiles:
    """Cuts the blocks of each row that are not empty into tiles.

    Example:
      >>> tiles = make_tiles(np.array([[1, 0, 0], [2, 1, 0], [0, 2, 1]]), 2)
      >>> tiles.columns.tolist(), tiles.load_columns.tolist()
      ([[0, 3], [0, 1], [2, 1]], [0, 1, 2])
    """
    count = kinds.shape[1]
    columns: list[list[int]] = []
    starts, loads, load_starts = [], [], [0]
    held = [count] * slots
    for row in kinds:
        full, partial = np.flatnonzero(row == FULL).tolist(), np.flatnonzero(row == PARTIAL).tolist()
        whole = len(full) // slots
        wanted = full + partial
        begin = len(columns)
        for first in range(0, len(wanted), slots):
            needed = set(wanted[first : first + slots])
            free = [s for s in range(slots) if held[s] not in needed]
            for column, slot in zip(sorted(needed - set(held)), free, strict=False):
                held[slot] = column
                loads.append((slot, column))
            columns.append([c if c in needed else count for c in held])
            load_starts.append(len(loads))
        starts.append((begin, begin + whole, len(columns)))
    pairs = np.array(loads, np.int32).reshape(-1, 2)
    table = np.array(columns, np.int32).reshape(-1, slots)
    return Tiles(table, np.array(starts, np.int32), np.array(load_starts, np.int32), pairs[:, 0], pairs[:, 1])


def choose_tiles(
    rule: Rule | None,
    arrange: Callable[[int], Sequence[Tokens]],
    size: int | None,
    slots: int | None,
) -> tuple[int, int]:
    """The block size and the number of slots with which the visited blocks cost least, where they are not given.

    Args:
      arrange: block size -> queries and keys in the order in which they are cut into blocks.
    """
    best: tuple[float, int, int] | None = None
    for block in SIZES if size is None else (size,):
        query, key = arrange(block)
        lengths = query.positions.shape[1], key.positions.shape[1]
        rows, columns = (min(block, n) for n in lengths)
        some = np.ones((-(-lengths[0] // rows), -(-lengths[1] // columns)), bool)
        if rule is not None:
            some, _ = static_bounds(rule, query, key, rows, columns)
        counts = some.sum(1)
        fresh = np.concatenate([counts[:1], (some[1:] & ~some[:-1]).sum(1)])
        for number in {slots} if slots else _slot_numbers(counts, MAX_SCORES // (rows * columns)):
            scores = number * rows * columns
            loads = np.where(counts <= number, fresh, counts).sum() * columns
            tile = scores + OVERHEAD + KEY * number * columns
            cost = (-(-counts // number)).sum() * tile + KEY * loads
            if best is None or cost < best[0]:
                best = float(cost), block, number
    assert best is not None
    return best[1:]


def _slot_numbers(counts: np.ndarray, most: int) -> list[int]:
    """Numbers of slots worth a look: 1, as many as may be, and the numbers of blocks that rows visit."""
    return sorted({min(max(n, 1), max(most, 1)) for n in (1, most, *np.unique(counts).tolist())})
