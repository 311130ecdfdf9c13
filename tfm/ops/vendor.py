"""Attention by the vendors' own kernels, where they have the rule: cuDNN on NVIDIA GPUs, splash attention on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.dense import Scoring
from tfm.ops.masks import And, Causal, Rule, Window
from tfm.ops.tokens import Tokens

Reach = tuple[int | None, int | None]  # keys before and after the query that it sees; None: all


def missing(scoring: Scoring, query: Tokens, key: Tokens, wants_lse: bool) -> str | None:
    """What the vendors' kernels lack for this call, in words; None where they have all."""
    if reach(scoring.rule) is None:
        return f"a rule like {type(scoring.rule).__name__}: it has Causal, Window without dilation, and both"
    if scoring.bias is not None or scoring.relative is not None or scoring.soft_cap is not None:
        return "bias rules, relative vectors and soft caps"
    if scoring.dropout_rate:
        return "dropout of the weights"
    if wants_lse:
        return "the log-sum-exp as a result"
    if not all(_is_range(x) for x in (query, key)) or query.positions.shape != key.positions.shape:
        return "positions other than 0, 1, 2, ... on both sides, as many queries as keys"
    return None


def _is_range(tokens: Tokens) -> bool:
    positions = tokens.positions
    return isinstance(positions, np.ndarray) and bool((positions == np.arange(positions.shape[1])).all())


def reach(rule: Rule | None) -> Reach | None:
    """How far a rule sees to both sides, or None for a rule of another kind.

    Example:
      >>> reach(Causal() & Window(3, 3))
      (3, 0)
    """
    if rule is None:
        return None, None
    if isinstance(rule, Causal):
        return None, 0
    if isinstance(rule, Window) and rule.dilations == (1,):
        return rule.left, rule.right
    if isinstance(rule, And):
        first, second = reach(rule.first), reach(rule.second)
        if first is not None and second is not None:
            left, right = (_least(a, b) for a, b in zip(first, second, strict=True))
            return left, right
    return None


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, scoring: Scoring) -> jax.Array:
    """cuDNN's fused attention, through `jax.nn.dot_product_attention`; see `missing` for what it has."""
    left, right = reach(scoring.rule) or (None, None)
    window = query.shape[1] if left is None else left, query.shape[1] if right is None else right
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scoring.scale,
        is_causal=right == 0,
        local_window_size=None if left is None and right in (None, 0) else window,
        implementation="cudnn",
    )


def splash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, scoring: Scoring, *, interpret: bool = False
) -> jax.Array:
    """Pallas' splash attention for TPUs; see `missing` for what it has, lengths being multiples of 128 too."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (T, H), S = query.shape[1:3], key.shape[1]
    left, right = reach(scoring.rule) or (None, None)
    mask: splash_attention_mask.Mask
    if left is None and right is None:
        mask = splash_attention_mask.FullMask((T, S))
    elif left is None and right == 0:
        mask = splash_attention_mask.CausalMask((T, S))
    else:
        mask = splash_attention_mask.LocalMask((T, S), (left, right), 0)
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * H), head_shards=1, q_seq_shards=1, interpret=interpret
    )
    group = H // key.shape[2]
    q, k, v = (x.swapaxes(1, 2) for x in (query * jnp.asarray(scoring.scale, query.dtype), key, value))
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)
