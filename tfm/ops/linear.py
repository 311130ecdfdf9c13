"""Linear attention: similarity phi(q) . phi(k) in place of exp(q . k), so that the sums over keys can be kept."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tfm.ops.dense import accumulator, check_shapes
from tfm.ops.masks import as_bool
from tfm.ops.tokens import vary_alike

FeatureMap = Callable[[jax.Array], jax.Array]


def elu_plus_one(x: jax.Array) -> jax.Array:
    """The feature map elu(x) + 1: x + 1 above zero, exp(x) below."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


class LinearState(NamedTuple):
    """What linear attention keeps of the keys and values so far.

    Args:
      products: [B, K, D, Dv] float32, the sum of phi(k) v^T (D: width of the features).
      features: [B, K, D] float32, the sum of phi(k).
    """

    products: jax.Array
    features: jax.Array


def init_linear_state(batch: int, num_heads: int, feature_dim: int, value_dim: int) -> LinearState:
    """The state before the first key: zeros."""
    return LinearState(
        jnp.zeros((batch, num_heads, feature_dim, value_dim)), jnp.zeros((batch, num_heads, feature_dim))
    )


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    key_mask: jax.Array | None = None,
    feature_map: FeatureMap = elu_plus_one,
    chunk_size: int = 128,
) -> jax.Array:
    """Attention with a similarity that factorises; work and memory grow linearly with the length.

    output_i = (phi(q_i) . sum_j phi(k_j) v_j^T) / (phi(q_i) . sum_j phi(k_j)), over all keys j, or over j <= i.

    Args:
      query: [B, T, H, D] float.
      key: [B, S, K, D] float, H % K == 0; query heads 0 .. H/K - 1 use key head 0.
      value: [B, S, K, Dv] float.
      causal: query i sees keys 0 .. i only.
      key_mask: [B, S] bool, True for a real token.
      feature_map: phi, applied to float32 arrays along their last axis; it may change its width.
      chunk_size: causal: positions computed in parallel at a time.

    Returns:
      [B, T, H, Dv], the query's dtype; zeros where a query sees no key.

    Raises:
      ValueError: shapes that do not fit.

    Example:
      >>> x = jnp.ones((1, 5, 2, 4))
      >>> bool(jnp.allclose(linear_attention(x, x, x, causal=True), 1))
      True

    Reference: Katharopoulos et al. (2020), Transformers are RNNs, sections 3.2 to 3.4.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check(query, key, value, causal, key_mask, chunk_size)
    q, k, v = _features(query, key, value, key_mask, feature_map)
    if causal:
        sums = causal_product(q, k, _with_ones(v), chunk_size)
    else:
        sums = jnp.einsum("BKGTD,BKDF->BKGTF", q, jnp.einsum("BKSD,BKSF->BKDF", k[:, :, 0], _with_ones(v)[:, :, 0]))
    return _normalised(sums, query)


def linear_attention_step(
    state: LinearState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_mask: jax.Array | None = None,
    feature_map: FeatureMap = elu_plus_one,
    chunk_size: int = 128,
) -> tuple[LinearState, jax.Array]:
    """Continues causal linear attention by T >= 1 tokens.

    Args:
      state: of the tokens before; see `init_linear_state`.
      query: [B, T, H, D] float.
      key: [B, T, K, D] float.
      value: [B, T, K, Dv] float.
      key_mask: [B, T] bool, True for a real token.
      feature_map: as for `linear_attention`.
      chunk_size: as for `linear_attention`.

    Returns:
      The state after these tokens, and the output [B, T, H, Dv].

    Example:
      >>> x = jnp.ones((1, 1, 2, 4))
      >>> state, output = linear_attention_step(init_linear_state(1, 2, 4, 4), x, x, x)
      >>> output.shape, float(state.features[0, 0, 0])
      ((1, 1, 2, 4), 2.0)

    Reference: Katharopoulos et al. (2020), section 3.4, equations 18 to 20.
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    _check(query, key, value, True, key_mask, chunk_size)
    q, k, v = _features(query, key, value, key_mask, feature_map)
    v = _with_ones(v)
    before = jnp.concatenate([state.products, state.features[..., None]], -1)
    sums = causal_product(q, k, v, chunk_size) + jnp.einsum("BKGTD,BKDF->BKGTF", q, before)
    after = before + jnp.einsum("BKSD,BKSF->BKDF", k[:, :, 0], v[:, :, 0])
    return LinearState(after[..., :-1], after[..., -1]), _normalised(sums, query)


def _check(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, key_mask: jax.Array | None, chunk_size: int
) -> None:
    check_shapes(query, key, value)
    if key_mask is not None and as_bool(key_mask, "key_mask").shape not in (key.shape[:2], (1, key.shape[1])):
        raise ValueError(f"key_mask has shape {key_mask.shape}; it must be {key.shape[:2]}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be 1 or more")
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(f"causal linear attention has {query.shape[1]} queries for {key.shape[1]} keys; give as many")


def _features(
    query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array | None, feature_map: FeatureMap
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """phi(q) [B, K, G, T, D]; phi(k) [B, K, 1, S, D], zeros for padding; v [B, K, 1, S, Dv]."""
    dtype = accumulator(query, key, value)
    q, k = feature_map(query.astype(dtype)), feature_map(key.astype(dtype))
    v = value.astype(dtype)
    if key_mask is not None:
        real = as_bool(key_mask, "key_mask")[:, :, None, None]
        k, v = jnp.where(real, k, 0), jnp.where(real, v, 0)
    B, T, H, D = q.shape
    K = key.shape[2]
    q = q.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4)
    return vary_alike((q, k.transpose(0, 2, 1, 3)[:, :, None], v.transpose(0, 2, 1, 3)[:, :, None]))


def _with_ones(v: jax.Array) -> jax.Array:
    """A column of ones beside the values: its weighted sum is the denominator."""
    return jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], -1)


def _normalised(sums: jax.Array, query: jax.Array) -> jax.Array:
    """[B, K, G, T, Dv + 1], the denominators last -> [B, T, H, Dv]."""
    total = sums[..., -1:]
    output = sums[..., :-1] / jnp.where(total == 0, 1, total)
    return output.transpose(0, 3, 1, 2, 4).reshape(*query.shape[:3], output.shape[-1]).astype(query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def causal_product(a: jax.Array, b: jax.Array, c: jax.Array, chunk_size: int, reverse: bool = False) -> jax.Array:
    """sum over j <= i (reverse: j >= i) and over the heads of b and c of (a_i . b_j) c_j.

    Each of its derivatives is such a product too, so nothing but the inputs is kept for the backward pass.

    Args:
      a: [B, K, G, T, D] float.
      b: [B, K, N, T, D] float.
      c: [B, K, N, T, F] float.

    Returns:
      [B, K, G, T, F].
    """
    T = a.shape[3]
    size = max(min(chunk_size, T), 1)
    a, b, c = vary_alike((a, b, c))
    a_chunks, b_chunks, c_chunks = (_chunked(x, size) for x in (a, b, c))
    seen = jnp.tril(jnp.ones((size, size), bool))
    seen = seen.T if reverse else seen

    def chunk(state: jax.Array, xs: tuple) -> tuple[jax.Array, jax.Array]:
        a, b, c = xs
        inside = jnp.where(seen, jnp.einsum("BKGTD,BKNSD->BKGNTS", a, b), 0)
        sums = jnp.einsum("BKGNTS,BKNSF->BKGTF", inside, c) + jnp.einsum("BKGTD,BKDF->BKGTF", a, state)
        return state + jnp.einsum("BKNSD,BKNSF->BKDF", b, c), sums

    state = vary_alike(jnp.zeros((*a.shape[:2], a.shape[-1], c.shape[-1]), a.dtype), a)
    _, sums = lax.scan(chunk, state, (a_chunks, b_chunks, c_chunks), reverse=reverse)
    sums = jnp.moveaxis(sums, 0, 3)
    return sums.reshape(*a.shape[:3], sums.shape[3] * size, c.shape[-1])[..., :T, :]


def _chunked(x: jax.Array, size: int) -> jax.Array:
    """[B, K, G, T, D] -> [T/size, B, K, G, size, D], filled with zeros."""
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % size), (0, 0)])
    return jnp.moveaxis(x.reshape(*x.shape[:3], x.shape[3] // size, size, x.shape[-1]), 3, 0)


def _product_fwd(a: jax.Array, b: jax.Array, c: jax.Array, chunk_size: int, reverse: bool) -> tuple:
    return causal_product(a, b, c, chunk_size, reverse), (a, b, c)


def _product_bwd(chunk_size: int, reverse: bool, saved: tuple, g: jax.Array) -> tuple:
    a, b, c = saved
    return (
        causal_product(g, c, b, chunk_size, reverse),
        causal_product(c, g, a, chunk_size, not reverse),
        causal_product(b, a, g, chunk_size, not reverse),
    )


causal_product.defvjp(_product_fwd, _product_bwd)
