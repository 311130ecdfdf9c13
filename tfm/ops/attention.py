"""The public door of attention: checks shapes and picks the implementation, which never changes what is computed."""

from typing import Literal

import jax
import numpy as np

from tfm.ops.blockwise import blockwise_attention
from tfm.ops.dense import Scoring, dense_attention, dense_scores, softmax
from tfm.ops.masks import Array, Rule, Tokens, as_rule
from tfm.ops.positions import Bias, MatrixBias, Shaw

Implementation = Literal["auto", "dense", "blockwise", "cudnn"]


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Rule | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: Implementation = "auto",
    block_size: int | None = None,
    relative: Shaw | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention under any mask rule, exact.

    output_i = sum_j softmax_j(cap(scale * q_i . k_j) + bias_ij) v_j over the keys j that the mask lets query i see,
    with cap(s) = soft_cap * tanh(s / soft_cap).

    Query heads come in groups: with H = G * K, heads 0 .. G-1 use key head 0.  A query with nothing to see gives
    zeros, with zero gradients.

    Args:
      query: [B, T, H, D] float.
      key: [B, S, K, D] float, H % K == 0.
      value: [B, S, K, Dv] float.
      mask: a rule of `tfm.masks`, or bool broadcastable to [B, H, T, S]; True means: may attend.
      bias: a rule of `tfm.positions`, or float broadcastable to [B, H, T, S].
      scale: factor on the products; None: 1 / sqrt(D).
      query_positions: [T] or [B, T] int; None: 0 .. T-1.
      key_positions: [S] or [B, S] int; None: 0 .. S-1.
      dropout_rate: share of the weights set to zero after the softmax, the others scaled by 1 / (1 - rate).
      dropout_key: random key, needed where dropout_rate > 0.
      implementation: "auto" chooses by device, length and rule.
      block_size: rows and columns per block of "blockwise"; None: chosen from the lengths.
      relative: Shaw's vectors per distance, added to keys and values.
      soft_cap: bound on the magnitude of the scores, before the bias.
      return_lse: also return the log-sum-exp of the scores of each row.

    Returns:
      [B, T, H, Dv], the query's dtype; with return_lse also [B, H, T] float32, -inf for a query with nothing to see.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation, dropout without a key.

    Example:
      >>> import jax.numpy as jnp
      >>> from tfm.masks import Causal
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> attention(x, x, x, mask=Causal()).shape
      (1, 3, 2, 4)

    Reference: Vaswani et al. (2017), Attention Is All You Need, section 3.2.1.
    """
    _check_shapes(query, key, value)
    if implementation not in ("auto", "dense", "blockwise", "cudnn"):
        raise ValueError(f"implementation is {implementation!r}; it must be 'auto', 'dense', 'blockwise' or 'cudnn'")
    if dropout_rate and dropout_key is None:
        raise ValueError(f"dropout_rate is {dropout_rate}, which needs a dropout_key")
    scoring = _scoring(query, mask, bias, scale, relative, soft_cap, dropout_rate)
    tokens = _tokens(query, key, query_positions, key_positions)
    if implementation == "auto":
        implementation = "dense" if key.shape[1] * query.shape[1] <= 1024 * 1024 else "blockwise"
    if implementation == "blockwise":
        output, lse = blockwise_attention(query, key, value, scoring, *tokens, dropout_key, block_size)
    else:
        output, lse = dense_attention(query, key, value, scoring, *tokens, dropout_key)
    return (output, lse) if return_lse else output


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: Rule | Array | None = None,
    bias: Bias | Array | None = None,
    scale: float | None = None,
    query_positions: Array | None = None,
    key_positions: Array | None = None,
    relative: Shaw | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """The weights that `attention` gives to the values, written out.

    Args: as for `attention`.

    Returns:
      [B, H, T, S] float32; rows sum to 1, or are zeros where the query has nothing to see.

    Example:
      >>> import jax.numpy as jnp
      >>> scores = jnp.array([1.2, 2.4, 0.3])
      >>> query, key = jnp.full((1, 1, 1, 4), 0.5), 0.5 * jnp.ones((1, 3, 1, 4)) * scores[:, None, None]
      >>> attention_weights(query, key).round(3).tolist()
      [[[[0.289..., 0.527..., 0.184...]]]]

    Reference: Vaswani et al. (2017), Attention Is All You Need, section 3.2.1.
    """
    _check_shapes(query, key, key)
    scoring = _scoring(query, mask, bias, scale, relative, soft_cap, 0.0)
    return softmax(dense_scores(query, key, scoring, *_tokens(query, key, query_positions, key_positions)))


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; it must be [batch, length, heads, width]")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"value has shape {value.shape}; batch, length and heads must be the key's, {key.shape[:3]}")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"key has shape {key.shape}; batch and width must be the query's, {query.shape}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"query has {query.shape[2]} heads; they must be a multiple of the key's {key.shape[2]}")


def _scoring(
    query: jax.Array,
    mask: Rule | Array | None,
    bias: Bias | Array | None,
    scale: float | None,
    relative: Shaw | None,
    soft_cap: float | None,
    dropout_rate: float,
) -> Scoring:
    return Scoring(
        rule=None if mask is None else as_rule(mask),
        bias=bias if bias is None or isinstance(bias, Bias) else MatrixBias(bias),
        relative=relative,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        soft_cap=soft_cap,
        dropout_rate=dropout_rate,
    )


def _tokens(
    query: jax.Array, key: jax.Array, query_positions: Array | None, key_positions: Array | None
) -> tuple[Tokens, Tokens]:
    def tokens(name: str, x: jax.Array, positions: Array | None) -> Tokens:
        positions = np.arange(x.shape[1], dtype=np.int32) if positions is None else positions
        positions = positions if hasattr(positions, "ndim") else np.asarray(positions)
        if positions.shape not in ((x.shape[1],), (1, x.shape[1]), x.shape[:2]):
            raise ValueError(f"{name} has shape {positions.shape}; it must be {x.shape[1:2]} or {x.shape[:2]}")
        return Tokens(positions.reshape(-1, x.shape[1]))

    return tokens("query_positions", query, query_positions), tokens("key_positions", key, key_positions)
