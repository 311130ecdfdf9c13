"""The loop that greedy search and sampling share: one token a row and step."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding import select
from tfm.decoding.state import (
    NOTHING,
    Cache,
    History,
    Hypotheses,
    Step,
    check_prompt,
    check_vocabulary,
    is_eos,
    last_logits,
    length_penalty,
    prefill,
    row_limits,
    take_rows,
    write_column,
)

Reweight = Callable[[jax.Array, History], jax.Array]  # logits [N, V] -> logits [N, V]
Allow = Callable[[History], jax.Array]  # True [N or 1, V] where a token may come next


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "seen", "ids", "log_probs", "count", "limit", "done", "finished", "keys"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TokenState:
    """The loop's carry: cache, seen [B, W], ids and log_probs [B, L], count, and the rest by row [B]."""

    cache: Cache
    seen: jax.Array
    ids: jax.Array
    log_probs: jax.Array
    count: jax.Array
    limit: jax.Array
    done: jax.Array
    finished: jax.Array
    keys: jax.Array | None


@dataclass(frozen=True)
class TokenSearch(ABC):
    """Settings of a search that keeps one hypothesis a row, as `start`, `advance` and `result` over a state.

    `greedy` and `sample` run the three at once; streaming and compaction call `advance` in pieces.
    """

    eos_ids: tuple[int, ...]
    pad_id: int = 0
    alpha: float = 0.0
    reweight: tuple[Reweight, ...] = ()
    allow: tuple[Allow, ...] = ()
    log_probs: bool = field(default=True, kw_only=True)
    """False: leave out log-probabilities and scores, which are NaN then, and save a pass over the logits."""

    @abstractmethod
    def pick(self, scores: jax.Array, state: TokenState) -> jax.Array:
        """The next token [B] from the scores [B, V] of what is allowed."""

    def start(
        self,
        step: Step,
        cache: Cache,
        prompt: jax.Array,
        *,
        max_length: jax.typing.ArrayLike,
        buffer_length: int | None = None,
        seen: jax.Array | None = None,
        prefill_chunk: int | None = None,
        keys: jax.Array | None = None,
    ) -> TokenState:
        """Feed the prompt and choose the first token."""
        prompt, known = check_prompt(prompt, seen)
        batch = prompt.shape[0]
        limit, length = row_limits(max_length, buffer_length, batch)
        logits, cache = prefill(step, cache, prompt, prefill_chunk)
        check_vocabulary(self.eos_ids, logits)
        state = TokenState(
            cache=cache,
            seen=known,
            ids=jnp.full((batch, length), NOTHING, jnp.int32),
            log_probs=jnp.full((batch, length), 0.0 if self.log_probs else jnp.nan, jnp.float32),
            count=jnp.int32(0),
            limit=limit,
            done=limit < 1,
            finished=jnp.zeros(batch, bool),
            keys=keys,
        )
        return self._append(state, last_logits(logits))

    def advance(self, step: Step, state: TokenState, until: jax.typing.ArrayLike) -> TokenState:
        """Go on until every row has `until` tokens or is done."""

        def body(state: TokenState) -> TokenState:
            token = lax.dynamic_slice_in_dim(state.ids, state.count - 1, 1, axis=1)
            logits, cache = step(jnp.where(token < 0, self.pad_id, token), state.cache)
            return self._append(replace(state, cache=cache), last_logits(logits))

        return lax.while_loop(lambda s: (s.count < until) & ~jnp.all(s.done), body, state)

    def result(self, state: TokenState) -> Hypotheses:
        """What was found so far."""
        lengths = jnp.sum(state.ids >= 0, axis=-1, dtype=jnp.int32)
        return Hypotheses(
            ids=jnp.where(state.ids < 0, self.pad_id, state.ids),
            scores=jnp.sum(state.log_probs, axis=-1) / length_penalty(lengths, self.alpha),
            finished=state.finished,
            lengths=lengths,
            log_probs=state.log_probs,
        )

    def keep_rows(self, state: TokenState, rows: jax.Array) -> TokenState:
        """The state of the given rows only."""
        by_row = replace(state, count=jnp.broadcast_to(state.count, state.limit.shape))
        return replace(take_rows(by_row, rows), count=state.count)

    def record(
        self, state: TokenState, logits: jax.Array, token: jax.Array, active: jax.Array, possible: jax.Array
    ) -> TokenState:
        """Add token [B] to the active rows [B] bool; where no token is possible [B] bool they stop."""
        running = active & possible
        ended = running & is_eos(token, self.eos_ids)
        count = state.count + 1
        return replace(
            state,
            ids=write_column(state.ids, jnp.where(running, token, NOTHING), state.count),
            log_probs=self._with_log_prob(state, logits, token, running) if self.log_probs else state.log_probs,
            count=count,
            finished=state.finished | ended,
            done=state.done | ended | (active & (~possible | (count >= state.limit))),
        )

    @staticmethod
    def _with_log_prob(state: TokenState, logits: jax.Array, token: jax.Array, running: jax.Array) -> jax.Array:
        """log_probs with log softmax(logits [B, V]) of token [B] in the next column, 0 where a row does not run."""
        chosen = select.take(logits, token)
        log_prob = chosen - select.log_sum_exp(logits, near=chosen)
        return write_column(state.log_probs, jnp.where(running, log_prob, 0.0), state.count)

    def _append(self, state: TokenState, logits: jax.Array) -> TokenState:
        scores = adjusted(logits, self.reweight, self.allow, partial(_history, state))
        token = self.pick(scores, state)
        return self.record(state, logits, token, ~state.done, select.take(scores, token) > -jnp.inf)

    def run(self, step: Step, cache: Cache, prompt: jax.Array, **options: Any) -> Hypotheses:
        """`start`, `advance` to the end, `result`."""
        state = self.start(step, cache, prompt, **options)
        return self.result(self.advance(step, state, state.ids.shape[1]))


def adjusted(
    logits: jax.Array, reweight: tuple[Reweight, ...], allow: tuple[Allow, ...], history: Callable[[int], History]
) -> jax.Array:
    """Logits [N, V] after the reweighting rules, -inf where a token is not allowed."""
    if reweight or allow:
        past = history(logits.shape[-1])
        for change in reweight:
            logits = change(logits, past)
        for rule in allow:
            logits = jnp.where(rule(past), logits, -jnp.inf)
    return logits


def _history(state: TokenState, vocab_size: int) -> History:
    prompt_length = state.seen.shape[1]
    tokens = jnp.concatenate([state.seen, state.ids], axis=1)
    return History(tokens, prompt_length + state.count, prompt_length, vocab_size, state.limit)
