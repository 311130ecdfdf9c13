"""Ragged rows of ids as batches of a few fixed shapes, on one device or spread over all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tfm.config import ModelConfig, require

Rows = Sequence[Sequence[int]]


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


def batches(rows: Rows, batch_size: int) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Group rows by bucket: (numbers of the rows, ids [B, S], mask [B, S]); B is a power of two or batch_size.

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
