"""Speculative decoding: a cheap guess of the next tokens, checked by the model in one call.

Each round drafts G tokens, feeds them to the model together, and takes over those that the model itself would have
chosen, and one token more. Greedy search gives exactly the greedy tokens; sampling keeps exactly the model's
distribution. All rows go on by the number of tokens that every one of them accepts, so a round ends at one place of the
cache; with one row, its best use, nothing is lost by that.

Checking G tokens costs more than a step. What prompt lookup finds is checked only as long as that pays: each check
takes from a credit, to which a check with more than half of its tokens accepted and, slowly, ordinary steps add. Where
the model repeats nothing, there is one check in `PRICE` steps at most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding import select
from tfm.decoding.loop import Allow, Reweight, TokenState, adjusted
from tfm.decoding.sample import Sample, row_keys
from tfm.decoding.state import NOTHING, Cache, History, Hypotheses, Step, eos_ids, prefill

PRICE = 32  # what a refused check takes from the credit, and one wholly accepted adds; an ordinary step adds 1
MOST_CREDIT = 4 * PRICE
LEAST = 2  # one last token alone says too little about what follows

Rewind = Callable[[Cache, jax.Array], Cache]  # (cache, n) -> cache without its last n tokens


@dataclass(frozen=True)
class ModelDraft:
    """Drafts of a smaller model with the same vocabulary: its step, its cache for the prompt, and how to rewind it."""

    step: Step
    cache: Cache
    rewind: Rewind


@dataclass(frozen=True)
class PromptLookup:
    """Drafts copied from the text so far: what followed the latest earlier occurrence of its last tokens.

    Where one of the rows has no such occurrence, or drafts were refused before, a round is an ordinary step.

    Attributes:
        ngram: how many last tokens are looked for; fewer, but two at least, where so many do not occur again.

    Reference: Saxena, 2023, "Prompt Lookup Decoding".
    """

    ngram: int = 3


class Accepted(NamedTuple):
    """How well drafting went, summed over the rows that were not done: drafted tokens, and those taken over."""

    drafted: jax.Array
    accepted: jax.Array

    @property
    def rate(self) -> jax.Array:
        """The share of drafted tokens that were taken over."""
        return self.accepted / jnp.maximum(self.drafted, 1)


def speculate(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    *,
    draft: ModelDraft | PromptLookup,
    rewind: Rewind,
    draft_length: int = 4,
    max_length: jax.typing.ArrayLike,
    eos_id: int | Sequence[int] | None,
    key: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    typical_p: float | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    pad_id: int = 0,
    alpha: float = 0.0,
    seen: jax.Array | None = None,
    buffer_length: int | None = None,
    reweight: Sequence[Reweight] = (),
    allow: Sequence[Allow] = (),
) -> tuple[Hypotheses, Accepted]:
    """Greedy search (temperature 0) or sampling, several tokens to a call of the model where a draft guesses them.

    With p the model's distribution after all rules and q the draft's, a drafted token x is accepted with probability
    min(1, p(x) / q(x)); where it is not, the token is drawn from max(p - q, 0), normalised. The result has
    distribution p.

    Args:
        step: must return the logits of every position, [N, T, V].
        cache: pytree, leaves [B, ...], with room for draft_length tokens more than the prompt and the longest result.
        prompt: [B, P] int.
        draft: where guesses come from. Prompt lookup reads `seen` and what was generated.
        rewind: (cache, n) -> cache as it was before its last n tokens; n is a traced int32.
        draft_length: G, tokens drafted a round.
        key: a random key or one a row; needed where temperature is above 0.
        max_length, eos_id, temperature, top_k, typical_p, top_p, min_p, pad_id, alpha, seen, buffer_length, reweight,
            allow: as in `sample`.

    Returns:
        Hypotheses as `greedy` and `sample` return them, and the counts of drafted and accepted tokens.

    Raises:
        ValueError: for options out of range, sampling without a key, or a step with the last position's logits only.

    Reference: Leviathan, Kalman and Matias, 2023, "Fast Inference from Transformers via Speculative Decoding",
        section 2.3.
    """
    if draft_length < 1:
        raise ValueError(f"draft_length is {draft_length}: expected at least 1")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature is {temperature}, which draws tokens, but key is None: give a random key")
    settings = Sample(
        eos_ids(eos_id), pad_id, alpha, tuple(reweight), tuple(allow), temperature, top_k, typical_p, top_p, min_p
    )
    loop = _Speculation(settings, step, draft, rewind, draft_length)
    keys = None if key is None or temperature == 0 else row_keys(key, len(prompt))
    state = settings.start(
        step, cache, prompt, max_length=max_length, buffer_length=buffer_length, seen=seen, keys=keys
    )
    return loop.run(state, prompt)


@dataclass(frozen=True)
class _Speculation:
    settings: Sample
    step: Step
    draft: ModelDraft | PromptLookup
    rewind: Rewind
    size: int

    def run(self, state: TokenState, prompt: jax.Array) -> tuple[Hypotheses, Accepted]:
        length = state.ids.shape[1]
        spare = ((0, 0), (0, self.size + 1))  # a round may write past the end
        state = replace(
            state,
            ids=jnp.pad(state.ids, spare, constant_values=NOTHING),
            log_probs=jnp.pad(state.log_probs, spare),
        )
        drafting: Cache = None
        if isinstance(self.draft, ModelDraft):
            drafting = prefill(self.draft.step, self.draft.cache, jnp.asarray(prompt, jnp.int32), None)[1]
        carry = (state, drafting, Accepted(jnp.int32(0), jnp.int32(0)), jnp.int32(PRICE))
        state, _, counts, _ = lax.while_loop(lambda c: ~jnp.all(c[0].done), lambda c: self.round(*c), carry)
        state = replace(state, ids=state.ids[:, :length], log_probs=state.log_probs[:, :length])
        return self.settings.result(state), counts

    def round(
        self, state: TokenState, drafting: Cache, counts: Accepted, credit: jax.Array
    ) -> tuple[TokenState, Cache, Accepted, jax.Array]:
        """Draft, check, take over what all rows accept and one token more."""
        if isinstance(self.draft, PromptLookup):
            state, guesses, credit = self.wait(state, self.draft.ngram, credit)

            def check() -> tuple[TokenState, Accepted, jax.Array]:
                after, taken, total = self.take_over(state, guesses, None, counts)
                return after, total, jnp.minimum(credit + PRICE * (2 * taken - self.size) // self.size, MOST_CREDIT)

            state, counts, credit = lax.cond(jnp.all(state.done), lambda: (state, counts, credit), check)
            return state, drafting, counts, credit
        guesses, guessed, drafting = self.guess(state, self.draft, drafting)
        state, taken, counts = self.take_over(state, guesses, guessed, counts)
        return state, self.draft.rewind(drafting, self.size - taken), counts, credit

    def wait(
        self, state: TokenState, ngram: int, credit: jax.Array
    ) -> tuple[TokenState, jax.Array, jax.Array]:
        """Ordinary steps until there is credit and text has been found for every row: also its tokens [B, G]."""

        def find(state: TokenState, credit: jax.Array) -> jax.Array:
            def look() -> jax.Array:
                tokens = jnp.concatenate([state.seen, state.ids], axis=1)
                return look_up(tokens, state.seen.shape[1] + state.count, ngram, self.size)

            return lax.cond(credit >= PRICE, look, lambda: jnp.full((len(state.ids), self.size), NOTHING, jnp.int32))

        def step(carry: tuple[TokenState, jax.Array, jax.Array]) -> tuple[TokenState, jax.Array, jax.Array]:
            state, found, credit = carry
            none = Accepted(jnp.int32(0), jnp.int32(0))
            state, *_ = self.take_over(state, found[:, :0], None, none)
            credit = jnp.where(credit < PRICE, credit + 1, credit)
            return state, find(state, credit), credit

        def waits(carry: tuple[TokenState, jax.Array, jax.Array]) -> jax.Array:
            state, found, _ = carry
            return jnp.any((found[:, 0] < 0) & ~state.done)

        state, found, credit = lax.while_loop(waits, step, (state, find(state, credit), credit))
        return state, jnp.where(found < 0, self.settings.pad_id, found), credit

    def last(self, state: TokenState) -> jax.Array:
        """The newest token of each row [B, 1], which the model has not read yet."""
        last = lax.dynamic_slice_in_dim(state.ids, state.count - 1, 1, axis=1)
        return jnp.where(last < 0, self.settings.pad_id, last)

    def take_over(
        self, state: TokenState, guesses: jax.Array, guessed: list[jax.Array] | None, counts: Accepted
    ) -> tuple[TokenState, jax.Array, Accepted]:
        """Check the guesses [B, G], which may be none, and take over those that all rows accept and one token more.

        Returns:
            The state, how many guesses were accepted, the counts.
        """
        size = guesses.shape[1]
        logits, cache = self.step(jnp.concatenate([self.last(state), guesses], axis=1), state.cache)[:2]
        if logits.ndim != 3:
            raise ValueError(f"step returned logits {list(logits.shape)}: speculation needs every position, [N, T, V]")
        logits = logits.astype(jnp.float32)
        tokens, possible, agreed = self.check(state, guesses, guessed, logits)
        shared = jnp.min(jnp.where(state.done, size, agreed))
        running = jnp.sum(~state.done, dtype=jnp.int32)
        drafted, accepted = counts.drafted + size * running, counts.accepted + shared * running
        before = state.count
        for i in range(size + 1):
            here = replace(state, count=before + i)
            state = self.settings.record(here, logits[:, i], tokens[:, i], ~state.done & (i <= shared), possible[:, i])
        state = replace(state, cache=self.rewind(cache, size - shared), count=before + shared + 1)
        return state, shared, Accepted(drafted, accepted)

    def guess(
        self, state: TokenState, draft: ModelDraft, drafting: Cache
    ) -> tuple[jax.Array, list[jax.Array] | None, Cache]:
        """G drafted tokens [B, G], the distributions [B, V] they were drawn from (None: certain), the draft's cache."""
        last = self.last(state)
        guesses: list[jax.Array] = []
        guessed: list[jax.Array] = []
        for i in range(self.size):
            logits, drafting = draft.step(last, drafting)[:2]
            logits = (logits if logits.ndim == 2 else logits[:, -1]).astype(jnp.float32)
            scores = self.ruled(state, guesses, logits)
            if self.settings.temperature == 0:
                token = select.first_maximum(scores)
            else:
                scores = self.settings.truncated(scores)
                guessed.append(jax.nn.softmax(scores, axis=-1))
                token = select.draw(scores, self.uniform(state, i, "draft"))
            guesses.append(token)
            last = token[:, None]
        drafting = draft.step(last, drafting)[1]  # so that both caches hold the same tokens
        return jnp.stack(guesses, axis=1), guessed or None, drafting

    def check(
        self, state: TokenState, guesses: jax.Array, guessed: list[jax.Array] | None, logits: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the model chooses if the guesses before are right, whether anything is allowed: both [B, G + 1].

        The third result [B] is how many guesses agree with the choices.
        """
        size = guesses.shape[1]
        tokens: list[jax.Array] = []
        possible: list[jax.Array] = []
        agrees: list[Any] = []
        for i in range(size + 1):
            scores = self.ruled(state, [guesses[:, j] for j in range(i)], logits[:, i])
            guess = guesses[:, i] if i < size else None
            if self.settings.temperature == 0:
                token = select.first_maximum(scores)
                agree = None if guess is None else token == guess
            else:
                draws = guessed[i] if guessed is not None and i < size else None
                token, agree = self.draw(state, i, guess, draws, self.settings.truncated(scores))
            tokens.append(token)
            possible.append(select.take(scores, token) > -jnp.inf)
            agrees.append(agree)
        agreed = jnp.zeros(len(guesses), jnp.int32)
        if size:
            so_far = jnp.cumprod(jnp.stack(agrees[:-1], axis=1), axis=1, dtype=jnp.int32)
            agreed = jnp.sum(so_far, axis=1, dtype=jnp.int32)
        return jnp.stack(tokens, axis=1), jnp.stack(possible, axis=1), agreed

    def draw(
        self, state: TokenState, place: int, guess: jax.Array | None, guessed: jax.Array | None, scores: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """A token with distribution softmax(scores) that equals the guess as often as possible, and where it does."""
        again = self.uniform(state, place, "again")
        if guess is None:
            return select.draw(scores, again), None
        p = jax.nn.softmax(scores, axis=-1)
        q = jax.nn.one_hot(guess, p.shape[-1]) if guessed is None else guessed
        agree = self.uniform(state, place, "accept") * select.take(q, guess) < select.take(p, guess)
        rest = jnp.maximum(p - q, 0.0)
        agree |= jnp.sum(rest, axis=-1) == 0  # rounding: p and q are the same
        return jnp.where(agree, guess, select.draw(jnp.log(rest), again)), agree

    def ruled(self, state: TokenState, guesses: list[jax.Array], logits: jax.Array) -> jax.Array:
        """The logits [B, V] after the rules, the guesses being the newest tokens."""

        def history(vocab_size: int) -> History:
            ids = state.ids
            for i, token in enumerate(guesses):
                ids = lax.dynamic_update_slice_in_dim(ids, token[:, None], state.count + i, axis=1)
            width = state.seen.shape[1]
            tokens = jnp.concatenate([state.seen, ids], axis=1)
            return History(tokens, width + state.count + len(guesses), width, vocab_size, state.limit)

        return adjusted(logits, self.settings.reweight, self.settings.allow, history)

    def uniform(self, state: TokenState, place: int, purpose: str) -> jax.Array:
        """A random number [B] for the token at count + place, another one for each purpose."""
        number = ("draft", "accept", "again").index(purpose)
        fold: Any = partial(jax.random.fold_in, data=(state.count + place) * 3 + number)
        return jax.vmap(lambda key: jax.random.uniform(fold(key), dtype=jnp.float32))(state.keys)


def look_up(tokens: jax.Array, length: jax.Array, ngram: int, size: int) -> jax.Array:
    """What followed the latest earlier occurrence of the last tokens.

    Args:
        tokens: [B, W] int32, -1 where there is none; the first `length` columns are in use.
        length: int32 scalar.
        ngram: how many last tokens to look for; fewer, down to two, where so many do not occur again.
        size: how many tokens to return.

    Returns:
        [B, size] int32, -1 where nothing is known.

    Example:
        >>> look_up(jnp.array([[5, 6, 7, 8, 5, 6, -1, -1]]), jnp.int32(6), 2, 3).tolist()
        [[7, 8, 5]]
    """
    width = tokens.shape[1]
    columns = jnp.arange(width, dtype=jnp.int32)
    best = jnp.full(len(tokens), -1, jnp.int32)  # where the continuation starts
    for n in range(min(LEAST, ngram), min(ngram, width - 1) + 1):
        same = jnp.ones(tokens.shape, bool)  # the n tokens before each column are the last n
        for i in range(1, n + 1):
            last = lax.dynamic_index_in_dim(tokens, jnp.maximum(length - i, 0), axis=1)
            before = jnp.pad(tokens, ((0, 0), (i, 0)), constant_values=-1)[:, :width]
            same &= (before == last) & (last >= 0) & (length >= i)
        start = jnp.max(jnp.where(same & (columns < length), columns, -1), axis=1)
        best = jnp.where(start >= 0, start, best)
    places = best[:, None] + jnp.arange(size)
    known = (best[:, None] >= 0) & (places < width)
    return jnp.where(known, jnp.take_along_axis(tokens, jnp.minimum(places, width - 1), axis=1), NOTHING)
