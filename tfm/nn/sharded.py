"""Attention on a mesh: each device attends for its own rows and heads, and where sequences are split, round a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from tfm.ops.attention import Implementation, attention
from tfm.ops.masks import And, Causal, Or, Padding, Prefix, Segments, Window
from tfm.ops.positions import Bias, Shaw
from tfm.ops.ring import ring_attention
from tfm.parallel.rules import ACTIVATION_AXES
from tfm.parallel.sequence import AXIS


def attend_on_mesh(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, bias: Any, scale: float | None,
                   soft_cap: float | None, relative: Shaw | None, query_positions: Any, key_positions: Any,
                   implementation: Implementation) -> jax.Array | None:
    """`attention` over the current mesh, without dropout; None where there is none, or it is not made for this.

    Left to itself, the compiler would gather rows and heads of a kernel that goes through them in a loop, and let
    every device compute all of them. Positions that are known when it is compiled stay known.

    Args: as for `tfm.ops.attention`.

    Returns:
        [B, T, H, Dv]; None: without a mesh, for rows, heads or lengths that it does not divide, and for masks and
        biases that are no rules over positions, padding and segments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return None
    parts = {letter: _parts(mesh, letter) for letter in "BTHK"}
    sizes = {"B": (query.shape[0],), "T": (query.shape[1], key.shape[1]), "H": query.shape[2:3], "K": key.shape[2:3]}
    divided = all(size % parts[letter] == 0 for letter in sizes for size in sizes[letter])
    ring = parts["T"] > 1
    if not (divided and _is_local(mask) and (bias is None or isinstance(bias, Bias)) and not (ring and relative)):
        return None
    rows, heads, place = (ACTIVATION_AXES[letter] for letter in "BHT")
    tokens = PartitionSpec(rows, place, heads)
    numbers = [np.arange(x.shape[1], dtype=np.int32) if positions is None else positions
               for x, positions in ((query, query_positions), (key, key_positions))]
    known = [not ring and isinstance(x, np.ndarray) and np.atleast_2d(x).shape[0] == 1 for x in numbers]
    given = [None if stay else jnp.atleast_2d(x) for x, stay in zip(numbers, known, strict=True)]
    named = jax.tree.map(jnp.asarray, {"mask": mask, "bias": bias, "relative": relative, "positions": given})
    specs = {"mask": jax.tree.map(partial(_along, (rows, place)), named["mask"]),
             "bias": jax.tree.map(lambda x: PartitionSpec(*[None] * (x.ndim - 1), heads), named["bias"]),
             "relative": jax.tree.map(lambda x: PartitionSpec(), named["relative"]),
             "positions": jax.tree.map(partial(_along, (rows, place)), given)}

    def local(query: jax.Array, key: jax.Array, value: jax.Array, named: dict[str, Any]) -> Any:
        here = [x if stay else y for x, y, stay in zip(numbers, named["positions"], known, strict=True)]
        common = {"mask": named["mask"], "bias": named["bias"], "scale": scale, "soft_cap": soft_cap,
                  "query_positions": here[0], "key_positions": here[1]}
        if ring:
            return ring_attention(query, key, value, axis_name=AXIS, **common)
        return attention(query, key, value, relative=named["relative"], implementation=implementation, **common)

    spread = jax.shard_map(local, in_specs=(tokens, tokens, tokens, specs), out_specs=tokens, check_vma=ring)
    return spread(query, key, value, named)


def _parts(mesh: Any, letter: str) -> int:
    """Parts that the mesh makes of a dimension."""
    axes = ACTIVATION_AXES[letter]
    return math.prod(mesh.shape.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def _is_local(mask: Any) -> bool:
    """Whether a mask is made of rules whose arrays go along with rows and tokens, alike for all heads."""
    if isinstance(mask, And | Or):
        return _is_local(mask.first) and _is_local(mask.second)
    if isinstance(mask, Window):
        return len(set(mask.dilations)) == 1
    return mask is None or isinstance(mask, Causal | Padding | Prefix | Segments)


def _along(axes: Sequence[Any], x: jax.Array) -> PartitionSpec:
    """How the [B] or [1|B, L] arrays of a mask are split, and positions."""
    if x.ndim == 0:
        return PartitionSpec()
    rows = axes[0] if x.shape[0] > 1 else None
    return PartitionSpec(rows) if x.ndim == 1 else PartitionSpec(rows, axes[1])
