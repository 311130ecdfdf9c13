"""Attention block by block: exact, with memory linear in the length.

The forward pass goes over the rows of blocks and keeps, per query, the greatest score so far, the sum of exponentials
and the weighted sum of values (the online softmax).  The backward pass (`blockwise_backward`) makes the weights again
from the saved log-sum-exp.  Only blocks that the rule does not empty are visited; only partial ones are masked.

Reference: Milakov and Gimelshein (2018), online normalizer; Rabe and Staats (2021); Dao et al. (2022), FlashAttention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.block import Chunk, Sides, dot, drop, make_chunks, visit
from tfm.ops.blockwise_backward import backward
from tfm.ops.dense import NEGATIVE, Scoring, accumulator, scaled
from tfm.ops.masks import FULL, PARTIAL
from tfm.ops.order import dilation_groups, token_order
from tfm.ops.plan import Plan, choose_block, from_blocks, make_plan, places, to_blocks
from tfm.ops.tokens import Array, Tokens, vary_alike

BLOCKS = 512, 512
SIZES = 512, 256, 128, 64  # sparse rules take the one that visits least
OVERHEAD = 40_000  # of a block, in scores: what a visit costs beside them
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
    query, scoring = scaled(query, scoring)
    heads = query.shape[2], key.shape[2]
    groups = dilation_groups(scoring.rule, heads)
    size = choose_block(scoring.rule, query_tokens, key_tokens, SIZES, OVERHEAD) if block_size is None else block_size
    blocks = size, size
    blocks = min(blocks[0], query.shape[1]), min(blocks[1], key.shape[1])
    sides = query_tokens, key_tokens
    if len(groups) == 1:
        return _attend_group(query, key, value, scoring, sides, dropout_key, groups[0], blocks)
    parts = []
    for ids in groups:
        key_ids = np.unique(ids // (heads[0] // heads[1]))
        arrays = query[:, :, ids], key[:, :, key_ids], value[:, :, key_ids]
        parts.append(_attend_group(*arrays, scoring, sides, dropout_key, ids, blocks))
    back = np.argsort(np.concatenate(groups))
    output, lse = (jnp.concatenate(x, axis) for x, axis in zip(zip(*parts, strict=True), (2, 1), strict=True))
    return output[:, :, back], lse[:, back]


def _attend_group(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    sides: tuple[Tokens, Tokens],
    dropout_key: jax.Array | None,
    head_ids: np.ndarray,
    blocks: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """Attention of heads that share an order of the tokens: brings the tokens into it, and the output back."""
    orders = [
        token_order(scoring.rule, int(head_ids[0]), side.positions, block)
        for side, block in zip(sides, blocks, strict=True)
    ]
    query, key, value = (_take(x, order) for x, order in zip((query, key, value), (*orders, orders[1]), strict=True))
    rows, columns = (
        side if order is None else Tokens(_fill(side.positions, order), order)
        for side, order in zip(sides, orders, strict=True)
    )
    heads = query.shape[2], key.shape[2]
    ids, key_length = tuple(head_ids.tolist()), sides[1].positions.shape[1]
    plan = make_plan(scoring.rule, (rows, columns), query.shape[0], heads, ids, key_length, blocks, MAX_ELEMENTS)
    at = tuple(
        (jnp.asarray(side.positions), jnp.asarray(places(side, block)))
        for side, block in zip((rows, columns), plan.blocks, strict=True)
    )
    output, lse = _attend_jit(plan, query, key, value, scoring, at, dropout_key)
    if orders[0] is None:
        return output, lse
    back = np.argsort(orders[0], kind="stable")[: sides[0].positions.shape[1]]
    return output[:, back], lse[:, :, back]


def _take(x: jax.Array, order: np.ndarray | None) -> jax.Array:
    """Tokens in another order, zeros for filling: [B, L, H, D] -> [B, n, H, D]."""
    return x if order is None else jnp.take(x, order, axis=1, mode="fill", fill_value=0, unique_indices=False)


def _fill(positions: Array, order: np.ndarray) -> np.ndarray:
    """Positions in another order; filling repeats the one before it."""
    length = positions.shape[1]
    last = np.maximum.accumulate(np.where(order < length, np.arange(len(order)), 0))
    return positions[:, order[last]]


@functools.partial(jax.jit, static_argnums=0)
def _attend_jit(plan: Plan, *arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _attend(plan, *vary_alike(arguments))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    at: Sides,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    return forward(plan, query, key, value, scoring, at, dropout_key)


def forward(
    plan: Plan,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    at: Sides,
    dropout_key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    dtype = accumulator(query, key, value)
    make_chunk, indices = make_chunks(plan, query.shape[0], scoring, at, dropout_key)
    full, partial = plan.visits(FULL), plan.visits(PARTIAL)

    def chunk(_: None, xs: tuple) -> tuple[None, tuple]:
        q, k, v, *at = xs
        here = make_chunk(*at)

        def row(_: None, xs: tuple) -> tuple[None, tuple]:
            q_i, i = xs
            shape = q_i.shape[:2]
            zeros, low = jnp.zeros((*shape, 1), dtype), jnp.full((*shape, 1), NEGATIVE, dtype)
            state: tuple = vary_alike((jnp.zeros((*shape, v.shape[-1]), dtype), low, zeros), q_i)
            state = visit(full, i, lambda j, s: _add(here, s, q_i, k[j], v[j], i, j, False), state, None)
            state = visit(partial, i, lambda j, s: _add(here, s, q_i, k[j], v[j], i, j, True), state, here.may_see)
            output, greatest, total = state
            return None, _finish(output, greatest, total, query.dtype)

        return None, lax.scan(row, None, (q, jnp.arange(len(q))))[1]

    q = to_blocks(query, plan.blocks[0], plan.chunk, plan.group)
    k, v = (to_blocks(x, plan.blocks[1], plan.chunk) for x in (key, value))
    _, (output, lse) = lax.scan(chunk, None, (q, k, v, *indices))
    lse = from_blocks(lse, plan.lengths[0], plan.heads[0], plan.chunk, plan.group)[..., 0].swapaxes(1, 2)
    return from_blocks(output, plan.lengths[0], plan.heads[0], plan.chunk, plan.group), lse


def _add(
    here: Chunk,
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
    scores = dot(q_i, k_j, (2, 2), output.dtype)
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
        weights = drop(here, weights, i, j)
    output = output * shrink + dot(weights.astype(v_j.dtype), v_j, (2, 1), output.dtype)
    relative = here.scoring.relative
    if relative is not None and relative.value_table is not None:
        output += here.three(relative.values(here.four(weights), *here.tokens(i, j)))
    return output, higher, total


def _finish(output: jax.Array, greatest: jax.Array, total: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The attention's output, and the log-sum-exp of the scores: zeros and -inf for a query that saw nothing."""
    seen = greatest > NEGATIVE
    total = jnp.where(seen, total, 1)
    return (output * jnp.where(seen, 1 / total, 0)).astype(dtype), jnp.where(seen, greatest + jnp.log(total), -jnp.inf)


def _attend_fwd(plan: Plan, *arguments: Any) -> tuple:
    output, lse = forward(plan, *arguments)
    return (output, lse), (*arguments, output, lse)


def _attend_bwd(plan: Plan, saved: tuple, cotangents: tuple) -> tuple:
    gradients = backward(plan, *saved, *cotangents)
    return *gradients, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)
