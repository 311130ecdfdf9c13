"""Several examples in one row, through grain's first-fit packer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfm.data.batch import IDS, Batch, BatchShape, mask_name
from tfm.data.examples import Examples
from tfm.data.plan import EpochOrder
from tfm.data.tokenizer import Tokenizer

_ENDLESS = 1 << 60
_BATCHES = 32  # packed at a time: more fill rows better, and cost more when resuming
_MOST_BINS = 4096  # an example is offered to every row: more rows fill no better, and make packing slow


def packing_bins(rows: int, most: int | None = _MOST_BINS) -> int:
    """Rows that are packed at a time, for batches of so many; most: None for no limit, as in states without `bins`.

    Example:
      >>> packing_bins(4), packing_bins(1000), packing_bins(5000), packing_bins(1000, None)
      (128, 4096, 5000, 32000)
    """
    bins = _BATCHES * rows
    return bins if most is None else max(rows, min(bins, most))


def pack_dataset(examples: Examples, order: EpochOrder, shape: BatchShape, tokenizer: Tokenizer, seed: int,
                 part: range, bins: int) -> Any:
    """A grain dataset of packed batches.

    Every process packs all rows and keeps its own: so the batches, and the state from which they go on, are the same
    whatever the number of processes.

    Args:
      examples: what is packed; each fits a row.
      order: which example comes at which place.
      shape: rows and length of a batch of all processes.
      tokenizer: its `pad_id` fills rows up, its `bos_id` begins the decoder's inputs.
      seed: of the order of rows.
      part: this process's rows; those from `shape.rows` on are padding.
      bins: rows that are packed at a time.

    Returns:
      An endless `grain.IterDataset` of batches with positions and segments (0: padding).
    """
    import grain

    first = examples.make(order[0][1], order[0][0])
    if any(array.ndim == 0 for array in first.values()):
        raise ValueError("data.batching is 'pack', but examples with one value a row (prefix_lm, classify) cannot "
                         "share rows: use 'bucket'")
    names = [name for name in first if name not in _derived(first)]

    def make(index: int) -> dict[str, np.ndarray]:
        epoch, number = order[int(index)]
        example = examples.make(number, epoch)
        return {name: example[name] for name in names}

    dataset = grain.MapDataset.range(_ENDLESS).map(make).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    packed = grain.experimental.FirstFitPackIterDataset(
        dataset, length_struct={name: shape.length_of(name) for name in names},
        num_packing_bins=bins, seed=seed,
        padding_struct={name: tokenizer.pad_id if first[name].dtype.kind == "i" else 0 for name in names})
    batched = packed.batch(shape.rows, drop_remainder=True).map(
        functools.partial(_own_rows, part=part, fill={name: tokenizer.pad_id for name in names if name in IDS})).map(
        functools.partial(to_packed_batch, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id))
    return grain.experimental.ThreadPrefetchIterDataset(batched, prefetch_buffer_size=2)


def _own_rows(packed: dict[str, np.ndarray], *, part: range, fill: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The rows of one process; where there are none, `fill` or zeros."""
    own = {name: array[part.start:part.stop] for name, array in packed.items()}
    return {name: np.concatenate([rows, np.full((len(part) - len(rows), *rows.shape[1:]), fill.get(name, 0),
                                                rows.dtype)]) for name, rows in own.items()}


def packed_sides(sides: np.ndarray, max_length: int, most: int) -> tuple[int, ...]:
    """Lengths of a packed row's sides, in proportion to their tokens, so that both fill up together.

    Args:
      sides: [N, sides] lengths of the examples.
      max_length: of an example.
      most: a row is no longer, unless an example is.

    Returns:
      Length of each side: no example is longer. The longest is `max_length`; of pairs up to 1.5 times as long, and
      at least 1.25 times where several share a row: the more, the better both sides fill up together.

    Example:
      >>> packed_sides(np.array([[9, 10], [11, 12]]), 80, most=1000)
      (91, 100)
    """
    totals, longest = np.maximum(sides.sum(axis=0), 1), sides.max(axis=0, initial=1)
    shares = totals / totals.max()
    several = sides.shape[1] > 1 and 3 * totals.max() < len(sides) * max_length
    wide = 1.25 * max_length if several else max_length
    unit = min(max(wide, float((longest / shares).max())), 1.5 * max_length, max(most, max_length))
    return tuple(max(int(least), round(unit * float(share))) for least, share in zip(longest, shares, strict=True))


def _derived(example: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Arrays that a packed batch gets from the others: the packer's time goes by the number of arrays."""
    if "source" in example:
        return ("target", "weights")
    return ("weights",) if example["weights"].all() else ()


def to_packed_batch(packed: dict[str, np.ndarray], *, pad_id: int, bos_id: int) -> Batch:
    """Rename the packer's arrays, read validity off the segments, and add what follows from the labels."""
    batch = {name: array for name, array in packed.items()
             if not name.endswith(("_segment_ids", "_positions"))}
    streams = {"source": "source", "target": "labels"} if "source" in packed else {"tokens": "tokens"}
    for stream, name in streams.items():
        prefix = "" if stream == "tokens" else f"{stream}_"
        batch[f"{prefix}segments"] = packed[f"{name}_segment_ids"].astype(np.int32)
        batch[f"{prefix}positions"] = packed[f"{name}_positions"].astype(np.int32)
        batch[mask_name(stream)] = mask = packed[f"{name}_segment_ids"] > 0
    if "source" in packed:
        before = np.roll(batch["labels"], 1, axis=1)
        batch["target"] = np.where(batch["target_positions"] == 0, bos_id, before)
        batch["target"] = np.where(mask, batch["target"], pad_id).astype(np.int32)
    if "weights" not in batch:
        batch["weights"] = mask.astype(np.float32)
    return batch
