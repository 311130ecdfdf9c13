"""Attention with its matrix of weights written out: the readable reference, and the fast path for short sequences."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tfm.ops.dropout import keep_mask
from tfm.ops.masks import Rule
from tfm.ops.positions import Bias, Shaw
from tfm.ops.tokens import Array, Tokens, register_rule

NEGATIVE = -1e30  # stands for minus infinity, and makes no NaN where it meets itself


@register_rule
@dataclasses.dataclass(frozen=True)
class Scoring:
    """How scores come from products: score = softcap(scale * q . (k + a)) + bias, where the rule allows it."""

    rule: Rule | None
    bias: Bias | None
    relative: Shaw | None
    scale: float = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(metadata={"static": True})
    dropout_rate: float = dataclasses.field(metadata={"static": True})

    @property
    def plain(self) -> bool:
        """The scores are the products."""
        return self.bias is None and self.relative is None and self.soft_cap is None and self.scale == 1.0

    def from_products(self, products: jax.Array, query: jax.Array, rows: Tokens, columns: Tokens) -> jax.Array:
        """Scores [B, H, n, m] from the products q . k and the queries [B, H, n, D], the rule aside."""
        scores = products
        if self.relative is not None:
            scores += self.relative.products(query, rows, columns).astype(scores.dtype)
        if self.scale != 1.0:
            scores *= self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.bias is not None:
            scores += self.bias.values(rows, columns).astype(scores.dtype)
        return scores


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; it must be [batch, length, heads, width]")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}; it must be float")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"value has shape {value.shape}; batch, length and heads must be the key's, {key.shape[:3]}")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"key has shape {key.shape}; batch and width must be the query's, {query.shape}")
    if 0 in (*query.shape[2:], *key.shape[2:]):
        raise ValueError(f"query has shape {query.shape}, key {key.shape}; heads and width must be 1 or more")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"query has {query.shape[2]} heads; they must be a multiple of the key's {key.shape[2]}")


def accumulator(*arrays: Array) -> jnp.dtype:
    """The dtype of scores and sums: float32, or float64 where an input has it."""
    return jnp.promote_types(jnp.float32, jnp.result_type(*arrays))


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scoring: Scoring,
    query_tokens: Tokens,
    key_tokens: Tokens,
    dropout_key: Any,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scores) V; returns the output [B, T, H, Dv] and the log-sum-exp of the scores [B, H, T]."""
    scores = dense_scores(query, key, scoring, query_tokens, key_tokens)
    weights = softmax(scores)
    lse = log_sum_exp(scores)
    if scoring.dropout_rate:
        keep = keep_mask(dropout_key, scoring.dropout_rate, *weight_coordinates(weights.shape))
        weights = jnp.where(keep, weights * (1 / (1 - scoring.dropout_rate)), 0)
    B, H, T, S = weights.shape
    K = value.shape[2]
    grouped = weights.astype(value.dtype).reshape(B, K, H // K, T, S)
    output = jnp.einsum("BKGTS,BSKD->BTKGD", grouped, value, preferred_element_type=scores.dtype)
    output = output.reshape(B, T, H, value.shape[-1])
    if scoring.relative is not None and scoring.relative.value_table is not None:
        output += scoring.relative.values(weights, query_tokens, key_tokens).swapaxes(1, 2)
    return output.astype(query.dtype), lse


def weight_coordinates(shape: tuple[int, ...], start: tuple[Array, Array] = (0, 0)) -> list[jax.Array]:
    """Batch, head, query and key index of a block of weights: dropout's bits are a function of these."""
    B, H, T, S = (jnp.arange(n, dtype=jnp.uint32) for n in shape)
    return [B[:, None, None, None], H[:, None, None], (start[0] + T)[:, None], start[1] + S]


def dense_scores(
    query: jax.Array, key: jax.Array, scoring: Scoring, query_tokens: Tokens, key_tokens: Tokens
) -> jax.Array:
    """The scores [B, H, T, S], `NEGATIVE` where the rule says no."""
    (B, T, H, D), (S, K) = query.shape, key.shape[1:3]
    query, scoring = scaled(query, scoring)
    grouped = query.reshape(B, T, K, H // K, D)
    products = jnp.einsum("BTKGD,BSKD->BKGTS", grouped, key, preferred_element_type=accumulator(query, key))
    scores = scoring.from_products(products.reshape(B, H, T, S), query.swapaxes(1, 2), query_tokens, key_tokens)
    if scoring.rule is not None:
        scores = jnp.where(scoring.rule.visible(query_tokens, key_tokens), scores, NEGATIVE)
    return scores


def scaled(query: jax.Array, scoring: Scoring) -> tuple[jax.Array, Scoring]:
    """Moves the scale from the scores to the queries, where their dtype holds the product well."""
    scoring, factor = split_scale(scoring, query.dtype)
    return query * jnp.asarray(factor, query.dtype), scoring


def split_scale(scoring: Scoring, dtype: jnp.dtype) -> tuple[Scoring, float]:
    """The scoring, and a factor on the queries in place of its scale, where their dtype holds the product well."""
    if jnp.finfo(dtype).bits < 32:
        return scoring, 1.0
    return dataclasses.replace(scoring, scale=1.0), scoring.scale


@jax.custom_jvp
def softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last axis; zeros in a row that is `NEGATIVE` throughout."""
    highest = scores.max(-1, keepdims=True, initial=NEGATIVE)
    weights = jnp.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    return weights * jnp.where(highest > NEGATIVE, 1 / total, 0)


@softmax.defjvp
def _softmax_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    weights, change = softmax(*primals), tangents[0]
    return weights, weights * (change - (weights * change).sum(-1, keepdims=True))


def log_sum_exp(scores: jax.Array) -> jax.Array:
    """log(sum(exp(scores))) over the last axis; -inf in a row that is `NEGATIVE` throughout."""
    highest = jax.lax.stop_gradient(scores.max(-1, initial=NEGATIVE))
    total = jnp.exp(scores - highest[..., None]).sum(-1)
    seen = highest > NEGATIVE
    return jnp.where(seen, highest + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
