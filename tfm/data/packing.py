"""Several examples in one row, through grain's first-fit packer."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfm.data.batch import Batch, BatchShape, mask_name
from tfm.data.examples import Examples
from tfm.data.plan import EpochOrder

_ENDLESS = 1 << 60
_BINS = 4  # batches packed at a time: more fill rows better, and cost more when resuming


def pack_dataset(examples: Examples, order: EpochOrder, shape: BatchShape, pad_id: int, seed: int, process_index: int,
                 process_count: int) -> Any:
    """A grain dataset of packed batches.

    Args:
      examples: what is packed; each fits a row.
      order: which example comes at which place.
      shape: rows and length of a batch of this process.
      pad_id: what ids are filled with.
      seed: of the order of rows.
      process_index, process_count: this process packs every `process_count`-th example.

    Returns:
      An endless `grain.IterDataset` of batches with positions and segments (0: padding).
    """
    import grain

    def make(index: int) -> dict[str, np.ndarray]:
        epoch, example = order[int(index)]
        return examples.make(example, epoch)

    first = make(0)
    if any(array.ndim == 0 for array in first.values()):
        raise ValueError("data.batching is 'pack', but examples with one value a row (prefix_lm, classify) cannot "
                         "share rows: use 'bucket'")
    dataset = grain.MapDataset.range(_ENDLESS)[process_index::process_count].map(make).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    packed = grain.experimental.FirstFitPackIterDataset(
        dataset, length_struct=dict.fromkeys(first, shape.length), num_packing_bins=shape.rows * _BINS, seed=seed,
        padding_struct={name: pad_id if array.dtype.kind == "i" else 0 for name, array in first.items()})
    batched = packed.batch(shape.rows, drop_remainder=True).map(to_packed_batch)
    return grain.experimental.ThreadPrefetchIterDataset(batched, prefetch_buffer_size=2)


def to_packed_batch(packed: dict[str, np.ndarray]) -> Batch:
    """Rename the packer's arrays, and read validity off the segments."""
    batch = {name: array for name, array in packed.items()
             if not name.endswith(("_segment_ids", "_positions"))}
    for stream in ("source", "target", "tokens"):
        if stream not in packed:
            continue
        prefix = "" if stream == "tokens" else f"{stream}_"
        batch[f"{prefix}segments"] = packed[f"{stream}_segment_ids"].astype(np.int32)
        batch[f"{prefix}positions"] = packed[f"{stream}_positions"].astype(np.int32)
        batch[mask_name(stream)] = packed[f"{stream}_segment_ids"] > 0
    return batch
