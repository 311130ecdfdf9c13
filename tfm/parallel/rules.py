"""Which mesh axes split which dimensions: of parameters by their path, of activations by their letters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None

ACTIVATION_AXES: dict[str, MeshAxes] = {
    "B": ("data", "fsdp"),
    "T": "sequence",
    "S": None,
    "M": None,
    "H": "tensor",
    "K": "tensor",
    "D": None,
    "F": "tensor",
    "V": "tensor",
}
"""The design's letters -> mesh axes."""


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Ask for x to be spread over the current mesh by the letters of its dimensions; the values stay the same.

    Without a mesh, or inside `shard_map`, x comes back as it is. A dimension that its mesh axes do not divide stays
    whole.

    Args:
        x: [...] array.
        axes: a letter of `ACTIVATION_AXES` or None for each dimension: `constrain(x, ("B", "T", "M"))`.

    Returns:
        x.

    Example:
        >>> import jax.numpy as jnp
        >>> constrain(jnp.ones((2, 3)), ("B", "T")).shape
        (2, 3)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return x
    wanted = [None if letter is None else ACTIVATION_AXES[letter] for letter in axes]
    spec = _fitting(x.shape, wanted, dict(mesh.shape))
    return jax.lax.with_sharding_constraint(x, spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch's arrays: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def batch_shards(mesh: Mesh) -> int:
    """Number of parts into which the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def _fitting(shape: Sequence[int], axes: Sequence[MeshAxes], sizes: dict[str, int]) -> PartitionSpec:
    """The axes as a PartitionSpec, without those that do not divide their dimension."""
    kept: list[Any] = []
    for length, names in zip(shape, axes, strict=True):
        parts = math.prod(sizes.get(name, 1) for name in ((names,) if isinstance(names, str) else names or ()))
        kept.append(names if parts > 1 and length % parts == 0 else None)
    return PartitionSpec(*kept)


def state_shardings(shapes: Any, mesh: Mesh) -> Any:
    """A sharding for every leaf of a train state (or of a params tree), from shapes alone."""
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes)


def path_name(path: Sequence[Any]) -> str:
    """`decoder/layers_0/self_attention/query/kernel` for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Put the rows that this process holds onto its devices; together they are the global batch.

    Args:
        batch: [rows, ...] arrays; over all processes, `batch_shards(mesh)` must divide the number of rows.
        mesh: where to.

    Returns:
        global arrays, rows split as `batch_sharding` says.
    """
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}
