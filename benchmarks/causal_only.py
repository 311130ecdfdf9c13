"""Blockwise attention written for the causal rule alone: what the general kernel is measured against."""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _split(x: jax.Array) -> jax.Array:
    """[1, L, H, D] -> [L / BLOCK, H, BLOCK, D]."""
    return x[0].reshape(-1, BLOCK, *x.shape[2:]).transpose(0, 2, 1, 3)


def _join(x: jax.Array) -> jax.Array:
    """[n, H, BLOCK, D] -> [1, L, H, D]."""
    return x.transpose(0, 2, 1, 3).reshape(1, -1, x.shape[1], x.shape[3])


def _mask_diagonal(scores: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones((BLOCK, BLOCK), bool)), scores, -1e30)


@jax.custom_vjp
def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(Q K^T / sqrt(D)) V below the diagonal; [1, L, H, D] each, L a multiple of BLOCK."""
    return _forward(query, key, value)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, tuple]:
    q, k, v = _split(query * query.shape[-1] ** -0.5), _split(key), _split(value)

    def row(_: None, xs: tuple) -> tuple:
        q_i, i = xs

        def add(j: jax.Array, state: tuple, diagonal: bool = False) -> tuple:
            output, greatest, total = state
            scores = _dot(q_i, k[j], (2, 2))
            scores = _mask_diagonal(scores) if diagonal else scores
            higher = jnp.maximum(greatest, scores.max(-1, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(greatest - higher)
            output = output * shrink + _dot(weights, v[j], (2, 1))
            return output, higher, total * shrink + weights.sum(-1, keepdims=True)

        start = jnp.zeros_like(q_i), jnp.full((*q_i.shape[:2], 1), -1e30), jnp.zeros((*q_i.shape[:2], 1))
        output, greatest, total = add(i, lax.fori_loop(0, i, add, start), diagonal=True)
        return None, (output / total, greatest + jnp.log(total))

    _, (output, lse) = lax.scan(row, None, (q, jnp.arange(len(q))))
    output = _join(output)
    return output, (query, key, value, output, lse)


def _backward(saved: tuple, d_output: jax.Array) -> tuple:
    query, key, value, output, lse = saved
    scale = query.shape[-1] ** -0.5
    q, k, v, g = _split(query * scale), _split(key), _split(value), _split(d_output)
    q_t, g_t = q.swapaxes(2, 3), g.swapaxes(2, 3)
    delta = _split((output * d_output).sum(-1, keepdims=True))

    def column(d_q: jax.Array, xs: tuple) -> tuple:
        k_j, v_j, j = xs

        def add(i: jax.Array, state: tuple, diagonal: bool = False) -> tuple:
            d_q, d_k, d_v = state
            scores = _dot(q[i], k_j, (2, 2))
            scores = _mask_diagonal(scores) if diagonal else scores
            weights = jnp.exp(scores - lse[i])
            d_scores = weights * (_dot(g[i], v_j, (2, 2)) - delta[i])
            d_q = d_q.at[i].add(_dot(d_scores, k_j, (2, 1)))
            return d_q, d_k + _dot(q_t[i], d_scores, (2, 1)), d_v + _dot(g_t[i], weights, (2, 1))

        zeros = jnp.zeros_like(q_t[0])
        d_q, d_k, d_v = lax.fori_loop(j + 1, len(q), add, add(j, (d_q, zeros, zeros), diagonal=True))
        return d_q, (d_k, d_v)

    d_q, (d_k, d_v) = lax.scan(column, jnp.zeros_like(q), (k, v, jnp.arange(len(k))))
    return _join(d_q * scale), _join(d_k.swapaxes(2, 3)), _join(d_v.swapaxes(2, 3))


attention.defvjp(_forward, _backward)
