"""Attention as kernel regression, and as one step of a modern Hopfield network: the same function of ops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tfm.ops.attention import attention


def kernel_regression(queries: jax.Array, points: jax.Array, values: jax.Array, *, bandwidth: float) -> jax.Array:
    """The Nadaraya-Watson estimate with a Gaussian kernel, computed by `tfm.ops.attention`.

        f(x) = sum_i K(x - x_i) y_i / sum_i K(x - x_i),    K(u) = exp(-|u|^2 / (2 h^2))

    Of |x - x_i|^2 the part |x|^2 is the same for all i; what is left is attention with the products x . x_i, the scale
    1 / h^2 and the bias -|x_i|^2 / (2 h^2) on the scores.

    Args:
        queries: [T, D] float, where the function is estimated.
        points: [S, D] float, where it was seen.
        values: [S, Dv] float, what was seen there.
        bandwidth: h.

    Returns:
        [T, Dv] float32.

    Example:
        >>> points = jnp.array([[0.0], [1.0]])
        >>> kernel_regression(jnp.array([[0.5]]), points, jnp.array([[0.0], [4.0]]), bandwidth=0.3).tolist()
        [[2.0]]

    Reference: Nadaraya (1964); Watson (1964); Tsai et al. (2019), "Transformer Dissection", section 3.
    """
    bias = -0.5 * jnp.sum(points**2, axis=-1) / bandwidth**2
    found: Any = attention(queries[None, :, None], points[None, :, None], values[None, :, None], scale=bandwidth**-2,
                           bias=bias[None, None, None])
    return found[0, :, 0]


def hopfield_step(states: jax.Array, patterns: jax.Array, *, beta: float) -> jax.Array:
    """One update of a continuous Hopfield network: attention with the stored patterns as keys and as values.

        xi_new = X softmax(beta X^T xi)

    Args:
        states: [T, D] float, xi.
        patterns: [S, D] float, the columns of X.
        beta: inverse temperature; attention's 1 / sqrt(D).

    Returns:
        [T, D].

    Example:
        >>> patterns = 4.0 * jnp.eye(3)
        >>> hopfield_step(patterns + 0.5, patterns, beta=2.0).round(2).tolist()[0]
        [4.0, 0.0, 0.0]

    Reference: Ramsauer et al. (2020), "Hopfield Networks is All You Need", equations 3 and 10.
    """
    found: Any = attention(states[None, :, None], patterns[None, :, None], patterns[None, :, None], scale=beta)
    return found[0, :, 0]


def hopfield_energy(states: jax.Array, patterns: jax.Array, *, beta: float) -> jax.Array:
    """The energy that `hopfield_step` never raises.

        E = -lse(beta, X^T xi) + xi^T xi / 2 + ln(S) / beta + M^2 / 2,    M = max_i |x_i|

    Args: as for `hopfield_step`.

    Returns:
        [T], at least 0.

    Reference: Ramsauer et al. (2020), equation 2 and theorem 1.
    """
    products = states @ patterns.T
    largest = jnp.max(jnp.sum(patterns**2, axis=-1))
    return (-jax.nn.logsumexp(beta * products, axis=-1) / beta + 0.5 * jnp.sum(states**2, axis=-1)
            + jnp.log(len(patterns)) / beta + 0.5 * largest)


def retrieved_share(count: int, width: int, *, noise: float, steps: int = 1, seed: int = 0,
                    samples: int = 64) -> float:
    """Share of noisy patterns that the network brings back: cosine with the true one above 0.99.

    Args:
        count: stored patterns, random points of the sphere of radius sqrt(width).
        width: D; beta is 1 / sqrt(D), as in attention.
        noise: standard deviation of what is added to each component.
        steps: updates.
        seed: of patterns and noise.
        samples: patterns that are tried, at most `count`.

    Returns:
        from 0 to 1.
    """
    pattern_key, noise_key = jax.random.split(jax.random.key(seed))
    patterns = jax.random.normal(pattern_key, (count, width))
    patterns *= width**0.5 / jnp.linalg.norm(patterns, axis=-1, keepdims=True)
    chosen = patterns[:samples]
    states = chosen + noise * jax.random.normal(noise_key, chosen.shape)
    for _ in range(steps):
        states = hopfield_step(states, patterns, beta=width**-0.5)
    cosine = jnp.sum(states * chosen, -1) / (jnp.linalg.norm(states, axis=-1) * jnp.linalg.norm(chosen, axis=-1))
    return float(jnp.mean(cosine > 0.99))
