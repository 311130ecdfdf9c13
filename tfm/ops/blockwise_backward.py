"""The backward pass of blockwise attention: goes over the same tiles and makes the weights again.

With P the weights and delta_i = sum_j P_ij dP_ij = dO_i . O_i: dS = P * (dP - delta), dQ = dS K, dK = dS^T Q,
dV = P^T dO.  The transposed products are formed as (Q^T dS)^T, so that no large operand is transposed.

Reference: Dao et al. (2022), FlashAttention, appendix B.4.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.block import Chunk, Sides, dot, drop, empty_slots, fill, join, make_chunks, put_keys, visit
from tfm.ops.dense import NEGATIVE, Scoring, split_scale
from tfm.ops.plan import Plan
from tfm.ops.tokens import Array, vary_alike


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def backward(
    plan: Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    at: Sides,
    dropout_key: jax.Array | None,
    output: jax.Array,
    lse: jax.Array,
    d_output: jax.Array,
    d_lse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Scoring]:
    dtype = lse.dtype
    _, as_gradients = _free_arrays(scoring)
    scoring, factor = split_scale(scoring, query.dtype)
    make_chunk, indices = make_chunks(plan, query.shape[0], scoring, at, dropout_key)
    free, rebuild = _free_arrays(scoring)
    lse = jnp.where(jnp.isinf(lse), -NEGATIVE, lse)
    q, o, g = (fill(x, 1, plan.blocks[0]) for x in (query, output, d_output))
    lse, d_lse = (fill(x, 2, plan.blocks[0]) for x in (lse, d_lse))
    k, v = fill(key, 1, plan.blocks[1]), fill(value, 1, plan.blocks[1])

    def chunk(d_free: list, xs: tuple) -> tuple[list, tuple]:
        here = make_chunk(*xs)

        def load(slot: Array, column: Array, state: _Sums) -> _Sums:
            state = _flush(plan, state, slot)
            blocks = here.take(k, column, 1), here.take(v, column, 1)
            owners = lax.dynamic_update_index_in_dim(state.owners, column, slot, 0)
            return state._replace(held=put_keys(state.held, blocks, slot), owners=owners)

        def row(state: _Sums, i: Array) -> tuple[_Sums, jax.Array]:
            q_i, o_i, g_i = here.take(q, i, 0) * jnp.asarray(factor, q.dtype), here.take(o, i, 0), here.take(g, i, 0)
            delta = (o_i.astype(dtype) * g_i).sum(-1, keepdims=True) - here.take_lse(d_lse, i)
            at_i = _Row(q_i, q_i.swapaxes(1, 2), g_i, g_i.swapaxes(1, 2), here.take_lse(lse, i), delta)
            state = state._replace(query=vary_alike(jnp.zeros(q_i.shape, dtype), q_i))
            state = visit(here, i, load, functools.partial(_add_gradients, here, rebuild, at_i, i), state)
            return state._replace(query=None), here.put(state.query * factor).astype(query.dtype)

        zeros = _Sums(
            held=empty_slots(here, k, v),
            owners=jnp.zeros(plan.slots, jnp.int32),
            fresh=jnp.zeros(plan.slots, bool),
            query=None,
            slots=tuple(x.swapaxes(1, 2).astype(dtype) for x in empty_slots(here, k, v)),
            keys=tuple(
                jnp.zeros((plan.counts[1], len(x), x.shape[2], plan.blocks[1]), dtype) for x in empty_slots(here, k, v)
            ),
            free=d_free,
        )
        state, d_q = lax.scan(row, vary_alike(zeros, query), jnp.arange(plan.counts[0], dtype=jnp.int32))
        state = lax.fori_loop(np.int32(0), np.int32(plan.slots), lambda slot, state: _flush(plan, state, slot), state)
        b, heads = plan.chunk
        d_keys = tuple(x.reshape(len(x), b, heads, *x.shape[2:]).transpose(0, 1, 4, 2, 3) for x in state.keys)
        return state.free, (d_q, *d_keys)

    d_free = vary_alike([jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in free], query)
    d_free, gradients = lax.scan(chunk, d_free, indices)
    d_q, d_k, d_v = (
        join(x, plan, 2)[:, : like.shape[1]].astype(like.dtype)
        for x, like in zip(gradients, (query, key, value), strict=True)
    )
    return d_q, d_k, d_v, as_gradients(d_free, gradients=True)


@backward.defjvp
def _backward_jvp(plan: Plan, primals: tuple, tangents: tuple) -> NoReturn:
    raise NotImplementedError("blockwise attention has no second derivatives; use implementation='dense' for them")


class _Row(NamedTuple):
    """What the backward pass needs of a row of blocks."""

    query: jax.Array  # [b*k, G*bq, D]
    query_transposed: jax.Array
    d_output: jax.Array  # [b*k, G*bq, Dv]
    d_output_transposed: jax.Array
    lse: jax.Array  # [b*k, G*bq, 1]
    delta: jax.Array  # [b*k, G*bq, 1]


class _Sums(NamedTuple):
    """The keys in place, and the gradients so far: pairs are of keys and values."""

    held: tuple[jax.Array, ...]  # [b*k, slots*block, D], the keys in the slots
    owners: jax.Array  # [slots], the blocks in the slots
    fresh: jax.Array  # [slots] bool, whether a slot's gradients begin with the next tile
    slots: tuple[jax.Array, ...]  # [b*k, D, slots*block], what is still to be added to the gradients of those
    keys: tuple[jax.Array, ...]  # [nk, b*k, D, block], gradients of all
    query: Any  # [b*k, G*bq, D], of the row
    free: list[jax.Array]  # of the scoring's arrays


def _flush(plan: Plan, state: _Sums, slot: Array) -> _Sums:
    """Adds a slot's gradients to those of the block that it holds; the slot begins anew."""
    block, owner, fresh, keys = plan.blocks[1], state.owners[slot], state.fresh[slot], []
    for part, total in zip(state.slots, state.keys, strict=True):
        change = jnp.where(fresh, 0, lax.dynamic_slice_in_dim(part, slot * block, block, 2))
        keys.append(lax.dynamic_update_index_in_dim(total, total[owner] + change, owner, 0))
    return state._replace(keys=tuple(keys), fresh=lax.dynamic_update_index_in_dim(state.fresh, True, slot, 0))


def _add_gradients(
    here: Chunk, rebuild: Callable, row: _Row, i: Array, state: _Sums, columns: Array, masked: bool
) -> _Sums:
    """Takes a tile into the gradients: dS = P * (dP - delta), dQ = dS K, dK = dS^T Q, dV = P^T dO."""
    (keys, values), d_free, scoring = state.held, state.free, here.scoring
    dtype = row.lse.dtype
    products, d_weights = dot(row.query, keys, (2, 2), dtype), dot(row.d_output, values, (2, 2), dtype)
    scores, pull = products, None
    if not scoring.plain:
        scores, pull = jax.vjp(
            lambda products, query, free: here.three(
                here.scores(here.four(products), here.four(query), rebuild(free), i, columns)
            ),
            products,
            row.query,
            _free_arrays(scoring)[0],
        )
    if masked:
        scores = here.three(jnp.where(here.visible(i, columns), here.four(scores), NEGATIVE))
    weights = jnp.exp(scores - row.lse)
    dropped = drop(here, weights, i, columns) if scoring.dropout_rate else weights
    if scoring.relative is not None and scoring.relative.value_table is not None:
        more, change = _relative_value_gradients(here, rebuild, dropped, row.d_output, i, columns)
        d_weights += more
        d_free = [total + x for total, x in zip(d_free, change, strict=True)]
    if scoring.dropout_rate:
        d_weights = drop(here, d_weights, i, columns)
    d_scores = weights * (d_weights - row.delta)
    d_query = state.query
    if pull is not None:
        d_scores, d_row, change = pull(d_scores)
        d_query += d_row
        d_free = [total + x for total, x in zip(d_free, change, strict=True)]
    low = d_scores.astype(keys.dtype)
    d_query += dot(low, keys, (2, 1), dtype)
    d_keys = dot(row.query_transposed, low, (2, 1), dtype)
    d_values = dot(row.d_output_transposed, dropped.astype(values.dtype), (2, 1), dtype)
    fresh = jnp.repeat(state.fresh, here.plan.blocks[1])
    d_slots = tuple(jnp.where(fresh, 0, x) + change for x, change in zip(state.slots, (d_keys, d_values), strict=True))
    return state._replace(query=d_query, slots=d_slots, free=d_free, fresh=jnp.zeros_like(state.fresh))


def _relative_value_gradients(
    here: Chunk, rebuild: Callable, weights: jax.Array, d_output: jax.Array, i: Array, columns: Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Through the vectors added to the values: gradients of the weights and of the scoring's arrays."""

    def values(weights: jax.Array, free: list) -> jax.Array:
        return rebuild(free).relative.values(weights, *here.tokens(i, columns))

    _, pull = jax.vjp(values, here.four(weights), _free_arrays(here.scoring)[0])
    d_weights, d_free = pull(here.four(d_output).astype(weights.dtype))
    return here.three(d_weights), d_free


def _free_arrays(scoring: Scoring) -> tuple[list[jax.Array], Callable]:
    """The arrays of a scoring that have gradients, and the function that puts others in their place."""
    leaves, structure = jax.tree.flatten(scoring)
    free = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]

    def rebuild(arrays: list, gradients: bool = False) -> Scoring:
        given = iter(arrays)
        rest = [np.zeros(jnp.shape(x), jax.dtypes.float0) if gradients else x for x in leaves]
        mixed = [
            next(given).astype(jnp.result_type(x)) if is_free and gradients else next(given) if is_free else other
            for x, is_free, other in zip(leaves, free, rest, strict=True)
        ]
        return jax.tree.unflatten(structure, mixed)

    return [x for x, is_free in zip(leaves, free, strict=True) if is_free], rebuild
