"""Attention of sequences that the mesh spreads over devices: each keeps its queries, keys and values go round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from tfm.ops.masks import And, Causal, Or, Padding, Prefix, Segments, Window
from tfm.ops.positions import Bias
from tfm.ops.ring import ring_attention
from tfm.parallel.rules import ACTIVATION_AXES
from tfm.parallel.sequence import AXIS


def attend_round(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, bias: Any, scale: float | None,
                 soft_cap: float | None, query_positions: Any, key_positions: Any) -> jax.Array | None:
    """`attention` by `ring_attention` over the current mesh; None where the mesh or the mask is not made for it.

    Args:
        query, key, value: [B, T, H, D], [B, S, K, D], [B, S, K, Dv] float; the rest is as for `tfm.ops.attention`.

    Returns:
        [B, T, H, Dv]; None: without a mesh that splits sequences, for lengths that it does not divide, and for masks
        and biases that are no rules over positions, padding and segments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get(AXIS, 1) == 1 or AxisType.Manual in mesh.axis_types:
        return None
    if query.shape[1] % mesh.shape[AXIS] or key.shape[1] % mesh.shape[AXIS]:
        return None
    if not (_is_local(mask) and (bias is None or isinstance(bias, Bias))):
        return None
    rows = _divided(mesh, "B", query.shape[0])
    heads = _divided(mesh, "H", query.shape[2]) if _divided(mesh, "K", key.shape[2]) else None
    tokens = PartitionSpec(rows, AXIS, heads)
    positions = tuple(jnp.atleast_2d(jnp.arange(x.shape[1], dtype=jnp.int32) if given is None else given)
                      for x, given in ((query, query_positions), (key, key_positions)))
    scoring = jax.tree.map(jnp.asarray, (mask, bias))
    specs = (jax.tree.map(lambda x: _spec_of_mask(x, rows), scoring[0]),
             jax.tree.map(lambda x: PartitionSpec(*[None] * (x.ndim - 1), heads), scoring[1]))

    def local(query: jax.Array, key: jax.Array, value: jax.Array, scoring: tuple[Any, Any],
              positions: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ring_attention(query, key, value, axis_name=AXIS, mask=scoring[0], bias=scoring[1], scale=scale,
                              soft_cap=soft_cap, query_positions=positions[0], key_positions=positions[1])

    spread = jax.shard_map(local, in_specs=(tokens, tokens, tokens, specs,
                                            tuple(_spec_of_mask(x, rows) for x in positions)), out_specs=tokens)
    return spread(query, key, value, scoring, positions)


def _divided(mesh: Any, letter: str, size: int) -> Any:
    """The mesh axes of a dimension, or None where they do not divide it."""
    axes = ACTIVATION_AXES[letter]
    parts = 1
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        parts *= mesh.shape.get(axis, 1)
    return axes if parts > 1 and size % parts == 0 else None


def _is_local(mask: Any) -> bool:
    """Whether a mask is made of rules whose arrays go along with rows and tokens."""
    if isinstance(mask, And | Or):
        return _is_local(mask.first) and _is_local(mask.second)
    if isinstance(mask, Window):
        return len(set(mask.dilations)) == 1
    return mask is None or isinstance(mask, Causal | Padding | Prefix | Segments)


def _spec_of_mask(x: jax.Array, rows: Any) -> PartitionSpec:
    """[B] or [1|B, L]: by rows and tokens."""
    if x.ndim == 0:
        return PartitionSpec()
    along = rows if x.shape[0] > 1 else None
    return PartitionSpec(along) if x.ndim == 1 else PartitionSpec(along, AXIS)
