"""Attention block by block: exact, with memory linear in the length.

The forward pass goes over the rows of blocks and keeps, per query, the greatest score so far, the sum of exponentials
and the weighted sum of values (the online softmax).  The backward pass goes over the columns and makes the weights
again from the saved log-sum-exp.  Only blocks that the rule does not empty are visited; only partial ones are masked.

Reference: Milakov and Gimelshein (2018), online normalizer; Rabe and Staats (2021); Dao et al. (2022), FlashAttention.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.dense import NEGATIVE, Scoring, accumulator, scaled
from tfm.ops.dropout import keep_mask
from tfm.ops.masks import FULL, PARTIAL, Array, Tokens
from tfm.ops.plan import Plan, Visits, block_positions, from_blocks, make_plan, may_see, to_blocks

BLOCKS = 512, 512
MAX_ELEMENTS = 8 * 512 * 512  # scores of a block, over the heads of a chunk: they should stay in the cache


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    query_tokens: Tokens,
    key_tokens: Tokens,
    dropout_key: jax.Array | None,
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scores) V; returns the output [B, T, H, Dv] and the log-sum-exp of the scores [B, H, T]."""
    blocks = BLOCKS if block_size is None else (block_size, block_size)
    heads = query.shape[2], key.shape[2]
    query, scoring = scaled(query, scoring)
    plan = make_plan(scoring.rule, query_tokens, key_tokens, query.shape[0], heads, blocks, MAX_ELEMENTS)
    positions = jnp.asarray(query_tokens.positions), jnp.asarray(key_tokens.positions)
    return _attend_jit(plan, query, key, value, scoring, positions, dropout_key)


@functools.partial(jax.jit, static_argnums=0)
def _attend_jit(plan: Plan, *arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _attend(plan, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    positions: tuple[jax.Array, jax.Array],
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    return _forward(plan, query, key, value, scoring, positions, dropout_key)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """What every block of a chunk of rows of the batch and heads has in common."""

    plan: Plan
    scoring: Scoring
    batch: jax.Array  # [b]
    heads: jax.Array  # [h]
    positions: tuple[jax.Array, jax.Array]  # [n, B|1, block] of both sides
    may_see: jax.Array | None  # [nq, nk] bool
    dropout_key: jax.Array | None

    def tokens(self, i: Array, j: Array) -> tuple[Tokens, Tokens]:
        """The queries of block row i and the keys of block column j."""

        def side(axis: int, at: Array) -> Tokens:
            positions, block = self.positions[axis][at], self.plan.blocks[axis]
            positions = positions if positions.shape[0] == 1 else positions[self.batch]
            index = at * block + jnp.arange(block)
            return Tokens(positions, index, self.batch, self.heads, self.plan.consecutive)

        return side(0, i), side(1, j)

    def keep(self, i: Array, j: Array) -> jax.Array:
        """Which weights of block (i, j) dropout keeps."""
        query, key = self.tokens(i, j)
        at = self.batch[:, None, None, None], self.heads[:, None, None], query.index[:, None], key.index
        return keep_mask(self.dropout_key, self.scoring.dropout_rate, *at)

    def scores(self, products: jax.Array, q_i: jax.Array, scoring: Scoring, i: Array, j: Array) -> jax.Array:
        """The scores of block (i, j) [b, h, bq, bk] from its products, the rule aside."""
        query, key = self.tokens(i, j)
        return scoring.from_products(products, q_i, query, key)

    def visible(self, i: Array, j: Array) -> jax.Array:
        query, key = self.tokens(i, j)
        inside = key.index < self.plan.lengths[1]
        return inside if self.scoring.rule is None else inside & self.scoring.rule.visible(query, key)

    def four(self, x: jax.Array) -> jax.Array:
        """[b*k, G*bq, n] -> [b, h, bq, n]; the order of the numbers stays."""
        return x.reshape(len(self.batch), len(self.heads), -1, x.shape[-1])

    def three(self, x: jax.Array) -> jax.Array:
        """The inverse of `four`."""
        return x.reshape(-1, self.plan.group * x.shape[2], x.shape[-1])


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Products over one axis of each, for every leading index."""
    return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((0,), (0,))), preferred_element_type=dtype)


def _visit(visits: Visits, row: Array, add: Callable, state: Any, may_see: jax.Array | None) -> Any:
    """Adds all blocks of a row to the state, those that the values empty left out."""
    indices, starts = visits
    if not len(indices):
        return state

    def step(at: Array, state: Any) -> Any:
        column = jnp.asarray(indices)[at]
        if may_see is None:
            return add(column, state)
        return lax.cond(may_see[row, column], lambda s: add(column, s), lambda s: s, state)

    starts = jnp.asarray(starts)
    return lax.fori_loop(starts[row], starts[row + 1], step, state)


def _chunks(plan: Plan, batch: int, scoring: Scoring, positions: tuple, dropout_key: jax.Array | None) -> tuple:
    """Makes a `_Chunk` from the indices of its rows and heads; and these indices, for all chunks."""
    blocked = tuple(block_positions(x, block) for x, block in zip(positions, plan.blocks, strict=True))
    dynamic = scoring.rule is not None and bool(jax.tree.leaves(scoring.rule)) and (plan.map == PARTIAL).any()
    seen = may_see(scoring.rule, *map(Tokens, positions), plan.blocks) if dynamic else None

    def make(rows: jax.Array, heads: jax.Array) -> _Chunk:
        mine = None if seen is None else (seen if len(seen) == 1 else seen[rows]).any(0)
        return _Chunk(plan, scoring, rows, heads, blocked, mine, dropout_key)

    return make, plan.chunk_indices(batch)


def _forward(
    plan: Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    positions: tuple[jax.Array, jax.Array],
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    dtype = accumulator(query, key, value)
    make_chunk, indices = _chunks(plan, query.shape[0], scoring, positions, dropout_key)
    full, partial = plan.visits(FULL), plan.visits(PARTIAL)

    def chunk(_: None, xs: tuple) -> tuple[None, tuple]:
        q, k, v, *at = xs
        here = make_chunk(*at)

        def row(_: None, xs: tuple) -> tuple[None, tuple]:
            q_i, i = xs
            shape = q_i.shape[:2]
            state = jnp.zeros((*shape, v.shape[-1]), dtype), jnp.full((*shape, 1), NEGATIVE, dtype)
            state = *state, jnp.zeros((*shape, 1), dtype)
            state = _visit(full, i, lambda j, s: _add(here, s, q_i, k[j], v[j], i, j, False), state, None)
            state = _visit(partial, i, lambda j, s: _add(here, s, q_i, k[j], v[j], i, j, True), state, here.may_see)
            return None, _finish(*state, query.dtype)

        return None, lax.scan(row, None, (q, jnp.arange(len(q))))[1]

    q = to_blocks(query, plan.blocks[0], plan.chunk, plan.group)
    k, v = (to_blocks(x, plan.blocks[1], plan.chunk) for x in (key, value))
    _, (output, lse) = lax.scan(chunk, None, (q, k, v, *indices))
    lse = from_blocks(lse, plan.lengths[0], plan.heads[0], plan.chunk, plan.group)[..., 0].swapaxes(1, 2)
    return from_blocks(output, plan.lengths[0], plan.heads[0], plan.chunk, plan.group), lse


def _add(
    here: _Chunk,
    state: tuple,
    q_i: jax.Array,
    k_j: jax.Array,
    v_j: jax.Array,
    i: Array,
    j: Array,
    masked: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The online softmax: takes block (i, j) into weighted values, greatest score and sum of exponentials."""
    output, greatest, total = state
    scores = _dot(q_i, k_j, (2, 2), output.dtype)
    if masked or not here.scoring.plain:
        scores = here.scores(here.four(scores), here.four(q_i), here.scoring, i, j)
        if masked:
            scores = jnp.where(here.visible(i, j), scores, NEGATIVE)
        scores = here.three(scores)
    higher = jnp.maximum(greatest, scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - higher)
    shrink = jnp.exp(greatest - higher)
    total = total * shrink + weights.sum(-1, keepdims=True)
    if here.scoring.dropout_rate:
        weights = _drop(here, weights, i, j)
    output = output * shrink + _dot(weights.astype(v_j.dtype), v_j, (2, 1), output.dtype)
    relative = here.scoring.relative
    if relative is not None and relative.value_table is not None:
        output += here.three(relative.values(here.four(weights), *here.tokens(i, j)))
    return output, higher, total


def _drop(here: _Chunk, x: jax.Array, i: Array, j: Array) -> jax.Array:
    """Dropout of a block [b*k, G*bq, bk]: of weights, and likewise of their cotangents."""
    kept = jnp.where(here.keep(i, j), here.four(x) * (1 / (1 - here.scoring.dropout_rate)), 0)
    return here.three(kept)


def _finish(output: jax.Array, greatest: jax.Array, total: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The attention's output, and the log-sum-exp of the scores: zeros and -inf for a query that saw nothing."""
    seen = greatest > NEGATIVE
    total = jnp.where(seen, total, 1)
    return (output * jnp.where(seen, 1 / total, 0)).astype(dtype), jnp.where(seen, greatest + jnp.log(total), -jnp.inf)


def _attend_fwd(plan: Plan, *arguments: Any) -> tuple:
    output, lse = _forward(plan, *arguments)
    return (output, lse), (*arguments, output, lse)


def _attend_bwd(plan: Plan, saved: tuple, cotangents: tuple) -> tuple:
    gradients = _backward(plan, *saved, *cotangents)
    return *gradients, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(
    plan: Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    positions: tuple[jax.Array, jax.Array],
    dropout_key: jax.Array | None,
    output: jax.Array,
    lse: jax.Array,
    d_output: jax.Array,
    d_lse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Scoring]:
    dtype = lse.dtype
    make_chunk, indices = _chunks(plan, query.shape[0], scoring, positions, dropout_key)
    full, partial = plan.visits(FULL, by_column=True), plan.visits(PARTIAL, by_column=True)
    free, rebuild = _free_arrays(scoring)
    delta = jnp.einsum("BTHD,BTHD->BTH", output, d_output, preferred_element_type=dtype) - d_lse.swapaxes(1, 2)
    lse = jnp.where(jnp.isinf(lse), -NEGATIVE, lse).swapaxes(1, 2)

    def chunk(d_free: list, xs: tuple) -> tuple[list, tuple]:
        k, v, rows, at = xs
        here = make_chunk(*at)

        def column(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
            k_j, v_j, j = xs
            zeros = tuple(jnp.zeros((x.shape[0], x.shape[2], x.shape[1]), dtype) for x in xs[:2])

            def add(i: Array, state: tuple, masked: bool) -> tuple:
                row = _Row(*(x[i] for x in rows))
                return _add_gradients(here, rebuild, state, row, k_j, v_j, i, j, masked)

            state = _visit(full, j, lambda i, s: add(i, s, False), (*carry, *zeros), None)
            may_see = None if here.may_see is None else here.may_see.T
            *carry, d_k, d_v = _visit(partial, j, lambda i, s: add(i, s, True), state, may_see)
            return tuple(carry), (d_k, d_v)

        start = jnp.zeros(rows.query.shape, dtype), d_free
        (d_q, d_free), (d_k, d_v) = lax.scan(column, start, (k, v, jnp.arange(len(k))))
        return d_free, (d_q, d_k.swapaxes(2, 3), d_v.swapaxes(2, 3))

    split = functools.partial(to_blocks, block=plan.blocks[0], chunk=plan.chunk, group=plan.group)
    q, g = split(query), split(d_output)
    rows = _Row(q, q.swapaxes(-1, -2), g, g.swapaxes(-1, -2), split(lse[..., None]), split(delta[..., None]))
    k, v = (to_blocks(x, plan.blocks[1], plan.chunk) for x in (key, value))
    d_free = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in free]
    d_free, (d_q, d_k, d_v) = lax.scan(chunk, d_free, (k, v, rows, indices))
    d_q = from_blocks(d_q, plan.lengths[0], plan.heads[0], plan.chunk, plan.group).astype(query.dtype)
    d_k, d_v = (from_blocks(x, plan.lengths[1], plan.heads[1], plan.chunk) for x in (d_k, d_v))
    return d_q, d_k.astype(key.dtype), d_v.astype(value.dtype), rebuild(d_free, gradients=True)


@_backward.defjvp
def _backward_jvp(plan: Plan, primals: tuple, tangents: tuple) -> None:
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
    here: _Chunk,
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
    products, d_weights = _dot(row.query, k_j, (2, 2), dtype), _dot(row.d_output, v_j, (2, 2), dtype)
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
    dropped = _drop(here, weights, i, j) if here.scoring.dropout_rate else weights
    if here.scoring.relative is not None and here.scoring.relative.value_table is not None:
        more, change = _relative_value_gradients(here, rebuild, dropped, row.d_output, i, j)
        d_weights += more
        d_free = [total + x for total, x in zip(d_free, change, strict=True)]
    if here.scoring.dropout_rate:
        d_weights = _drop(here, d_weights, i, j)
    d_scores = weights * (d_weights - row.delta)
    d_products = d_scores
    d_row = 0
    if pull is not None:
        d_products, d_row, change = pull(d_scores)
        d_free = [total + x for total, x in zip(d_free, change, strict=True)]
    low = d_products.astype(k_j.dtype)
    d_row = d_row + _dot(low, k_j, (2, 1), dtype)
    d_q = lax.dynamic_update_index_in_dim(d_q, d_q[i] + d_row, i, 0)
    d_k += _dot(row.query_transposed, low, (2, 1), dtype)
    d_v += _dot(row.d_output_transposed, dropped.astype(v_j.dtype), (2, 1), dtype)
    return d_q, d_free, d_k, d_v


def _relative_value_gradients(
    here: _Chunk, rebuild: Callable, weights: jax.Array, d_output: jax.Array, i: Array, j: Array
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
        arrays = iter(arrays)
        rest = [np.zeros(jnp.shape(x), jax.dtypes.float0) if gradients else x for x in leaves]
        mixed = [
            next(arrays).astype(jnp.result_type(x)) if is_free and gradients else next(arrays) if is_free else other
            for x, is_free, other in zip(leaves, free, rest, strict=True)
        ]
        return jax.tree.unflatten(structure, mixed)

    return [x for x, is_free in zip(leaves, free, strict=True) if is_free], rebuild
