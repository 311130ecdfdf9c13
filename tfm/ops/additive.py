"""Additive attention, the one before the Transformer: for comparison."""

import jax
import jax.numpy as jnp

from tfm.ops.arguments import float_array
from tfm.ops.dense import NEGATIVE, accumulator, softmax
from tfm.ops.masks import Rule, as_rule
from tfm.ops.tokens import Array, Tokens


def additive_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_kernel: jax.Array,
    key_kernel: jax.Array,
    vector: jax.Array,
    *,
    mask: Rule | Array | None = None,
) -> jax.Array:
    """Attention whose scores come from a small network: score_ij = v . tanh(W q_i + U k_j).

    Args:
      query: [B, T, D] float.
      key: [B, S, E] float.
      value: [B, S, Dv] float.
      query_kernel: [D, A] float, W.
      key_kernel: [E, A] float, U.
      vector: [A] float, v.
      mask: a rule, or bool broadcastable to [B, 1, T, S]; True means: may attend.

    Returns:
      [B, T, Dv], the query's dtype; zeros for a query with nothing to see.

    Raises:
      ValueError: shapes that do not fit.

    Example:
      >>> x, w = jnp.ones((1, 2, 3)), jnp.ones((3, 4))
      >>> additive_attention(x, x, x, w, w, jnp.ones(4)).shape
      (1, 2, 3)

    Reference: Bahdanau, Cho and Bengio (2015), section 3.1 and appendix A.1.2.
    """
    names = "query", "key", "value", "query_kernel", "key_kernel", "vector"
    arrays = zip((query, key, value, query_kernel, key_kernel, vector), names, strict=True)
    query, key, value, query_kernel, key_kernel, vector = (float_array(x, name) for x, name in arrays)
    _check(query, key, value, query_kernel, key_kernel, vector)
    hidden = jnp.tanh((query @ query_kernel)[:, :, None] + (key @ key_kernel)[:, None])
    scores = jnp.einsum("BTSA,A->BTS", hidden, vector, preferred_element_type=accumulator(hidden, vector))
    if mask is not None:
        rows, columns = (Tokens(jnp.arange(x.shape[1])[None]) for x in (query, key))
        seen = as_rule(mask).visible(rows, columns)
        _check_mask(seen.shape, scores.shape)
        scores = jnp.where(jnp.broadcast_to(seen, (len(scores), 1, *scores.shape[1:]))[:, 0], scores, NEGATIVE)
    return jnp.einsum("BTS,BSD->BTD", softmax(scores), value).astype(query.dtype)


def _check_mask(shape: tuple[int, ...], scores: tuple[int, ...]) -> None:
    wanted = scores[0], 1, *scores[1:]
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(f"mask has shape {shape}; it must be broadcastable to {wanted}")


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_kernel: jax.Array,
    key_kernel: jax.Array,
    vector: jax.Array,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {x.shape}; it must be [batch, length, width]")
    if key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]:
        raise ValueError(f"query, key and value have shapes {query.shape}, {key.shape}, {value.shape}; batches must be "
                         "equal, and lengths of key and value")
    kernels = (query.shape[2], len(vector)), (key.shape[2], len(vector)), (len(vector),)
    if (query_kernel.shape, key_kernel.shape, vector.shape) != kernels:
        raise ValueError(f"query_kernel, key_kernel and vector have shapes {query_kernel.shape}, {key_kernel.shape}, "
                         f"{vector.shape}; they must be [{query.shape[2]}, A], [{key.shape[2]}, A] and [A]")
