"""The public door of attention: checks shapes and picks the implementation, which never changes what is computed."""

from collections.abc import Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.blockwise import blockwise_attention
from tfm.ops.dense import NEGATIVE, Scoring, check_shapes, dense_attention, dense_scores, softmax
from tfm.ops.fit import check_fit
from tfm.ops.masks import Rule, as_rule
from tfm.ops.positions import Bias, MatrixBias, Shaw
from tfm.ops.tokens import Array, Tokens, as_batch, check_registered, count_up
from tfm.ops.vendor import Call, cudnn_attention, cudnn_lacks, splash_attention, vendor_kernel

Implementation = Literal["auto", "dense", "blockwise", "cudnn"]


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Rule | Array | None = ...,
    bias: Bias | Array | None = ...,
    scale: float | None = ...,
    query_positions: Array | None = ...,
    key_positions: Array | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    implementation: Implementation = ...,
    block_size: int | None = ...,
    relative: Shaw | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[False] = ...,
) -> jax.Array: ...
@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Rule | Array | None = ...,
    bias: Bias | Array | None = ...,
    scale: float | None = ...,
    query_positions: Array | None = ...,
    key_positions: Array | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    implementation: Implementation = ...,
    block_size: int | None = ...,
    relative: Shaw | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Rule | Array | None = ...,
    bias: Bias | Array | None = ...,
    scale: float | None = ...,
    query_positions: Array | None = ...,
    key_positions: Array | None = ...,
    dropout_rate: float = ...,
    dropout_key: jax.Array | None = ...,
    implementation: Implementation = ...,
    block_size: int | None = ...,
    relative: Shaw | None = ...,
    soft_cap: float | None = ...,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
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
      ValueError: shapes or types that do not fit, an unknown implementation, a traced scale, a soft cap or block size
        not above 0, dropout without a key or with a rate outside [0, 1), a rule or option that "cudnn" lacks.
      NotImplementedError: forward-mode or second derivatives of "blockwise".

    Example:
      >>> import jax.numpy as jnp
      >>> from tfm.masks import Causal
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> attention(x, x, x, mask=Causal()).shape
      (1, 3, 2, 4)

    Reference: Vaswani et al. (2017), Attention Is All You Need, section 3.2.1.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    check_shapes(query, key, value)
    if implementation not in ("auto", "dense", "blockwise", "cudnn"):
        raise ValueError(f"implementation is {implementation!r}; it must be 'auto', 'dense', 'blockwise' or 'cudnn'")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate is {dropout_rate}; it must be in [0, 1)")
    if dropout_rate and dropout_key is None:
        raise ValueError(f"dropout_rate is {dropout_rate}, which needs a dropout_key")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be 1 or more, or None")
    scoring = make_scoring(query, mask, bias, scale, relative, soft_cap, dropout_rate)
    tokens = make_tokens(query, key, query_positions, key_positions)
    check_fit(scoring, query, key.shape[1], value.shape[3])
    call = query, key, value, scoring, tokens, return_lse
    lacking = cudnn_lacks(*call) if implementation == "cudnn" else None
    if lacking:
        raise ValueError(f"implementation 'cudnn' lacks {lacking}; 'blockwise' has it")
    chosen = _choose(*call) if implementation == "auto" else implementation
    if 0 in (*query.shape[:2], *key.shape[:2], value.shape[3]):
        chosen = "dense"  # of nothing there are no blocks
    if chosen == "cudnn":
        return cudnn_attention(query, key, value, scoring)
    if chosen == "splash":
        return splash_attention(query, key, value, scoring)
    if chosen == "blockwise":
        output, lse = blockwise_attention(query, key, value, scoring, *tokens, dropout_key, block_size)
    else:
        output, lse = dense_attention(query, key, value, scoring, *tokens, dropout_key)
    return (output, lse) if return_lse else output


def _choose(*call: *Call) -> str:
    """The implementation of "auto", by device, length and rule; `benchmarks/README.md` has the measurements.

    | device | where | choice |
    |---|---|---|
    | any | a symbolic shape (`jax.export`) | dense |
    | NVIDIA GPU | what cuDNN has: half precision, no rule or a causal one, also with a window | cudnn |
    | TPU | what splash attention has: also windows to both sides; lengths and widths of 128 n | splash |
    | any | up to 512 x 512 scores per head, or up to 16 queries | dense |
    | any | else | blockwise |
    """
    B, T, S = *call[0].shape[:2], call[1].shape[1]
    if not all(isinstance(n, int) for n in (B, T, S)):
        return "dense"
    return vendor_kernel(*call) or ("dense" if T * S <= 512 * 512 or T <= 16 else "blockwise")


def merge(parts: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Joins attention over pieces of the keys into attention over all of them.

    output = sum_p exp(lse_p - lse) output_p, with lse = log sum_p exp(lse_p).

    Args:
      parts: pairs (output [B, T, H, Dv], lse [B, H, T]) of `attention(..., return_lse=True)` with the same queries.

    Returns:
      The pair for all keys.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> halves = [attention(x, x[:, i : i + 2], x[:, i : i + 2], return_lse=True) for i in (0, 2)]
      >>> whole = attention(x, x, x, return_lse=True)
      >>> bool(jnp.allclose(merge(halves)[1], whole[1]))
      True

    Reference: Juravsky et al. (2024), Hydragen, section 3.1; Liu, Zaharia and Abbeel (2023), ring attention.
    """
    outputs, lses = zip(*parts, strict=True)
    each = jnp.stack(lses)
    highest = jax.lax.stop_gradient(jnp.maximum(each.max(0), NEGATIVE))
    shares = jnp.exp(each - highest)
    total = shares.sum(0)
    shares = shares / jnp.where(total == 0, 1, total)
    output = sum(
        x.astype(each.dtype) * share.swapaxes(1, 2)[..., None] for x, share in zip(outputs, shares, strict=True)
    )
    lse = jnp.where(total == 0, -jnp.inf, highest + jnp.log(jnp.where(total == 0, 1, total)))
    return output.astype(outputs[0].dtype), lse


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
    query, key = jnp.asarray(query), jnp.asarray(key)
    check_shapes(query, key, key)
    scoring = make_scoring(query, mask, bias, scale, relative, soft_cap, 0.0)
    check_fit(scoring, query, *key.shape[1::2])
    return softmax(dense_scores(query, key, scoring, *make_tokens(query, key, query_positions, key_positions)))


def make_scoring(
    query: jax.Array,
    mask: Rule | Array | None,
    bias: Bias | Array | None,
    scale: float | None,
    relative: Shaw | None,
    soft_cap: float | None,
    dropout_rate: float,
) -> Scoring:
    soft_cap = None if soft_cap is None else _number("soft_cap", soft_cap)
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be above 0, or None")
    if not isinstance(relative, Shaw | None):
        raise ValueError(f"relative is {relative!r}; it must be a tfm.positions.Shaw, or None")
    return Scoring(
        rule=None if mask is None else as_rule(mask),
        bias=None if bias is None else _as_bias(bias),
        relative=relative,
        scale=query.shape[-1] ** -0.5 if scale is None else _number("scale", scale),
        soft_cap=soft_cap,
        dropout_rate=float(dropout_rate),
    )


def _as_bias(bias: Bias | Array) -> Bias:
    """A bias rule as it is; an array as a `MatrixBias`."""
    if isinstance(bias, Bias):
        check_registered(bias, Bias)
        return bias
    try:
        return MatrixBias(jnp.asarray(bias))
    except TypeError as error:
        raise ValueError(f"bias is {bias!r}; it must be a rule of tfm.positions, or a float array") from error


def _number(name: str, value: float) -> float:
    """A number that is fixed when a program is compiled; one in an array would be taken for another one's."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} is traced; it must be a number: multiply the query by what has to be traced")
    return float(value)


def make_tokens(
    query: jax.Array, key: jax.Array, query_positions: Array | None, key_positions: Array | None
) -> tuple[Tokens, Tokens]:
    def tokens(name: str, x: jax.Array, positions: Array | None) -> Tokens:
        positions = count_up(x.shape[1]) if positions is None else positions
        positions = positions if hasattr(positions, "ndim") else np.asarray(positions)
        if positions.shape not in ((x.shape[1],), (1, x.shape[1]), x.shape[:2]):
            raise ValueError(f"{name} has shape {positions.shape}; it must be {x.shape[1:2]} or {x.shape[:2]}")
        return Tokens(as_batch(positions, name))

    return tokens("query_positions", query, query_positions), tokens("key_positions", key, key_positions)
