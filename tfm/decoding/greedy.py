"""Greedy search: the most probable token at every step."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from tfm.decoding import select
from tfm.decoding.loop import Allow, Reweight, TokenSearch, TokenState
from tfm.decoding.state import Cache, Hypotheses, Step, eos_ids


@dataclass(frozen=True)
class Greedy(TokenSearch):
    """Settings of greedy search."""

    def pick(self, scores: jax.Array, state: TokenState) -> jax.Array:
        """The first of the most probable tokens."""
        return select.first_maximum(scores)


def greedy(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    *,
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
    """Take the most probable token at every step: y_t = argmax p(y_t | y_<t), the smaller id of equals.

    Works over any step function; call it inside `jax.jit`, where it is one compiled loop.

    Args:
        step: (tokens [N, T] int32, cache) -> (logits [N, T, V] or [N, V], cache).
        cache: pytree, every leaf [B, ...].
        prompt: [B, P] int, fed before the first choice (a column of BOS for an encoder-decoder).
        max_length: most new tokens, one number or [B]; traced values need buffer_length.
        eos_id: the id or ids that end a row; None goes on to the limit.
        pad_id: what follows the end in the returned ids.
        alpha: exponent of the length penalty in the returned scores.
        seen: [B, W] int, what the rules below count as the text so far, -1 being nothing; the prompt by default.
            Give it where the cache holds tokens already, or the prompt has padding.
        buffer_length: L, the allocated number of new tokens; by default the largest limit.
        prefill_chunk: feed the prompt in pieces of this many columns.
        reweight: functions (logits [N, V], History) -> logits that change the choice; see `tfm.decoding.logits`.
        allow: functions History -> bool [N, V], True where a token may come next.
        log_probs: False leaves out log-probabilities and scores, which are NaN then: a pass over the logits less.

    Returns:
        Hypotheses, which unpack as ids [B, L], scores [B], finished [B]. Log-probabilities are the model's own,
        before reweight and allow. A row where no token is allowed stops unfinished.

    Raises:
        ValueError: for a prompt or limit of a wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> def step(tokens, cache):  # the next token is the last one plus 1
        ...     return jax.nn.one_hot(tokens + 1, 5), cache
        >>> search = jax.jit(lambda prompt: greedy(step, None, prompt, max_length=2, eos_id=4))
        >>> ids, scores, finished = search(jnp.array([[1], [3]]))
        >>> ids.tolist(), finished.tolist()
        ([[2, 3], [4, 0]], [False, True])
    """
    search = Greedy(eos_ids(eos_id), pad_id, alpha, tuple(reweight), tuple(allow), log_probs=log_probs)
    return search.run(
        step,
        cache,
        prompt,
        max_length=max_length,
        buffer_length=buffer_length,
        seen=seen,
        prefill_chunk=prefill_chunk,
    )
