"""Which mesh axes split which dimensions: of parameters by their path, of activations by their letters."""

from __future__ import annotations

import math
import re
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


Rules = tuple[tuple[str, tuple[MeshAxes, ...]], ...]

PARAMETER_RULES: Rules = (
    (r"(^|/)(query|key|value)/kernel$", ("fsdp", "tensor")),
    (r"(^|/)(query|key|value)/bias$", ("tensor",)),
    (r"attention/output/kernel$", ("tensor", "fsdp")),
    (r"(^|/)(up|gate)/kernel$", ("fsdp", "tensor")),
    (r"(^|/)(up|gate)/bias$", ("tensor",)),
    (r"(^|/)down/kernel$", ("tensor", "fsdp")),
    (r"(^|/)(token_embedding|source_embedding|target_embedding)/table$", ("tensor", "fsdp")),
    (r"(^|(?<!attention)/)output/table$", ("tensor", "fsdp")),
    (r"(^|(?<!attention)/)output/bias$", ("tensor",)),
    (r"(^|/)(pooler|token_head)/kernel$", ("fsdp", None)),
    (r"(^|/)(positions|token_types)/table$", (None, "fsdp")),
    (r"(^|/)(down|pooler|token_head)/bias$", ()),
    (r"(^|/)\w*attention/output/bias$", ()),
    (r"(^|/)(relative_bias/table|relative_keys|relative_values)$", ()),
    (r"(^|/)\w*norm/(scale|bias)$", ()),
    (r"(^|/)lora_[ab]$", ()),
    (r"^classifier/(kernel|bias)$", ()),
)
"""Path of a parameter -> the mesh axes of its last dimensions. The dimensions are [in, out] for kernels (heads and
inner widths are split by `tensor`) and [rows, M] for tables. Each path matches exactly one rule."""


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


def parameter_rule(path: str, rules: Rules = PARAMETER_RULES) -> tuple[MeshAxes, ...]:
    """The axes that split the last dimensions of the parameter with this path: those of the first rule that matches.

    Raises:
        ValueError: no rule matches.

    Example:
        >>> parameter_rule("decoder/layers_0/self_attention/query/kernel")
        ('fsdp', 'tensor')
    """
    for pattern, axes in rules:
        if re.search(pattern, path):
            return axes
    raise ValueError(f"no rule of tfm.parallel.rules says how the parameter {path} is split")


def parameter_shardings(shapes: Any, mesh: Mesh, rules: Rules = PARAMETER_RULES) -> Any:
    """A sharding for every parameter, from shapes alone.

    Args:
        shapes: params tree of arrays or `jax.ShapeDtypeStruct`.
        mesh: the mesh.
        rules: (path pattern, axes of the last dimensions); the first match wins.

    Returns:
        the same tree of `NamedSharding`. A dimension that its axes do not divide stays whole.

    Raises:
        ValueError: a path that no rule matches.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(leaf.shape, parameter_rule(path_name(path), rules), mesh)), shapes)


def state_shardings(shapes: Any, mesh: Mesh, rules: Rules = PARAMETER_RULES) -> Any:
    """A sharding for every leaf of a train state: parameters and all that is shaped like them by the rules.

    Args:
        shapes: `TrainState` of arrays or `jax.ShapeDtypeStruct`.
        mesh: the mesh.
        rules: as for `parameter_shardings`.

    Returns:
        the same tree of `NamedSharding`. What is no parameter, such as a counter, is on every device.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = path_name(path)
        if not any(re.search(pattern, name) for pattern, _ in rules):
            return NamedSharding(mesh, PartitionSpec())
        axes = parameter_rule(name, rules)
        return NamedSharding(mesh, _spec(leaf.shape, axes if leaf.ndim >= len(axes) else (), mesh))

    parameters = {name: parameter_shardings(getattr(shapes, name), mesh, rules) for name in ("params", "ema")}
    return jax.tree_util.tree_map_with_path(one, shapes).replace(**parameters)


def sharding_table(shapes: Any, mesh: Mesh) -> list[tuple[str, str]]:
    """(path, shape and axes) for each parameter; the layers of a stack that are alike share one row.

    Example:
        >>> from tfm.parallel.mesh import make_mesh
        >>> mesh = make_mesh("data=1", jax.devices()[:1])
        >>> sharding_table({"up": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")}}, mesh)
        [('up/kernel', '[4, 8] whole')]
    """
    shardings = dict(jax.tree_util.tree_leaves_with_path(parameter_shardings(shapes, mesh)))
    rows: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        axes = ", ".join("whole" if axis is None else "+".join((axis,) if isinstance(axis, str) else axis)
                         for axis in shardings[path].spec)
        split = any(axis is not None for axis in shardings[path].spec)
        rows[re.sub(r"layers_\d+", "layers_*", path_name(path))] = f"{list(leaf.shape)} {axes if split else 'whole'}"
    return list(rows.items())


def _spec(shape: Sequence[int], axes: Sequence[MeshAxes], mesh: Mesh) -> PartitionSpec:
    """The axes at the last dimensions; those before, such as that of scanned layers, stay whole."""
    return _fitting(shape, [*[None] * (len(shape) - len(axes)), *axes], dict(mesh.shape))


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


def place_whole_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """As `place_batch`, where every process holds all rows."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_callback(x.shape, sharding, lambda rows, x=x: x[rows])  # type: ignore[misc]
            for name, x in batch.items()}
