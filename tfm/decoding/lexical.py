"""Lexically constrained beam search: given phrases must occur in the output."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding.beam import Beam, BeamState
from tfm.decoding.loop import Allow, Reweight
from tfm.decoding.state import NOTHING, Cache, History, Hypotheses, Step, eos_ids, is_eos


def matched(tokens: jax.Array, length: jax.Array, phrases: jax.Array) -> jax.Array:
    """How many tokens of each phrase are there: all if it occurs, else those with which the text ends.

    Args:
        tokens: [B, K, L] int32, the first `length` columns being in use.
        length: int32 scalar.
        phrases: [B, C, W] int32, -1 behind the end of shorter ones and in place of missing ones.

    Returns:
        [B, K, C] int32.

    Example:
        >>> matched(jnp.array([[[5, 6, 7, -1]]]), jnp.int32(3), jnp.array([[[5, 6], [7, 8], [6, -1]]])).tolist()
        [[[2, 1, 1]]]
    """
    size, width = tokens.shape[-1], phrases.shape[-1]
    windows = jnp.arange(size)[:, None] + jnp.arange(width)
    padded = jnp.pad(tokens, ((0, 0), (0, 0), (0, width)), constant_values=NOTHING)
    wanted = phrases[:, None, None]  # [B, 1, 1, C, W]
    same = (padded[:, :, windows][..., None, :] == wanted) & (wanted >= 0)  # [B, K, L, C, W]
    run = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=-1), axis=-1)  # tokens that agree from each place on
    whole = jnp.sum(phrases >= 0, axis=-1)[:, None]
    at_end = jnp.where(jnp.arange(size)[:, None] + run == length, run, 0)
    return jnp.where(jnp.any(run == whole[:, :, None], axis=2), whole, jnp.max(at_end, axis=2))


@dataclass(frozen=True, eq=False)
class Contains:
    """An allowing rule: no end before each phrase of the row has occurred; phrases as in `matched`."""

    phrases: jax.Array
    eos_ids: tuple[int, ...]

    def __call__(self, history: History) -> jax.Array:
        batch = len(self.phrases)
        generated = history.tokens[:, history.prompt_length :]
        tokens = generated.reshape(batch, -1, generated.shape[1])
        found = matched(tokens, history.length - history.prompt_length, self.phrases)
        complete = jnp.all(found == jnp.sum(self.phrases >= 0, axis=-1)[:, None], axis=-1).reshape(-1, 1)
        return complete | ~is_eos(jnp.arange(history.vocab_size), self.eos_ids)


@dataclass(frozen=True, eq=False)
class LexicalBeam(Beam):
    """Settings: the beam is shared out among hypotheses by how many tokens of the phrases they have."""

    phrases: jax.Array = None  # type: ignore[assignment]

    def _continue(
        self, state: BeamState, scores: jax.Array, log_z: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Take turns between the numbers of matched tokens, most first; each turn takes the best of its number."""
        batch, width = state.live.scores.shape
        ids, log_probs = self._with_phrases(state, scores, log_z)
        sums = (state.live.scores[..., None] + log_probs.reshape(batch, width, -1)).reshape(batch, -1)
        tokens = ids.reshape(batch, -1)
        parents = jnp.broadcast_to(jnp.arange(sums.shape[1]) // log_probs.shape[-1], sums.shape)
        short = max(0, self.beam_size - sums.shape[1])
        sums = jnp.pad(sums, ((0, 0), (0, short)), constant_values=-jnp.inf)
        tokens, parents = (jnp.pad(x, ((0, 0), (0, short))) for x in (tokens, parents))
        sums, order = lax.top_k(sums, sums.shape[1])
        tokens, parents = (jnp.take_along_axis(x, order, axis=1) for x in (tokens, parents))
        met = self._matched_after(state, parents, tokens)
        most = self.phrases.shape[1] * self.phrases.shape[2]
        exists = sums > -jnp.inf
        bank = jax.nn.one_hot(jnp.where(exists, met, -1), most + 1, dtype=jnp.int32)
        turn = jnp.sum(jnp.cumsum(bank, axis=1) * bank, axis=-1)  # the how manieth of its number
        rank = jnp.where(exists, -(turn * (most + 1) + most - met), jnp.iinfo(jnp.int32).min)
        _, chosen = lax.top_k(rank, self.beam_size)
        chosen = jnp.sort(chosen, axis=1)  # best first
        tokens, parents, sums = (jnp.take_along_axis(x, chosen, axis=1) for x in (tokens, parents, sums))
        return tokens, parents, sums

    def _may_end(self, sums: jax.Array, continued: jax.Array) -> jax.Array:
        """Whatever has all phrases may end: what is better is so, as a rule, for lack of them."""
        return jnp.ones(sums.shape, bool)

    def _with_phrases(self, state: BeamState, scores: jax.Array, log_z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The usual candidates and, for each phrase, the token that begins it and the one that goes on with it."""
        batch, width = state.live.scores.shape
        ids, log_probs = self._candidates(scores, log_z)
        found = matched(state.live.ids, state.count, self.phrases)
        last = self.phrases.shape[-1] - 1
        wanted = jnp.broadcast_to(self.phrases[:, None], (batch, width, *self.phrases.shape[1:]))
        following = jnp.take_along_axis(wanted, jnp.minimum(found, last)[..., None], axis=-1)[..., 0]
        extra = jnp.concatenate([following, wanted[..., 0]], axis=-1).reshape(batch * width, -1)
        gains = jnp.minimum(jnp.take_along_axis(scores, jnp.maximum(extra, 0), axis=1) - log_z[:, None], 0.0)
        everything = jnp.concatenate([ids, extra], axis=1)
        earlier = jnp.tril(everything[:, :, None] == everything[:, None], -1).any(-1)[:, ids.shape[1] :]
        gains = jnp.where((extra < 0) | earlier | is_eos(extra, self.eos_ids), -jnp.inf, gains)
        return jnp.maximum(everything, 0), jnp.concatenate([log_probs, gains], axis=1)

    def _matched_after(self, state: BeamState, parents: jax.Array, tokens: jax.Array) -> jax.Array:
        """Number of phrase tokens that each candidate has, [B, C]."""
        texts = jnp.take_along_axis(state.live.ids, parents[..., None], axis=1)
        texts = lax.dynamic_update_slice_in_dim(texts, tokens[..., None], state.count, axis=2)
        return jnp.sum(matched(texts, state.count + 1, self.phrases), axis=-1)


def lexical_beam_search(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    *,
    phrases: jax.Array,
    beam_size: int = 8,
    alpha: float = 0.6,
    max_length: jax.typing.ArrayLike,
    eos_id: int | Sequence[int] | None,
    n_best: int = 1,
    pad_id: int = 0,
    seen: jax.Array | None = None,
    buffer_length: int | None = None,
    prefill_chunk: int | None = None,
    reweight: Sequence[Reweight] = (),
    allow: Sequence[Allow] = (),
) -> Hypotheses:
    """Beam search for hypotheses in which every phrase occurs.

    A hypothesis may end only when it has all phrases of its row. The beam is shared out evenly among hypotheses by the
    number of phrase tokens they have, so that those that have many, at first improbable, survive.

    Args:
        step, cache, prompt, alpha, max_length, eos_id, n_best, pad_id, seen, buffer_length, prefill_chunk, reweight,
            allow: as in `beam_search`.
        phrases: [B, C, W] int32, C phrases a row of up to W tokens, -1 behind the end of shorter ones and throughout
            missing ones.
        beam_size: beams of a row; at least 2.

    Returns:
        Hypotheses, which unpack as ids [B, n_best, L], scores, finished [B, n_best]. One that is unfinished may lack
        phrases.

    Raises:
        ValueError: phrases do not fit the prompt, or another option is out of range.

    Reference: Post and Vilar, 2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation", section 3.
    """
    phrases = jnp.asarray(phrases, jnp.int32)
    if phrases.ndim != 3 or len(phrases) != len(prompt):
        raise ValueError(
            f"phrases has shape {list(phrases.shape)}: expected [B, C, W] for {len(prompt)} rows of prompt"
        )
    if beam_size < 2:
        raise ValueError(f"beam_size is {beam_size}: phrases need at least 2, one to have them and one to find them")
    ends = eos_ids(eos_id)
    rules: tuple[Allow, ...] = (*allow, Contains(phrases, ends))
    search = LexicalBeam(ends, pad_id, alpha, tuple(reweight), rules, beam_size, n_best, phrases=phrases)
    options = dict(max_length=max_length, buffer_length=buffer_length, seen=seen, prefill_chunk=prefill_chunk)
    return search.run(step, cache, prompt, **options)
