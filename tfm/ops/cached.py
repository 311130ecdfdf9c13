"""Attention of a few queries to stored keys: what every step of a decoding does."""

from typing import Any

import jax
import jax.numpy as jnp

from tfm.ops.attention import make_scoring, make_tokens
from tfm.ops.dense import NEGATIVE, accumulator, scaled, softmax
from tfm.ops.fit import check_fit
from tfm.ops.masks import Rule
from tfm.ops.positions import Bias, Shaw
from tfm.ops.tokens import Array

FEW = 16
"""Most queries for which writing out the scores costs next to nothing."""


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Rule | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    relative: Shaw | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """`attention` over keys and values as a cache stores them, so that both products read them as they lie.

    Args:
      query: [B, T, H, D] float.
      key: [B, K, D, S] float, H % K == 0.
      value: [B, K, S, Dv] float.
      mask, bias, scale, query_positions, key_positions, relative, soft_cap: as for `attention`.

    Returns:
      [B, T, H, Dv], the query's dtype.

    Example:
      >>> query, key, value = jnp.ones((1, 1, 2, 4)), jnp.zeros((1, 2, 4, 3)), jnp.arange(3.0).reshape(1, 1, 3, 1)
      >>> cached_attention(query, key, jnp.broadcast_to(value, (1, 2, 3, 1)))[0, 0, :, 0].tolist()
      [1.0, 1.0]
    """
    (B, T, H, D), (K, S) = query.shape, value.shape[1:3]
    query_tokens, key_tokens = make_tokens(query, value.swapaxes(1, 2), query_positions, key_positions)
    scoring = make_scoring(query, mask, bias, scale, relative, soft_cap, 0.0)
    check_fit(scoring, query, S, value.shape[3])
    query, scoring = scaled(query, scoring)
    by_head = query.swapaxes(1, 2)  # [B, H, T, D]; heads of one group are neighbours
    scores = _product(by_head.reshape(B, K, H // K * T, D), key, accumulator(query, key)).reshape(B, H, T, S)
    scores = scoring.from_products(scores, by_head, query_tokens, key_tokens)
    if scoring.rule is not None:
        scores = jnp.where(scoring.rule.visible(query_tokens, key_tokens), scores, NEGATIVE)
    weights = softmax(scores)
    grouped = weights.astype(value.dtype).reshape(B, K, H // K * T, S)
    heads = _product(grouped, value, scores.dtype).reshape(B, H, T, value.shape[3])
    if scoring.relative is not None and scoring.relative.value_table is not None:
        heads += scoring.relative.values(weights, query_tokens, key_tokens)
    return heads.swapaxes(1, 2).astype(query.dtype)


def _product(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """[B, K, n, i] and [B, K, i, m] -> [B, K, n, m]."""
    return jax.lax.dot_general(a, b, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=dtype)
