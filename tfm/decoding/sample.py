"""Sampling: draw each token from the model's distribution, tempered and cut off as asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from tfm.decoding import select, truncation
from tfm.decoding.loop import Allow, Reweight, TokenSearch, TokenState
from tfm.decoding.state import Cache, Hypotheses, Step, eos_ids

NARROW = 1e-2
"""Below this temperature the quotients are so large that their rounding would count, unless the best one is 0."""


@dataclass(frozen=True)
class Sample(TokenSearch):
    """Settings of sampling."""

    temperature: float = 1.0
    top_k: int | None = None
    typical_p: float | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: expected at least 1, or None to keep all")
        for name in ("typical_p", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} is {value}: expected 0 < {name} <= 1, or None")
        cuts = [name for name in ("top_k", "typical_p", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and cuts:
            raise ValueError(f"temperature 0 is greedy and cannot work with {', '.join(cuts)}")

    def pick(self, scores: jax.Array, state: TokenState) -> jax.Array:
        """Draw by each row's own key and the number of the step, so that neighbours do not matter."""
        if self.temperature == 0:
            return select.first_maximum(scores)
        assert state.keys is not None
        return self.draw(scores, uniforms(state.keys, state.count))

    def draw(self, scores: jax.Array, uniform: jax.Array) -> jax.Array:
        """One token [N] of scores [N, V], given random numbers [N] in [0, 1)."""
        if self.top_k is None or self.top_k >= scores.shape[-1]:
            return select.draw(self.truncated(scores), uniform)
        values, ids = select.top_k(scores, self.top_k)
        return select.take(ids, select.draw(replace(self, top_k=None).truncated(values), uniform))

    def truncated(self, scores: jax.Array) -> jax.Array:
        """The logits that tokens are drawn from: temperature, then top-k, typical, top-p, min-p."""
        if self.temperature < NARROW:
            best = jnp.max(scores, axis=-1, keepdims=True)
            scores = scores - jnp.where(jnp.isfinite(best), best, 0.0)
        scores = scores / self.temperature
        if self.top_k is not None:
            scores = truncation.top_k(scores, self.top_k)
        if self.typical_p is not None:
            scores = truncation.typical(scores, self.typical_p)
        if self.top_p is not None:
            scores = truncation.top_p(scores, self.top_p)
        if self.min_p is not None:
            scores = truncation.min_p(scores, self.min_p)
        return scores


def sample(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    *,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    typical_p: float | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    max_length: jax.typing.ArrayLike,
    eos_id: int | Sequence[int] | None,
    pad_id: int = 0,
    alpha: float = 0.0,
    seen: jax.Array | None = None,
    buffer_length: int | None = None,
    prefill_chunk: int | None = None,
    reweight: Sequence[Reweight] = (),
    allow: Sequence[Allow] = (),
    log_probs: bool = True,
) -> Hypotheses:
    """Draw each token from p(y_t | y_<t)^(1 / temperature), cut off by top-k, typical, top-p and min-p in this order.

    Args:
        step: (tokens [N, T] int32, cache) -> (logits [N, T, V] or [N, V], cache).
        cache: pytree, every leaf [B, ...].
        prompt: [B, P] int, fed before the first choice.
        key: a random key, or one for each row [B], so that a row gives the same tokens in any batch.
        temperature: 0 is greedy search, 1 the model's own distribution.
        top_k, typical_p, top_p, min_p: see `tfm.decoding.truncation`; None leaves the rule out.
        max_length, eos_id, pad_id, alpha, seen, buffer_length, prefill_chunk, reweight, allow, log_probs: as in
            `greedy`; reweight and allow act before the temperature.

    Returns:
        Hypotheses, which unpack as ids [B, L], scores [B], finished [B]. Log-probabilities are the model's own, before
        any of the rules and the temperature.

    Raises:
        ValueError: for options out of range, or that cannot work together.

    Example:
        >>> def step(tokens, cache):  # the next token is the last one plus 1 or plus 2
        ...     return jnp.log(jax.nn.one_hot(tokens + 1, 9) + jax.nn.one_hot(tokens + 2, 9)), cache
        >>> search = jax.jit(lambda prompt, key: sample(step, None, prompt, key=key, max_length=2, eos_id=None))
        >>> ids, scores, finished = search(jnp.array([[1]]), jax.random.key(0))
        >>> ids.shape, bool((ids[0, 1] - ids[0, 0]) in (1, 2)), round(float(scores[0]), 4)
        ((1, 2), True, -1.3863)
    """
    search = Sample(
        eos_ids(eos_id), pad_id, alpha, tuple(reweight), tuple(allow), temperature, top_k, typical_p, top_p, min_p,
        log_probs=log_probs,
    )
    return search.run(
        step,
        cache,
        prompt,
        max_length=max_length,
        buffer_length=buffer_length,
        seen=seen,
        prefill_chunk=prefill_chunk,
        keys=row_keys(key, len(prompt)),
    )


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """One random key a row: [B] keys as they are, or a single one folded with the row's number."""
    if not hasattr(key, "dtype"):
        raise ValueError(f"key is {key!r}: expected a random key, as `jax.random.key` makes it, or one for each row")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"key has shape {list(key.shape)}: expected one key or one for each of {batch} rows")
    return key


def uniforms(keys: jax.Array, count: jax.Array) -> jax.Array:
    """A random number in [0, 1) for each row's key [B] at step `count`."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, count), dtype=jnp.float32))(keys)
