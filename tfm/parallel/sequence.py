"""Long sequences over devices: in which order their tokens stand, and how many parts the current mesh makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

AXIS = "sequence"
SIDES = {
    "tokens": ("tokens", "mask", "positions", "segments", "token_types", "labels", "weights"),
    "target": ("target", "target_mask", "target_positions", "target_segments", "labels", "weights"),
}
"""The arrays of a batch that have a causal decoder's tokens along their second dimension."""


def mesh_parts(*axes: str) -> int:
    """Parts that axes of the current mesh make together; 1 without a mesh, or inside `shard_map`.

    Example:
        >>> mesh_parts("data", "fsdp")
        1
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return 1
    return int(np.prod([mesh.shape.get(axis, 1) for axis in axes]))


def zigzag(length: int, devices: int) -> np.ndarray:
    """The order of tokens in which each device has as much causal attention to compute as any other.

    The sequence is cut into 2 n pieces; device i holds the pieces i and 2 n - 1 - i, one with few tokens before it and
    one with many.

    Args:
        length: tokens; a multiple of 2 n.
        devices: n.

    Returns:
        [length] int32, positions in the order in which devices hold them.

    Example:
        >>> zigzag(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]

    Reference: Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2 (context parallelism).
    """
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.concatenate([pieces[[i, 2 * devices - 1 - i]].ravel() for i in range(devices)])


def in_ring_order(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose causal side is in `zigzag` order, where the current mesh splits sequences and their length allows.

    Args:
        batch: arrays of [B, T], with the positions of each side: nothing else knows of the order.
    """
    devices, ordered = mesh_parts(AXIS), dict(batch)
    for side, names in SIDES.items():
        if devices == 1 or side not in batch or batch[side].shape[1] % (2 * devices):
            continue
        order = zigzag(batch[side].shape[1], devices)
        ordered |= {name: batch[name][..., order] for name in names if name in batch}
    return ordered
