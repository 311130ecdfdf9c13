"""Which examples make up batch number i: shuffled anew each epoch, every example once an epoch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tfm.data.batch import BatchShape, first_fit


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """[size] int64: the order of the examples in one epoch."""
    return np.random.default_rng([seed, epoch, 0x0DE2]).permutation(size)


class EpochOrder:
    """Endless sequence of (epoch, example): each epoch a new order of all examples."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: epoch_order(seed, epoch, size))

    def __getitem__(self, index: int) -> tuple[int, int]:
        epoch, position = divmod(index, self._size)
        return epoch, int(self._order(epoch)[position])


class BucketPlan:
    """Batches by length bucket. A batch is given out when its bucket is full, the rest at the end of the epoch.

    Every epoch has the same number of batches of each shape, so batch i is known without the ones before it:
    the state of an iterator is one number.

    Args:
      lengths: [N] or [N, sides] int, length of each example's sides.
      shapes: of the buckets, by increasing length of each side.
      seed: of the order.
      shuffle: False: one pass in the order of the data.
    """

    def __init__(self, lengths: np.ndarray, shapes: Sequence[BatchShape], seed: int = 0, *,
                 shuffle: bool = True) -> None:
        self._bucket = first_fit(lengths.reshape(len(lengths), -1), [shape.sides for shape in shapes])
        self._shapes, self._seed, self._shuffle = list(shapes), seed, shuffle
        numbers = np.bincount(self._bucket, minlength=len(shapes))
        self.batches_per_shape = [-(-int(n) // shape.rows) for n, shape in zip(numbers, shapes, strict=True)]
        self.batches_per_epoch = sum(self.batches_per_shape)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __getitem__(self, index: int) -> tuple[int, BatchShape, np.ndarray]:
        """Epoch, shape and example numbers of batch `index`, counted from the start of training."""
        epoch, position = divmod(index, self.batches_per_epoch)
        bucket, examples = self._epoch(epoch)[position]
        return epoch, self._shapes[bucket], examples

    def _plan_epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        size = len(self._bucket)
        order = epoch_order(self._seed, epoch, size) if self._shuffle else np.arange(size)
        bucket_in_order = self._bucket[order]
        batches: list[tuple[int, int, np.ndarray]] = []
        for bucket, shape in enumerate(self._shapes):
            places = np.flatnonzero(bucket_in_order == bucket)
            for start in range(0, len(places), shape.rows):
                chunk = places[start:start + shape.rows]
                full_at = int(chunk[-1]) if len(chunk) == shape.rows else size + bucket
                batches.append((full_at, bucket, order[chunk]))
        batches.sort(key=lambda item: item[0])
        return [(bucket, examples) for _, bucket, examples in batches]

    @property
    def padded_positions(self) -> int:
        """Positions of all sides in an epoch, padding included."""
        return sum(n * shape.rows * sum(shape.sides)
                   for n, shape in zip(self.batches_per_shape, self._shapes, strict=True))
