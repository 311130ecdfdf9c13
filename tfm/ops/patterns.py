"""Published sparse patterns, made of the rules of `masks`."""

from collections.abc import Sequence
from typing import ClassVar

import jax
import numpy as np

from tfm.ops.masks import Causal, Global, Rule, Window, as_bool
from tfm.ops.tokens import Array, Spans, Tokens, array_module, pair_up


class Blocks(Rule):
    """A query sees the keys of chosen blocks of positions.

    Args:
      block_map: [nq, nk] or [H, nq, nk] bool; entry (i, j): block i of the queries sees block j of the keys.
      block_size: positions per block.

    Example:
      >>> Blocks(np.eye(2, dtype=bool), 1).dense(np.arange(2), np.arange(2))[0, 0].astype(int).tolist()
      [[1, 0], [0, 1]]
    """

    axes: ClassVar = {"cells": "H**"}
    cells: Array  # [H|1, nq, nk]
    block_size: int

    def __init__(self, block_map: Array, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"Blocks.block_size is {block_size}; it must be 1 or more")
        cells = as_bool(block_map if hasattr(block_map, "ndim") else np.asarray(block_map), "Blocks.block_map")
        if cells.ndim not in (2, 3):
            raise ValueError(f"Blocks.block_map has shape {cells.shape}; it must be [nq, nk] or [H, nq, nk]")
        object.__setattr__(self, "cells", cells[None] if cells.ndim == 2 else cells)
        object.__setattr__(self, "block_size", block_size)

    def visible(self, query: Tokens, key: Tokens) -> Array:
        cells = array_module(self.cells, query.positions, key.positions).asarray(self.cells)
        cells = query.per_head(cells, 0)
        (rows, columns), inside = self._places(query.positions, key.positions, cells.shape)
        return cells[np.arange(cells.shape[0])[:, None, None], rows, columns] & inside

    def _places(self, q: Array, k: Array, shape: tuple[int, ...]) -> tuple[tuple[Array, Array], Array]:
        """Row and column of each pair's cell, and whether the map has one."""
        rows, columns = pair_up(q // self.block_size, k // self.block_size)
        inside = (rows >= 0) & (rows < shape[-2]) & (columns >= 0) & (columns < shape[-1])
        return (rows.clip(0, shape[-2] - 1), columns.clip(0, shape[-1] - 1)), inside

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        cells = self.cells
        xp = array_module(cells, query.positions, key.positions)
        heads = np.arange(cells.shape[0])[:, None, None]
        sums = xp.pad(cells.astype(np.int32).cumsum(1).cumsum(2), [(0, 0), (1, 0), (1, 0)])
        (top, left), low_inside = self._places(query.low, key.low, cells.shape)
        (bottom, right), high_inside = self._places(query.high, key.high, cells.shape)
        bottom, right = bottom + 1, right + 1
        area = (bottom - top) * (right - left)
        count = (
            sums[heads, bottom, right] - sums[heads, top, right] - sums[heads, bottom, left] + sums[heads, top, left]
        )
        return count > 0, (count == area) & low_inside & high_inside


def _unflatten_blocks(block_size: int, cells: tuple[Array]) -> Blocks:
    rule = object.__new__(Blocks)  # whatever a tree transformation puts in
    object.__setattr__(rule, "cells", cells[0])
    object.__setattr__(rule, "block_size", block_size)
    return rule


jax.tree_util.register_pytree_node(Blocks, lambda rule: ((rule.cells,), rule.block_size), _unflatten_blocks)


def sliding_window(size: int) -> Window:
    """A query sees `size` keys, itself the last of them.

    Example:
      >>> sliding_window(4).dense(np.arange(5), np.arange(5)).sum(-1).tolist()
      [[[1, 2, 3, 4, 4]]]

    Reference: Jiang et al. (2023), Mistral 7B, section 2.
    """
    if size < 1:
        raise ValueError(f"sliding_window's size is {size}; it must be 1 or more")
    return Window(size - 1, 0)


def longformer(
    window: int,
    *,
    tokens: Sequence[int] | Array = (),
    dilation: int | tuple[int, ...] = 1,
    causal: bool = False,
) -> Rule:
    """A window of `window // 2` keys to each side, and global tokens that see all and are seen by all.

    Args:
      window: even width of the window, the query itself not counted.
      tokens: positions of the global tokens, or a boolean array over positions.
      dilation: distance between neighbouring keys of the window; a tuple gives one per head.
      causal: keys after the query are hidden, from global tokens too.

    Raises:
      ValueError: an odd window.

    Example:
      >>> longformer(2, tokens=[3]).dense(np.arange(4), np.arange(4))[0, 0].astype(int).tolist()
      [[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]

    Reference: Beltagy, Peters and Cohan (2020), Longformer, section 3.1.
    """
    if window < 0 or window % 2:
        raise ValueError(f"longformer's window is {window}; it must be even, half of it to each side")
    rule: Rule = Window(window // 2, window // 2, dilation)
    if not isinstance(tokens, Sequence) or len(tokens):
        rule = rule | Global(tokens)
    return Causal() & rule if causal else rule


def bigbird(
    length: int,
    *,
    block_size: int = 64,
    num_global_blocks: int = 2,
    num_window_blocks: int = 3,
    num_random_blocks: int = 3,
    num_heads: int = 1,
    seed: int = 0,
) -> Blocks:
    """Blocks of a window, global blocks at both ends, and random blocks, drawn once per head from a seed.

    The global blocks (first and last in turn) see all and are seen by all; every other row sees the blocks around
    it and `num_random_blocks` of the rest, or all the rest where there are fewer.

    Args:
      length: number of positions.
      num_window_blocks: odd number of blocks around and including the query's own.
      num_heads: 1 gives all heads the same random blocks.

    Raises:
      ValueError: an even number of window blocks, a length, block size or number of heads below 1.

    Example:
      >>> bigbird(1024).cells.sum(-1).tolist()
      [[16, 7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7, 16]]

    Reference: Zaheer et al. (2020), Big Bird, section 2 and appendix E.1, table 8 (BigBird-ITC: 2, 3, 3 blocks of 64).
    """
    if num_window_blocks % 2 == 0:
        raise ValueError(f"bigbird's num_window_blocks is {num_window_blocks}; it must be odd: a block and its sides")
    for name, value in (("length", length), ("block_size", block_size), ("num_heads", num_heads)):
        if value < 1:
            raise ValueError(f"bigbird's {name} is {value}; it must be 1 or more")
    count = -(-length // block_size)
    index = np.arange(count)
    ends = np.minimum(2 * index, 2 * (count - 1 - index) + 1) < num_global_blocks
    base = np.abs(index[:, None] - index) <= num_window_blocks // 2
    base |= ends[:, None] | ends
    random, cells = np.random.default_rng(seed), np.repeat(base[None], num_heads, 0)
    for row in cells.reshape(-1, count):
        free = np.flatnonzero(~row)
        row[random.permutation(free)[:num_random_blocks]] = True
    return Blocks(cells, block_size)
