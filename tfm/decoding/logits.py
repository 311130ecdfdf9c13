"""Rules about the next token: what changes its score, and what forbids it.

A reweighting rule is a function (logits [N, V], History) -> logits; an allowing rule is a function History -> bool
[N, V] or [1, V], True where a token may come next. Those here are frozen dataclasses: equal settings are equal values,
so a compiled search can be looked up by them. Any function of the same form will do as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding.state import History, is_eos


def counts(tokens: jax.Array, vocab_size: int) -> jax.Array:
    """How often each id occurs: tokens [N, W] int32, -1 being none -> [N, V] float32.

    Example:
        >>> counts(jnp.array([[0, 2, 2, -1]]), 3).tolist()
        [[1.0, 0.0, 2.0]]
    """
    rows = jnp.arange(len(tokens))[:, None]
    places = jnp.where(tokens < 0, vocab_size, tokens)
    return jnp.zeros((len(tokens), vocab_size), jnp.float32).at[rows, places].add(1.0, mode="drop")


def _among(ids: tuple[int, ...], vocab_size: int) -> jax.Array:
    """bool [1, V], True at ids."""
    return is_eos(jnp.arange(vocab_size), ids)[None]


def _generated(history: History) -> jax.Array:
    return history.tokens[:, history.prompt_length :]


def _count(history: History) -> jax.Array:
    """Number of generated tokens."""
    return history.length - history.prompt_length


# Reweighting rules -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divide the positive and multiply the negative logits of tokens seen before, in the prompt too, by penalty.

    Reference: Keskar et al., 2019, "CTRL", section 4.1.
    """

    penalty: float

    def __post_init__(self) -> None:
        if self.penalty <= 0:
            raise ValueError(f"repetition_penalty is {self.penalty}: expected more than 0; 1 changes nothing")

    def __call__(self, logits: jax.Array, history: History) -> jax.Array:
        seen = counts(history.tokens, history.vocab_size) > 0
        changed = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return jnp.where(seen, changed, logits)


@dataclass(frozen=True)
class CountPenalty:
    """Subtract `presence` from the logit of each token generated before, and `frequency` for each time it was."""

    presence: float = 0.0
    frequency: float = 0.0

    def __call__(self, logits: jax.Array, history: History) -> jax.Array:
        times = counts(_generated(history), history.vocab_size)
        return logits - self.frequency * times - self.presence * (times > 0)


@dataclass(frozen=True)
class LogitBias:
    """Add a number to the logits of some ids: pairs (id, bias)."""

    biases: tuple[tuple[int, float], ...]

    def __call__(self, logits: jax.Array, history: History) -> jax.Array:
        ids, biases = zip(*self.biases, strict=True)
        return logits.at[:, jnp.array(ids)].add(jnp.array(biases, jnp.float32))


@dataclass(frozen=True)
class Forced:
    """The first new tokens are `first`, and the last one that a row has room for is one of `last`.

    Their logits become 0 and all others -inf, so that what is forced costs a hypothesis nothing (`ForceFirst` counts
    what the model thinks of it).
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    def __call__(self, logits: jax.Array, history: History) -> jax.Array:
        count = _count(history)
        if self.first:
            forced = jnp.array(self.first)[jnp.minimum(count, len(self.first) - 1)]
            only = jnp.where(jnp.arange(history.vocab_size) == forced, 0.0, -jnp.inf)
            logits = jnp.where(count < len(self.first), only, logits)
        if self.last and history.limit is not None:
            only = jnp.where(_among(self.last, history.vocab_size), 0.0, -jnp.inf)
            logits = jnp.where((count == history.limit - 1)[:, None], only, logits)
        return logits

    def applies(self, history: History) -> jax.Array:
        """Where a token is forced: bool [N or 1, 1]."""
        count = _count(history)
        at_first = (count < len(self.first)).reshape(1, 1)
        return at_first if not self.last or history.limit is None else at_first | (count == history.limit - 1)[:, None]


# Allowing rules ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnlessForced:
    """An allowing rule that does not hold where a token is forced."""

    rule: Callable[[History], jax.Array]
    forced: Forced

    def __call__(self, history: History) -> jax.Array:
        return self.rule(history) | self.forced.applies(history)


@dataclass(frozen=True)
class Suppress:
    """Never these ids."""

    ids: tuple[int, ...]

    def __call__(self, history: History) -> jax.Array:
        return ~_among(self.ids, history.vocab_size)


@dataclass(frozen=True)
class SuppressFirst:
    """None of these ids as the first new token, or as the one behind `after` new tokens."""

    ids: tuple[int, ...]
    after: int = 0

    def __call__(self, history: History) -> jax.Array:
        return (_count(history) != self.after) | ~_among(self.ids, history.vocab_size)


@dataclass(frozen=True)
class BelowSize:
    """Only ids below size: the rows that pad a vocabulary are never drawn."""

    size: int

    def __call__(self, history: History) -> jax.Array:
        return (jnp.arange(history.vocab_size) < self.size)[None]


@dataclass(frozen=True)
class MinLength:
    """At least `length` new tokens before any of eos_ids; with `prompt`, those of the prompt count too."""

    length: int
    eos_ids: tuple[int, ...]
    prompt: bool = False

    def __call__(self, history: History) -> jax.Array:
        count = _count(history)
        if self.prompt:
            count = count + jnp.sum(history.tokens[:, : history.prompt_length] >= 0, axis=1, keepdims=True)
        return (count >= self.length) | ~_among(self.eos_ids, history.vocab_size)


@dataclass(frozen=True)
class ForceFirst:
    """The first new tokens are these ids, in every row."""

    ids: tuple[int, ...]

    def __call__(self, history: History) -> jax.Array:
        count = _count(history)
        forced = jnp.array(self.ids)[jnp.minimum(count, len(self.ids) - 1)]
        return ((count >= len(self.ids)) | (jnp.arange(history.vocab_size) == forced))[None]


@dataclass(frozen=True, eq=False)
class ForcePrefix:
    """The first new tokens of each row are given: tokens [B, Q] int32, -1 behind the end of the shorter ones."""

    tokens: jax.Array

    def __call__(self, history: History) -> jax.Array:
        rows = jnp.repeat(self.tokens, len(history.tokens) // len(self.tokens), axis=0)
        count, size = _count(history), rows.shape[1]
        forced = lax.dynamic_index_in_dim(rows, jnp.minimum(count, size - 1), axis=1)
        return (count >= size) | (forced < 0) | (jnp.arange(history.vocab_size) == forced)


@dataclass(frozen=True, eq=False)
class OneOf:
    """The new tokens spell one of the given sequences: sequences [C, W] int32, EOS included, -1 behind the end.

    Reference: De Cao et al., 2021, "Autoregressive Entity Retrieval", section 3.2.
    """

    sequences: jax.Array

    def __call__(self, history: History) -> jax.Array:
        generated, count = _generated(history), _count(history)
        width = min(generated.shape[1], self.sequences.shape[1])
        same = generated[:, None, :width] == self.sequences[None, :, :width]
        fits = jnp.all(same | (jnp.arange(width) >= count), axis=-1)  # [N, C]
        following = lax.dynamic_index_in_dim(
            self.sequences, jnp.minimum(count, self.sequences.shape[1] - 1), axis=1, keepdims=False
        )
        fits &= count < self.sequences.shape[1]
        return counts(jnp.where(fits, following, -1), history.vocab_size) > 0


@dataclass(frozen=True)
class NoRepeatNgram:
    """No n tokens in a row occur twice, the prompt included.

    Reference: Paulus, Xiong and Socher, 2018, "A Deep Reinforced Model for Abstractive Summarization", section 2.5.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"no_repeat_ngram is {self.size}: expected at least 1")

    def __call__(self, history: History) -> jax.Array:
        tokens, head = history.tokens, self.size - 1
        windows = tokens.shape[1] - head
        if windows < 1:
            return jnp.ones((1, history.vocab_size), bool)
        tail = _tail(history, head)
        repeats = jnp.ones((len(tokens), windows), bool)
        for i in range(head):
            repeats &= tokens[:, i : i + windows] == jnp.where(tail[:, i] < 0, -2, tail[:, i])[:, None]
        following = tokens[:, head:]
        return counts(jnp.where(repeats, following, -1), history.vocab_size) == 0


@dataclass(frozen=True)
class BadWords:
    """None of these sequences of ids: the last id of one is not allowed after the others, the prompt's included."""

    words: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not all(self.words):
            raise ValueError("bad_words holds an empty sequence: expected at least one id in each")

    def __call__(self, history: History) -> jax.Array:
        allowed = ~_among(tuple(word[0] for word in self.words if len(word) == 1), history.vocab_size)
        for word in self.words:
            if 1 < len(word) <= history.tokens.shape[1]:
                spelled = jnp.all(_tail(history, len(word) - 1) == jnp.array(word[:-1]), axis=-1)
                allowed = allowed & ~(spelled[:, None] & _among(word[-1:], history.vocab_size))
        return allowed


def _tail(history: History, size: int) -> jax.Array:
    """The last `size` tokens [N, size], -1 where there are not so many."""
    padded = jnp.pad(history.tokens, ((0, 0), (size, 0)), constant_values=-1)
    return lax.dynamic_slice_in_dim(padded, history.length, size, axis=1)
