"""Ragged rows of ids as batches of a few fixed shapes, on one device or spread over all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tfm.config import ModelConfig, require

Rows = Sequence[Sequence[int]]
Batch = tuple[list[int], np.ndarray, np.ndarray]  # numbers of the rows, ids [B, S], mask [B, S]
X = TypeVar("X")
Y = TypeVar("Y")
Stopped = Callable[[], bool]

CACHED = 1 << 26
"""Bytes of weights, about, that cores keep in their last cache while they decode."""
FEW = 16
"""Rows that are not worth cutting up."""


def bucket(length: int) -> int:
    """The padded length of a row: 8, 16, 24, 32, 48, 64, 96, 128, 192, ...

    Example:
        >>> [bucket(n) for n in (1, 9, 33, 65, 100)]
        [8, 16, 48, 96, 128]
    """
    if length <= 32:
        return max(8, -(-length // 8) * 8)
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def batches(rows: Rows, batch_size: int) -> Iterator[Batch]:
    """Group rows by bucket; B is a power of two or batch_size.

    Rows that fill up a batch copy its first one; their results are dropped since they have no number.
    """
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(bucket(len(row)), []).append(number)
    for length, numbers in sorted(groups.items()):
        for start in range(0, len(numbers), batch_size):
            chosen = numbers[start : start + batch_size]
            size = min(batch_size, 1 << (len(chosen) - 1).bit_length())
            ids, mask = np.zeros((size, length), np.int32), np.zeros((size, length), bool)
            for place, number in enumerate(chosen + [chosen[0]] * (size - len(chosen))):
                ids[place, : len(rows[number])] = rows[number]
                mask[place, : len(rows[number])] = True
            yield chosen, ids, mask


def check_rows(config: ModelConfig, rows: Rows, vocab_size: int) -> None:
    """Refuse empty rows, ids outside the vocabulary, and rows past a learned position table."""
    for number, row in enumerate(rows):
        require(len(row) > 0, f"row {number}", list(row), "it needs at least one id")
        require(min(row) >= 0 and max(row) < vocab_size, f"row {number}", [min(row), max(row)],
                f"ids must lie in [0, {vocab_size})")
        require(config.position != "learned" or len(row) <= config.max_positions, f"the length of row {number}",
                len(row), f"the model has {config.max_positions} positions: shorten the text or ask for it to be cut")


def data_mesh(params: Any) -> Mesh | None:
    """The local devices as a mesh that batches are spread over; None where there is one, or where the parameters are
    spread over several already.
    """
    placed = {device for x in jax.tree.leaves(params) if isinstance(x, jax.Array) for device in x.devices()}
    devices = jax.local_devices()
    return None if len(devices) == 1 or len(placed) > 1 else Mesh(np.array(devices), ("data",))


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """A copy of each array on each device of the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def by_row(arrays: tuple[np.ndarray, ...], mesh: Mesh | None) -> tuple[Any, ...]:
    """Arrays [B, ...] with B / n rows on each of the mesh's n devices; as they are where B is no multiple of n."""
    if mesh is None or len(arrays[0]) % mesh.size:
        return arrays
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("data")))


def batches_at_once(params: Any, batch_size: int) -> int:
    """Into how many batches, decoded side by side, a batch is best cut: two for a small model on a CPU, else one.

    A step of a small model is products too small for several cores, and what lies between them is for one; of two
    batches each core takes one. Weights that the cache does not hold would come from memory twice.
    """
    leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    platforms = {device.platform for x in leaves for device in x.devices()}
    on_one_cpu = platforms == {"cpu"} and jax.local_device_count() == 1
    small = sum(x.nbytes for x in leaves) <= CACHED
    return 2 if on_one_cpu and small and batch_size >= FEW and (os.cpu_count() or 1) > 1 else 1


def side_by_side(function: Callable[[X, Stopped], Y], items: Iterable[X], count: int) -> Iterator[Y]:
    """function(item, stopped) for each item, in order; `count` at a time, in threads.

    When the caller stops, by an interrupt or a failure, what has not begun is left out, and `stopped()` tells what has
    begun to give up.

    Example:
        >>> list(side_by_side(lambda x, stopped: abs(x), [-1, 2, -3], 2))
        [1, 2, 3]
    """
    stop = Event()
    if count == 1:
        yield from (function(item, stop.is_set) for item in items)
        return
    pool = ThreadPoolExecutor(count)
    try:
        yield from pool.map(lambda item: function(item, stop.is_set), items)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
