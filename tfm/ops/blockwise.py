"""Attention block by block: exact, with memory linear in the length.

The forward pass goes over the rows of blocks, tile by tile, and keeps, per query, the greatest score so far, the sum of
exponentials and the weighted sum of values (the online softmax), of all heads at once or of each apart (`Plan.lane`).
The backward pass (`blockwise_backward`) makes the weights again from the saved log-sum-exp.  Only blocks that the rule
does not empty are visited; only tiles with partial ones are masked.

Reference: Milakov and Gimelshein (2018), online normalizer; Rabe and Staats (2021); Dao et al. (2022), FlashAttention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tfm.ops.block import Chunk, Sides, dot, drop, empty_slots, fill, join, make_chunks, put_keys, visit
from tfm.ops.blockwise_backward import backward
from tfm.ops.dense import NEGATIVE, Scoring, accumulator, split_scale
from tfm.ops.masks import Rule
from tfm.ops.order import dilation_groups, token_order
from tfm.ops.plan import Plan, make_plan, places
from tfm.ops.tiles import choose_tiles
from tfm.ops.tokens import Array, Tokens, vary_alike


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    query_tokens: Tokens,
    key_tokens: Tokens,
    dropout_key: jax.Array | None,
    block_size: int | None = None,
    slots: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scores) V; returns the output [B, T, H, Dv] and the log-sum-exp of the scores [B, H, T].

    A tile has one block of queries and `slots` blocks of keys; None: chosen from the rule.
    """
    heads = query.shape[2], key.shape[2]
    groups = dilation_groups(scoring.rule, heads)
    sides, tile = (query_tokens, key_tokens), (block_size, slots)
    if len(groups) == 1:
        return _attend_group(query, key, value, scoring, sides, dropout_key, groups[0], tile)
    parts = []
    for ids in groups:
        key_ids = np.unique(ids // (heads[0] // heads[1]))
        arrays = query[:, :, ids], key[:, :, key_ids], value[:, :, key_ids]
        parts.append(_attend_group(*arrays, scoring, sides, dropout_key, ids, tile))
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
    tile: tuple[int | None, int | None],
) -> tuple[jax.Array, jax.Array]:
    """Attention of heads that share an order of the tokens: brings the tokens into it, and the output back."""
    arrange = functools.partial(_arrange, scoring.rule, int(head_ids[0]), sides)
    size, slots = choose_tiles(scoring.rule, lambda block: arrange(block)[1], *tile)
    orders, (rows, columns) = arrange(size)
    query, key, value = (_take(x, order) for x, order in zip((query, key, value), (*orders, orders[1]), strict=True))
    heads = query.shape[2], key.shape[2]
    ids, key_length = tuple(head_ids.tolist()), sides[1].positions.shape[1]
    plan = make_plan(scoring.rule, (rows, columns), query.shape[0], heads, ids, key_length, size, slots)
    at = tuple(
        (jnp.asarray(side.positions), jnp.asarray(places(side, block)))
        for side, block in zip((rows, columns), plan.blocks, strict=True)
    )
    try:
        output, lse = _attend_jit(plan, query, key, value, scoring, at, dropout_key)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        message = "blockwise attention has no forward-mode derivatives; use implementation='dense' for them"
        raise NotImplementedError(message) from error
    if orders[0] is None:
        return output, lse
    back = np.argsort(orders[0], kind="stable")[: sides[0].positions.shape[1]]
    return output[:, back], lse[:, :, back]


def _arrange(rule: Rule | None, head: int, sides: tuple[Tokens, Tokens], size: int) -> tuple[list, list[Tokens]]:
    """The orders of queries and keys for a block size, None where it is their own; and the tokens in it."""
    orders = [token_order(rule, head, side.positions, min(size, side.positions.shape[1])) for side in sides]
    arranged = [
        side if order is None else Tokens(_fill(side.positions, order), order)
        for side, order in zip(sides, orders, strict=True)
    ]
    return orders, arranged


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
    scoring, factor = split_scale(scoring, query.dtype)
    make_chunk, indices = make_chunks(plan, query.shape[0], scoring, at, dropout_key)
    q, k, v = fill(query, 1, plan.blocks[0]), fill(key, 1, plan.blocks[1]), fill(value, 1, plan.blocks[1])

    def chunk(_: None, xs: tuple) -> tuple[None, tuple]:
        here = make_chunk(*xs)
        lanes = here.lanes()

        def row(held: Any, i: Array) -> tuple[Any, tuple]:
            queries = [lane.take(q, i, 0) * jnp.asarray(factor, q.dtype) for lane in lanes]

            def load(slot: Array, j: Array, state: tuple) -> tuple:
                blocks = [(lane.take(k, j, 1), lane.take(v, j, 1)) for lane in lanes]
                return [put_keys(x, y, slot) for x, y in zip(state[0], blocks, strict=True)], state[1]

            def add(state: tuple, columns: Array, masked: bool) -> tuple:
                seen = here.split(here.visible(i, columns)) if masked else [None] * len(lanes)
                parts = zip(lanes, state[1], queries, state[0], seen, strict=True)
                return state[0], [_add(*part[:4], i, columns, part[4]) for part in parts]

            first = plan.single and here.may_see is None
            start = [None if first else _start(q_i, v.shape[-1], dtype) for q_i in queries]
            held, state = visit(here, i, load, add, (held, start), apart=len(lanes) > 1)
            done = [_finish(x, query.dtype) for x in state]
            output = here.gather([lane.put(x) for lane, (x, _) in zip(lanes, done, strict=True)], (0, 2))
            lse = here.gather([lane.four(x)[..., 0] for lane, (_, x) in zip(lanes, done, strict=True)], (0, 1))
            return held, (output, lse)

        empty = [empty_slots(lane, k, v) for lane in lanes]
        return None, lax.scan(row, empty, jnp.arange(plan.counts[0], dtype=jnp.int32))[1]

    _, (output, lse) = lax.scan(chunk, None, indices)
    return join(output, plan, 2)[:, : plan.lengths[0]], join(lse, plan, 1)[..., : plan.lengths[0]]


def _start(q_i: jax.Array, width: int, dtype: jnp.dtype) -> tuple:
    """Weighted values, greatest score and sum of exponentials before the first tile."""
    shape = q_i.shape[:2]
    zeros, low = jnp.zeros((*shape, 1), dtype), jnp.full((*shape, 1), NEGATIVE, dtype)
    return vary_alike((jnp.zeros((*shape, width), dtype), low, zeros), q_i)


def _add(
    here: Chunk,
    state: tuple | None,
    q_i: jax.Array,
    held: tuple,
    i: Array,
    columns: Array,
    seen: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The online softmax: weighted values, greatest score and sum of exponentials with a tile more; None: the first.

    `seen` says which queries see which keys, broadcastable to [b, h, bq, n]; None: all see all.
    """
    keys, values = held
    dtype = accumulator(q_i, keys, values)
    scores = dot(q_i, keys, (2, 2), dtype)
    if seen is not None or not here.scoring.plain:
        scores = here.scores(here.four(scores), here.four(q_i), here.scoring, i, columns)
        if seen is not None:
            scores = jnp.where(seen, scores, NEGATIVE)
        scores = here.three(scores)
    greatest = scores.max(-1, keepdims=True, initial=None if here.scoring.bias is None else NEGATIVE)
    if state is not None:
        greatest = jnp.maximum(state[1], greatest)
    weights = jnp.exp(scores - greatest)
    total = weights.sum(-1, keepdims=True)
    if here.scoring.dropout_rate:
        weights = drop(here, weights, i, columns)
    output = dot(weights.astype(values.dtype), values, (2, 1), dtype)
    relative = here.scoring.relative
    if relative is not None and relative.value_table is not None:
        output += here.three(relative.values(here.four(weights), *here.tokens(i, columns)))
    if state is not None:
        shrink = jnp.exp(state[1] - greatest)
        output, total = state[0] * shrink + output, state[2] * shrink + total
    return output, greatest, total


def _finish(state: tuple, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The attention's output, and the log-sum-exp of the scores: zeros and -inf for a query that saw nothing."""
    output, greatest, total = state
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
