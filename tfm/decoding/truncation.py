"""Rules that cut the tail of a distribution before a token is drawn: top-k, nucleus, min-p, typical.

Each takes logits [N, V] float32 and returns them with -inf where a token is cut off; at least one token stays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding import select


def top_k(logits: jax.Array, k: int) -> jax.Array:
    """Keep the k most probable tokens (and those that equal the last of them).

    Args:
        logits: [N, V] float32.
        k: how many to keep, at least 1; k >= V keeps all.

    Returns:
        [N, V] float32.

    Example:
        >>> top_k(jnp.array([[1.0, 3.0, 2.0]]), 2).tolist()
        [[-inf, 3.0, 2.0]]

    Reference: Fan, Lewis and Dauphin, 2018, "Hierarchical Neural Story Generation", section 5.4.
    """
    if k >= logits.shape[-1]:
        return logits
    smallest = select.top_k(logits, k)[0][:, -1:]
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def top_p(logits: jax.Array, p: float) -> jax.Array:
    """Keep the smallest set of the most probable tokens whose probabilities reach p: the nucleus.

    Args:
        logits: [N, V] float32.
        p: probability to reach, 0 < p <= 1.

    Returns:
        [N, V] float32.

    Example:
        >>> top_p(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), 0.6)[0, 2].item()
        -inf

    Reference: Holtzman et al., 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    if p >= 1:
        return logits
    probabilities = jax.nn.softmax(logits, axis=-1)
    smallest = _largest_threshold(lambda t: jnp.sum(jnp.where(probabilities >= t, probabilities, 0.0), axis=-1) >= p)
    return jnp.where(probabilities >= smallest(len(logits)), logits, -jnp.inf)


def min_p(logits: jax.Array, p: float) -> jax.Array:
    """Keep the tokens at least p times as probable as the most probable one.

    Args:
        logits: [N, V] float32.
        p: ratio, 0 <= p <= 1.

    Returns:
        [N, V] float32.

    Example:
        >>> min_p(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), 0.5)[0, 2].item()
        -inf

    Reference: Nguyen et al., 2024, "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs".
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits >= best + jnp.log(jnp.float32(p)), logits, -jnp.inf)


def typical(logits: jax.Array, p: float) -> jax.Array:
    """Keep the tokens whose surprise is nearest to its expectation, the entropy, until their probabilities reach p.

    Args:
        logits: [N, V] float32.
        p: probability to reach, 0 < p <= 1.

    Returns:
        [N, V] float32.

    Reference: Meister et al., 2023, "Locally Typical Sampling", section 4.
    """
    if p >= 1:
        return logits
    log_p = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(log_p)
    entropy = -jnp.sum(jnp.where(probabilities > 0, probabilities * log_p, 0.0), axis=-1, keepdims=True)
    # Nearness falls with the distance of the surprise from the entropy: 1 at no distance, 0 at an infinite one.
    nearness = 1.0 / (1.0 + jnp.abs(-log_p - entropy))
    smallest = _largest_threshold(lambda t: jnp.sum(jnp.where(nearness >= t, probabilities, 0.0), axis=-1) >= p)
    return jnp.where(nearness >= smallest(len(logits)), logits, -jnp.inf)


def _largest_threshold(holds: Callable[[jax.Array], jax.Array]) -> Callable[[int], jax.Array]:
    """The largest float32 t [N, 1] in [0, 1] for which holds(t) [N] is True, 0 where there is none.

    Non-negative floats are ordered as their bits are, so 30 halvings of the bits find the exact number: far cheaper on
    the CPU than sorting a vocabulary.
    """
    one = jnp.float32(1.0).view(jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds at low, does not at high
        middle = low + (high - low) // 2
        good = holds(middle.view(jnp.float32)[:, None])
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    def search(rows: int) -> jax.Array:
        bounds = jnp.zeros(rows, jnp.int32), jnp.broadcast_to(one + 1, (rows,))
        low, _ = lax.fori_loop(0, 31, halve, bounds)
        return low.view(jnp.float32)[:, None]

    return search
