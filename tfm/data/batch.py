"""Examples of different lengths as arrays of a few fixed shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Example = Mapping[str, np.ndarray]
Batch = dict[str, np.ndarray]
IDS = ("source", "target", "tokens", "labels")
"""Arrays of a batch whose padding is the tokenizer's `pad_id`."""
_FINEST = 1024  # lengths of pairs' buckets are told apart to one part in so many


@dataclass(frozen=True)
class BatchShape:
    """Rows and length of one kind of batch; of pairs, the length S of the source and T of the target."""

    rows: int
    length: int
    target_length: int | None = None
    """None: as `length`."""

    @property
    def sides(self) -> tuple[int, ...]:
        """Length of each side."""
        return (self.length,) if self.target_length is None else (self.length, self.target_length)

    def length_of(self, name: str) -> int:
        """Length of an array of a batch."""
        return self.length if name == "source" else self.sides[-1]


def choose_lengths(lengths: np.ndarray, count: int, max_length: int) -> list[int]:
    """Bucket lengths that pad least: the cheapest cut of the sorted lengths into at most `count` runs.

    Args:
      lengths: [N] int, length of each example.
      count: most buckets.
      max_length: no bucket is longer; no example is, either.

    Returns:
      Increasing multiples of 8 (or `max_length`); the last holds the longest example.

    Example:
      >>> choose_lengths(np.array([5, 6, 7, 29, 30, 30]), count=2, max_length=30)
      [8, 30]
    """
    edges = np.unique(np.minimum(np.arange(8, max(8, int(lengths.max(initial=1))) + 8, 8), max_length))
    numbers = np.histogram(lengths, bins=np.concatenate([[0], edges]) + 1)[0]
    before = np.concatenate([[0], np.cumsum(numbers)])  # examples that fit the first j edges
    cost = before[1:] * edges  # of one bucket as long as each edge, for the examples that fit it
    choices: list[np.ndarray] = []
    for _ in range(count - 1):
        # best[j]: shorter examples by the buckets so far that end at i < j, the rest by one bucket of length edges[j]
        table = cost[:, None] + (before[None, 1:] - before[1:, None]) * edges[None, :]
        table = np.where(np.arange(len(edges))[:, None] < np.arange(len(edges))[None, :], table, np.iinfo(np.int64).max)
        best = table.argmin(axis=0)
        improved = table[best, np.arange(len(edges))] < cost
        choices.append(np.where(improved, best, -1))
        cost = np.where(improved, table[best, np.arange(len(edges))], cost)
    chosen = [len(edges) - 1]
    for choice in reversed(choices):
        previous = int(choice[chosen[-1]])
        if previous >= 0:
            chosen.append(previous)
    return [int(edges[i]) for i in reversed(chosen)]


def choose_sides(sides: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Buckets for pairs that pad little: (source length, target length), both growing from bucket to bucket.

    Each pair goes to the first bucket that holds both of its sides. The lengths are found by coordinate descent on the
    number of positions, from lengths that lie as densely as the square root of the examples' number does.

    Args:
      sides: [N, 2] int, lengths of source and target.
      count: most buckets.

    Returns:
      At most `count` buckets, the shortest first; the last holds the longest source and the longest target.

    Example:
      >>> choose_sides(np.array([[5, 6], [5, 6], [30, 40]]), count=2)
      [(5, 6), (30, 40)]
    """
    if not len(sides):
        return [(8, 8)]
    unit = -(-int(sides.max()) // _FINEST)
    if unit > 1:
        most = sides.max(axis=0)
        return [(min(s * unit, int(most[0])), min(t * unit, int(most[1])))
                for s, t in choose_sides(-(-sides // unit), count)]
    longest = sides.max(axis=0)
    number = np.zeros(longest + 1, np.int64)
    np.add.at(number, (sides[:, 0], sides[:, 1]), 1)
    fitting = number.cumsum(axis=0).cumsum(axis=1)  # pairs that fit (s, t)
    edges = [(0, 0), *_first_guess(sides, longest, count), tuple(longest.tolist())]

    def cost(i: int) -> int:
        """Positions of the buckets that end or begin at edge i."""
        part = range(i, i + 2)
        return sum(int(fitting[edges[j]] - fitting[edges[j - 1]]) * sum(edges[j]) for j in part)

    step = max(int(longest.max()) // 8, 1)
    while step:
        moves = [(s, t) for s in (-step, 0, step) for t in (-step, 0, step) if s or t]
        improved = False
        for i in range(1, count):
            for s, t in moves:
                before, kept = cost(i), edges[i]
                edges[i] = (min(max(kept[0] + s, edges[i - 1][0]), edges[i + 1][0]),
                            min(max(kept[1] + t, edges[i - 1][1]), edges[i + 1][1]))
                if cost(i) < before:
                    improved = True
                else:
                    edges[i] = kept
        step = step if improved else step // 2
    used = [i for i in range(1, count + 1) if fitting[edges[i]] > fitting[edges[i - 1]]]
    return [edges[i] for i in used]


def _first_guess(sides: np.ndarray, longest: np.ndarray, count: int) -> list[tuple[int, int]]:
    """`count` - 1 buckets in the proportion of all tokens."""
    density = np.sqrt(np.bincount(sides.sum(axis=1)))
    share = np.cumsum(density) / density.sum()
    mean = sides.sum(axis=0) / sides.sum()
    guess = [np.minimum(np.ceil(mean * np.searchsorted(share, i / count)), longest) for i in range(1, count)]
    return [(int(s), int(t)) for s, t in guess]


def padding_of(sides: np.ndarray, buckets: Sequence[Sequence[int]]) -> float:
    """Share of padding among the positions of examples that each lie in the first bucket that holds them.

    Example:
      >>> padding_of(np.array([[5], [8], [15]]), [(8,), (16,)])
      0.125
    """
    positions = np.sum(np.asarray(buckets)[first_fit(sides, buckets)])
    return 1.0 - float(sides.sum() / max(int(positions), 1))


def first_fit(sides: np.ndarray, buckets: Sequence[Sequence[int]]) -> np.ndarray:
    """Number of the first bucket that holds every side of an example: [N, sides] -> [N]."""
    edges = np.asarray(buckets).T
    return np.max([np.searchsorted(edge, column) for edge, column in zip(edges, sides.T, strict=True)], axis=0)


def batch_shapes(buckets: Sequence[Sequence[int]], tokens_per_batch: int, multiple_of: int = 1) -> list[BatchShape]:
    """Rows of each bucket under a token budget.

    Args:
      buckets: length of each bucket's sides.
      tokens_per_batch: most positions of one side, padding included.
      multiple_of: rows are a multiple of it, so that devices share them evenly.

    Returns:
      One shape for each bucket.

    Raises:
      ValueError: the budget does not hold `multiple_of` rows of the longest bucket.

    Example:
      >>> batch_shapes([[8], [32]], tokens_per_batch=100, multiple_of=2)[0]
      BatchShape(rows=12, length=8, target_length=None)
    """
    longest = max(max(sides) for sides in buckets)
    if longest * multiple_of > tokens_per_batch:
        raise ValueError(f"data.tokens_per_batch is {tokens_per_batch}, but {multiple_of} rows (a multiple of the "
                         f"devices) of length {longest} need at least {longest * multiple_of}")
    return [BatchShape(tokens_per_batch // max(sides) // multiple_of * multiple_of, *sides) for sides in buckets]


def pad_batch(examples: Sequence[Example], shape: BatchShape, pad_id: int) -> Batch:
    """Stack examples, padded on the right; missing rows are padding with weight 0.

    Validity comes from the examples' lengths alone: an id that equals `pad_id` inside an example stays valid.

    Args:
      examples: at most `shape.rows` dicts of [L] arrays no longer than the shape's side, and of scalars.
      shape: of the batch.
      pad_id: what ids are filled with.

    Returns:
      Their arrays [B, L] (scalars [B]), and a bool mask for each stream: `source_mask` and `target_mask`, or `mask`.
    """
    batch: Batch = {}
    for name, first in examples[0].items():
        if first.ndim == 0:
            batch[name] = np.zeros(shape.rows, first.dtype)
            batch[name][:len(examples)] = [example[name] for example in examples]
            continue
        fill = pad_id if first.dtype.kind == "i" else 0
        batch[name] = np.full((shape.rows, shape.length_of(name)), fill, first.dtype)
        for row, example in zip(batch[name], examples, strict=False):
            row[:len(example[name])] = example[name]
    for stream in ("source", "target", "tokens"):
        if stream in examples[0]:
            lengths = np.zeros(shape.rows, np.int64)
            lengths[:len(examples)] = [len(example[stream]) for example in examples]
            batch[mask_name(stream)] = np.arange(shape.length_of(stream)) < lengths[:, None]
    return batch


def mask_name(stream: str) -> str:
    """Name of the validity mask of `source`, `target` or `tokens`."""
    return "mask" if stream == "tokens" else f"{stream}_mask"
