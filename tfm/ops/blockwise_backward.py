"""The backward pass of blockwise attention: goes over the columns of blocks and makes the weights again.

With P the weights and delta_i = sum_j P_ij dP_ij = dO_i . O_i: dS = P * (dP - delta), dQ = dS K, dK = dS^T Q,
dV = P^T dO.  The transposed products are formed as (Q^T dS)^T, so that no large operand is transposed.

Reference: Dao et al. (2022), FlashAttention, appendix B.4.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.block import Chunk, Sides, dot, drop, make_chunks, visit
from tfm.ops.dense import NEGATIVE, Scoring
from tfm.ops.masks import FULL, PARTIAL
from tfm.ops.plan import Plan, from_blocks, to_blocks
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
    make_chunk, indices = make_chunks(plan, query.shape[0], scoring, at, dropout_key)
    full, partial = plan.visits(FULL, by_column=True), plan.visits(PARTIAL, by_column=True)
    free, rebuild = _free_arrays(scoring)
    delta = jnp.einsum("BTHD,BTHD->BTH", output, d_output, preferred_element_type=dtype) - d_lse.swapaxes(1, 2)
    lse = jnp.where(jnp.isinf(lse), -NEGATIVE, lse).swapaxes(1, 2)

    def chunk(d_free: list, xs: tuple) -> tuple[list, tuple]:
        k, v, rows, at = xs
        here = make_chunk(*at)

        def column(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
            k_j, v_j, j = xs
            zeros = vary_alike(tuple(jnp.zeros((x.shape[0], x.shape[2], x.shape[1]), dtype) for x in xs[:2]), k)

            def add(i: Array, state: tuple, masked: bool) -> tuple:
                row = _Row(*(x[i] for x in rows))
                return _add_gradients(here, rebuild, state, row, k_j, v_j, i, j, masked)

            state = visit(full, j, lambda i, s: add(i, s, False), (*carry, *zeros), None)
            may_see = None if here.may_see is None else here.may_see.T
            *carry, d_k, d_v = visit(partial, j, lambda i, s: add(i, s, True), state, may_see)
            return tuple(carry), (d_k, d_v)

        start = vary_alike(jnp.zeros(rows.query.shape, dtype), k), d_free
        (d_q, d_free), (d_k, d_v) = lax.scan(column, start, (k, v, jnp.arange(len(k))))
        return d_free, (d_q, d_k.swapaxes(2, 3), d_v.swapaxes(2, 3))

    split = functools.partial(to_blocks, block=plan.blocks[0], chunk=plan.chunk, group=plan.group)
    q, g = split(query), split(d_output)
    rows = _Row(q, q.swapaxes(-1, -2), g, g.swapaxes(-1, -2), split(lse[..., None]), split(delta[..., None]))
    k, v = (to_blocks(x, plan.blocks[1], plan.chunk) for x in (key, value))
    d_free = vary_alike([jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in free], query)
    d_free, (d_q, d_k, d_v) = lax.scan(chunk, d_free, (k, v, rows, indices))
    d_q = from_blocks(d_q, plan.lengths[0], plan.heads[0], plan.chunk, plan.group).astype(query.dtype)
    d_k, d_v = (from_blocks(x, plan.lengths[1], plan.heads[1], plan.chunk) for x in (d_k, d_v))
    return d_q, d_k.astype(key.dtype), d_v.astype(value.dtype), rebuild(d_free, gradients=True)


@backward.defjvp
def _backward_jvp(plan: Plan, primals: tuple, tangents: tuple) -> NoReturn:
    raise NotImplementedError("blockwise attention has no second derivatives; use implementation='dense' for them")


class _Row(NamedTuple):
    """What the backward pass needs of a row of blocks, or of all of them."""

    query: jax.Array  # [b*k, G*bq, D]
    query_transposed: jax.Array
    d_output: jax.Array  # [b*k, G*bq, Dv]
    d_output_transposed: jax.Array
    lse: jax.Array  # [b*k, G*bq, 1]
    delta: jax.Array  # [b*k, G*bq, 1]


def _add_gradients(
    here: Chunk,
    rebuild: Callable,
    state: tuple,
    row: _Row,
    k_j: jax.Array,
    v_j: jax.Array,
    i: Array,
    j: Array,
    masked: bool,
) -> tuple:
    """Takes block (i, j) into the gradients: dS = P * (dP - delta), dQ = dS K, dK = dS^T Q, dV = P^T dO."""
    d_q, d_free, d_k, d_v = state
    dtype = d_k.dtype
    products, d_weights = dot(row.query, k_j, (2, 2), dtype), dot(row.d_output, v_j, (2, 2), dtype)
    scores, pull = products, None
    if not here.scoring.plain:
        free, _ = _free_arrays(here.scoring)
        scores, pull = jax.vjp(
            lambda products, query, free: here.three(
                here.scores(here.four(products), here.four(query), rebuild(free), i, j)
            ),
            products,
            row.query,
            free,
        )
    if masked:
        scores = here.three(jnp.where(here.visible(i, j), here.four(scores), NEGATIVE))
    weights = jnp.exp(scores - row.lse)
    dropped = drop(here, weights, i, j) if here.scoring.dropout_rate else weights
    if here.scoring.relative is not None and here.scoring.relative.value_table is not None:
        more, change = _relative_value_gradients(here, rebuild, dropped, row.d_output, i, j)
        d_weights += more
        d_free = [total + x for total, x in zip(d_free, change, strict=True)]
    if here.scoring.dropout_rate:
        d_weights = drop(here, d_weights, i, j)
    d_scores = weights * (d_weights - row.delta)
    d_products = d_scores
    d_row = jnp.zeros((), dtype)
    if pull is not None:
        d_products, d_row, change = pull(d_scores)
        d_free = [total + x for total, x in zip(d_free, change, strict=True)]
    low = d_products.astype(k_j.dtype)
    d_row = d_row + dot(low, k_j, (2, 1), dtype)
    d_q = lax.dynamic_update_index_in_dim(d_q, d_q[i] + d_row, i, 0)
    d_k += dot(row.query_transposed, low, (2, 1), dtype)
    d_v += dot(row.d_output_transposed, dropped.astype(v_j.dtype), (2, 1), dtype)
    return d_q, d_free, d_k, d_v


def _relative_value_gradients(
    here: Chunk, rebuild: Callable, weights: jax.Array, d_output: jax.Array, i: Array, j: Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Through the vectors added to the values: gradients of the weights and of the scoring's arrays."""

    def values(weights: jax.Array, free: list) -> jax.Array:
        return rebuild(free).relative.values(weights, *here.tokens(i, j))

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
