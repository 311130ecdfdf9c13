"""Additive attention, the one before the Transformer: for comparison."""

import jax
import jax.numpy as jnp

from tfm.ops.dense import NEGATIVE, softmax
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

    Example:
      >>> x, w = jnp.ones((1, 2, 3)), jnp.ones((3, 4))
      >>> additive_attention(x, x, x, w, w, jnp.ones(4)).shape
      (1, 2, 3)

    Reference: Bahdanau, Cho and Bengio (2015), section 3.1 and appendix A.1.2.
    """
    hidden = jnp.tanh((query @ query_kernel)[:, :, None] + (key @ key_kernel)[:, None])
    scores = jnp.einsum("BTSA,A->BTS", hidden, vector, preferred_element_type=jnp.float32)
    if mask is not None:
        rows, columns = (Tokens(jnp.arange(x.shape[1])[None]) for x in (query, key))
        scores = jnp.where(as_rule(mask).visible(rows, columns)[:, 0], scores, NEGATIVE)
    return jnp.einsum("BTS,BSD->BTD", softmax(scores), value).astype(query.dtype)
