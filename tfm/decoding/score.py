"""Scoring: the log-probability a model gives to tokens that are already there (teacher forcing)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding import select
from tfm.decoding.state import Cache, Step, check_prompt, eos_ids, is_eos, last_logits, length_penalty, tile


def token_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(logits)[target] at each position.

    Args:
        logits: [..., V] float.
        targets: [...] int.

    Returns:
        [...] float32.
    """
    logits = logits.astype(jnp.float32)
    gold = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return gold - select.log_sum_exp(logits)


def token_mask(ids: jax.Array, eos_id: int | Sequence[int] | None) -> jax.Array:
    """True on the tokens of a hypothesis: everything up to the first EOS, and that EOS.

    Args:
        ids: [..., L] int.
        eos_id: the id or ids that end a hypothesis.

    Returns:
        [..., L] bool.

    Example:
        >>> token_mask(jnp.array([5, 2, 0, 0]), 2).tolist()
        [True, True, False, False]
    """
    ended = is_eos(ids, eos_ids(eos_id)).astype(jnp.int32)
    return jnp.cumsum(ended, axis=-1) - ended == 0


def score(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    targets: jax.Array,
    *,
    mask: jax.Array | None = None,
    alpha: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Summed log-probability of targets after the prompt, over the length penalty.

    Args:
        step: (tokens [N, T] int32, cache) -> (logits, cache). Where it returns every position's logits [N, T, V] the
            targets go through in one call, where it returns [N, V] token by token.
        cache: pytree, every leaf [B, ...].
        prompt: [B, P] int.
        targets: [B, T] int, EOS included if it is to be scored; or [B, n, T], n hypotheses of each row, as a search
            returns them.
        mask: bool, shape of targets, True on the tokens that count; all by default. See `token_mask`.
        alpha: exponent of the length penalty.

    Returns:
        Scores [B] and log-probabilities [B, T] float32, or [B, n] and [B, n, T]; 0 where mask is False.

    Raises:
        ValueError: if the shapes do not fit, or there are no tokens.

    Example:
        >>> def step(tokens, cache):  # all of 4 tokens equally probable
        ...     return jnp.zeros((*tokens.shape, 4)), cache
        >>> scores, log_probs = score(step, None, jnp.array([[1]]), jnp.array([[3, 2]]))
        >>> bool(jnp.allclose(scores, -2 * jnp.log(4.0)))
        True
    """
    prompt, targets = check_prompt(prompt, None)[0], jnp.asarray(targets)
    mask = jnp.ones(targets.shape, bool) if mask is None else mask
    if targets.ndim not in (2, 3) or targets.shape[0] != prompt.shape[0] or mask.shape != targets.shape:
        raise ValueError(
            f"prompt, targets and mask have shapes {list(prompt.shape)}, {list(targets.shape)}, {list(mask.shape)}: "
            "expected [B, P], [B, T] or [B, n, T], and that of targets"
        )
    if not targets.shape[-1]:
        raise ValueError(f"targets has shape {list(targets.shape)}: expected at least one token of each row")
    flat = targets.reshape(-1, targets.shape[-1]).astype(jnp.int32)
    times = targets.shape[1] if targets.ndim == 3 else 1
    log_probs = _forced(step, tile(cache, times), tile(prompt, times), flat)
    log_probs = jnp.where(mask, log_probs.reshape(targets.shape), 0.0)
    return jnp.sum(log_probs, axis=-1) / length_penalty(jnp.sum(mask, axis=-1), alpha), log_probs


def _forced(step: Step, cache: Cache, prompt: jax.Array, targets: jax.Array) -> jax.Array:
    inputs = jnp.concatenate([prompt, targets[:, :-1]], axis=1)
    shape = jax.eval_shape(step, inputs, cache)[0].shape
    if len(shape) == 3 and shape[1] == inputs.shape[1]:
        return token_log_probs(step(inputs, cache)[0][:, prompt.shape[1] - 1 :], targets)
    logits, cache = step(prompt, cache)[:2]
    first = token_log_probs(last_logits(logits), targets[:, 0])

    def forced(cache: Cache, tokens: tuple[jax.Array, jax.Array]) -> tuple[Cache, jax.Array]:
        fed, target = tokens
        logits, cache = step(fed[:, None], cache)[:2]
        return cache, token_log_probs(last_logits(logits), target)

    _, rest = lax.scan(forced, cache, (targets[:, :-1].T, targets[:, 1:].T))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
