"""Attention over a sequence that is spread over devices: keys and values go round in a ring."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.attention import make_scoring, merge
from tfm.ops.block import Sides
from tfm.ops.blockwise import forward
from tfm.ops.blockwise_backward import backward
from tfm.ops.dense import Scoring, accumulator, check_shapes
from tfm.ops.fit import check_fit
from tfm.ops.masks import Rule
from tfm.ops.plan import Plan, make_plan, places
from tfm.ops.positions import Bias, MatrixBias
from tfm.ops.tiles import SIZES
from tfm.ops.tokens import Array, Tokens, as_batch, vary_alike


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    mask: Rule | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    soft_cap: float | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """`attention` inside `shard_map`, the sequence being sharded over a mesh axis; exact, values and gradients.

    Each device keeps its queries; keys and values, with what the mask knows of them, go round.  Blocks that the mask
    empties are not computed.  Memory per device is that of its own piece.

    Args:
      query: [B, T, H, D] float, this device's piece of the queries.
      key: [B, S, K, D] float, this device's piece of the keys.
      value: [B, S, K, Dv] float.
      axis_name: the mesh axis over which the sequence is sharded.
      mask: a rule; its arrays over keys (of Padding, Segments) are this device's piece.
      bias: a bias rule over positions.
      scale: as for `attention`.
      query_positions: [T] or [B, T] int, in the whole sequence; None: pieces of equal length in order.
      key_positions: [S] or [B, S] int, likewise.
      soft_cap: as for `attention`.
      block_size: as for `attention`.

    Returns:
      [B, T, H, Dv], the query's dtype, this device's piece.

    Raises:
      ValueError: shapes that do not fit, a mask or a bias that is an array.

    Reference: Liu, Zaharia and Abbeel (2023), Ring Attention with Blockwise Transformers, section 3.
    """
    check_shapes(query, key, value)
    scoring = make_scoring(query, mask, bias, scale, None, soft_cap, 0.0)
    if isinstance(scoring.bias, MatrixBias):
        raise ValueError("bias is an array, which cannot move with the keys; use a bias rule over positions")
    check_fit(scoring, query, key.shape[1], value.shape[3])
    positions = tuple(_positions(x, given, axis_name) for x, given in ((query, query_positions), (key, key_positions)))
    heads, sides = (query.shape[2], key.shape[2]), (Tokens(positions[0]), Tokens(positions[1]))
    size = SIZES[1] if block_size is None else block_size
    plan = make_plan(scoring.rule, sides, query.shape[0], heads, tuple(range(heads[0])), key.shape[1], size, 1)
    at = tuple((x, jnp.asarray(places(Tokens(x), block))) for x, block in zip(positions, plan.blocks, strict=True))
    return _ring(plan, axis_name, *vary_alike((query, key, value, scoring, at)))


def _positions(x: jax.Array, positions: Array | None, axis_name: str) -> jax.Array:
    """[B|1, L] int32."""
    if positions is None:
        positions = lax.axis_index(axis_name) * x.shape[1] + jnp.arange(x.shape[1], dtype=jnp.int32)
    return as_batch(positions, "positions")


def _pass_on(x: Any, axis_name: str) -> Any:
    """Every device's arrays to the next device."""
    size = lax.axis_size(axis_name)
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, [(i, (i + 1) % size) for i in range(size)]), x)


def _pass_keys_on(key: jax.Array, value: jax.Array, scoring: Scoring, at: Sides, axis_name: str) -> tuple:
    """Keys, values and what goes along with them, to the next device."""
    move = functools.partial(_pass_on, axis_name=axis_name)
    if scoring.rule is not None:
        scoring = dataclasses.replace(scoring, rule=scoring.rule.map_keys(move))
    return move(key), move(value), scoring, (at[0], (move(at[1][0]), at[1][1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    plan: Plan, axis_name: str, query: jax.Array, key: jax.Array, value: jax.Array, scoring: Scoring, at: Sides
) -> jax.Array:
    return _ring_forward(plan, axis_name, query, key, value, scoring, at)[0]


def _ring_forward(
    plan: Plan, axis_name: str, query: jax.Array, key: jax.Array, value: jax.Array, scoring: Scoring, at: Sides
) -> tuple[jax.Array, jax.Array]:
    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        total, k, v, here, at = carry
        k, v, here, at = _pass_keys_on(k, v, here, at, axis_name)
        return (merge([total, forward(plan, query, k, v, here, at, None)]), k, v, here, at), None

    output, lse = forward(plan, query, key, value, scoring, at, None)
    total = output.astype(accumulator(output)), lse
    start: tuple = total, key, value, scoring, at
    (total, *_), _ = lax.scan(step, start, length=lax.axis_size(axis_name) - 1)
    return total[0].astype(query.dtype), total[1]


def _ring_fwd(plan: Plan, axis_name: str, *arguments: Any) -> tuple:
    output, lse = _ring_forward(plan, axis_name, *arguments)
    return output, (*arguments, output, lse)


def _ring_bwd(plan: Plan, axis_name: str, saved: tuple, d_output: jax.Array) -> tuple:
    """The gradients of keys and values go round with them, and are home after a whole turn."""
    query, key, value, scoring, at, output, lse = saved
    leaves, structure = jax.tree.flatten(scoring)
    free = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        d_query, d_key, d_value, d_free, k, v, here, at = carry
        more = backward(plan, query, k, v, here, at, None, output, lse, d_output, jnp.zeros_like(lse))
        changes = [x for x, is_free in zip(jax.tree.leaves(more[3]), free, strict=True) if is_free]
        d_free = [total + x for total, x in zip(d_free, changes, strict=True)]
        d_key, d_value = _pass_on((d_key + more[1], d_value + more[2]), axis_name)
        return (d_query + more[0], d_key, d_value, d_free, *_pass_keys_on(k, v, here, at, axis_name)), None

    arrays = query, key, value, [x for x, is_free in zip(leaves, free, strict=True) if is_free]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator(x)), arrays)
    start = *vary_alike(zeros, query), key, value, scoring, at
    (*gradients, d_free, _, _, _, _), _ = lax.scan(step, start, length=lax.axis_size(axis_name))
    d_arrays = iter(d_free)
    d_scoring = [
        next(d_arrays).astype(x.dtype) if is_free else np.zeros(x.shape, jax.dtypes.float0)
        for x, is_free in zip(leaves, free, strict=True)
    ]
    typed = (x.astype(like.dtype) for x, like in zip(gradients, (query, key, value), strict=True))
    return *typed, jax.tree.unflatten(structure, d_scoring), None


_ring.defvjp(_ring_fwd, _ring_bwd)
