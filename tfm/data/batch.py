"""Examples of different lengths as arrays of a few fixed shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Example = Mapping[str, np.ndarray]
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class BatchShape:
    """Rows B and length T (and S) of one kind of batch."""

    rows: int
    length: int


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


def batch_shapes(bucket_lengths: Sequence[int], tokens_per_batch: int, multiple_of: int = 1) -> list[BatchShape]:
    """Rows of each bucket under a token budget.

    Args:
      bucket_lengths: length of each bucket.
      tokens_per_batch: most positions of one side, padding included.
      multiple_of: rows are a multiple of it, so that devices share them evenly.

    Returns:
      One shape for each bucket.

    Raises:
      ValueError: the budget does not hold `multiple_of` rows of the longest bucket.

    Example:
      >>> batch_shapes([8, 32], tokens_per_batch=100, multiple_of=2)
      [BatchShape(rows=12, length=8), BatchShape(rows=2, length=32)]
    """
    longest = max(bucket_lengths)
    if longest * multiple_of > tokens_per_batch:
        raise ValueError(f"data.tokens_per_batch is {tokens_per_batch}, but {multiple_of} rows (a multiple of the "
                         f"devices) of length {longest} need at least {longest * multiple_of}")
    return [BatchShape(tokens_per_batch // length // multiple_of * multiple_of, length) for length in bucket_lengths]


def pad_batch(examples: Sequence[Example], shape: BatchShape, pad_id: int) -> Batch:
    """Stack examples, padded on the right; missing rows are padding with weight 0.

    Validity comes from the examples' lengths alone: an id that equals `pad_id` inside an example stays valid.

    Args:
      examples: at most `shape.rows` dicts of [L] arrays, L <= `shape.length`, and of scalars.
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
        batch[name] = np.full((shape.rows, shape.length), fill, first.dtype)
        for row, example in zip(batch[name], examples, strict=False):
            row[:len(example[name])] = example[name]
    for stream in ("source", "target", "tokens"):
        if stream in examples[0]:
            lengths = np.zeros(shape.rows, np.int64)
            lengths[:len(examples)] = [len(example[stream]) for example in examples]
            batch[mask_name(stream)] = np.arange(shape.length) < lengths[:, None]
    return batch


def mask_name(stream: str) -> str:
    """Name of the validity mask of `source`, `target` or `tokens`."""
    return "mask" if stream == "tokens" else f"{stream}_mask"
