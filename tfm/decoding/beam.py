"""Beam search: keep the K most probable beginnings of each row, and stop when none of them can still win.

At every step each live hypothesis may end or go on. The K best continuations are the next beam; an ending counts where
it is among the K best of all candidates, endings and continuations, and then competes for the row's n best results.
Without that rule an improbable empty output could win by its shortness alone. Log-probabilities never rise, so a live
hypothesis with the sum s can at best reach s / length_penalty(limit): the row stops when its n-th best result is at
least that, or at its limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding import select
from tfm.decoding.greedy import Greedy
from tfm.decoding.loop import Allow, Reweight, adjusted
from tfm.decoding.state import (
    NOTHING,
    Cache,
    History,
    Hypotheses,
    Step,
    check_prompt,
    check_vocabulary,
    eos_ids,
    gather_beams,
    is_eos,
    last_logits,
    length_penalty,
    prefill,
    row_limits,
    take_rows,
    tile,
    write_column,
)

Spread = Callable[[Cache, int], Cache]  # cache of B rows, K -> cache of K equal beams a row
Reorder = Callable[[Cache, jax.Array], Cache]  # cache of K beams a row, parents [B, K] -> cache


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "log_probs", "scores"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Beams:
    """Some hypotheses of each row: ids and log_probs [B, K, L], scores [B, K]; -inf where there is none."""

    ids: jax.Array
    log_probs: jax.Array
    scores: jax.Array

    def take(self, beams: jax.Array, scores: jax.Array) -> "Beams":
        """The hypotheses numbered beams [B, J], with new scores [B, J]."""
        ids, log_probs = (jnp.take_along_axis(x, beams[..., None], axis=1) for x in (self.ids, self.log_probs))
        return Beams(ids, log_probs, scores)

    def append(self, tokens: jax.Array, log_probs: jax.Array, place: jax.Array) -> "Beams":
        """Add one token to each: tokens and log_probs [B, K]."""
        return replace(
            self, ids=write_column(self.ids, tokens, place), log_probs=write_column(self.log_probs, log_probs, place)
        )

    def best(self, n: int, other: "Beams") -> "Beams":
        """The n best of these and the others, these first where scores are equal."""
        both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), self, other)
        return both.take(*lax.top_k(both.scores, n)[::-1])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "seen", "live", "ended", "count", "limit", "done", "attended", "source_mask"],
    meta_fields=[],
)
@dataclass(frozen=True)
class BeamState:
    """The loop's carry.

    Attributes:
        cache: of K beams a row, as `spread` and `reorder` keep them: leaves [B * K, ...] by default.
        seen: [B, W] int32, the text before the new tokens.
        live: K unfinished hypotheses a row, scored by their summed log-probability.
        ended: the n best finished ones, best first, scored with the length penalty.
        count: int32, number of tokens of the live ones.
        limit: [B] int32.
        done: [B] bool; what a row has found is frozen then.
        attended: [B, K, S] float32, summed attention to the source; None without a coverage penalty.
        source_mask: [B, S] bool, likewise.
    """

    cache: Cache
    seen: jax.Array
    live: Beams
    ended: Beams
    count: jax.Array
    limit: jax.Array
    done: jax.Array
    attended: jax.Array | None = None
    source_mask: jax.Array | None = None


@dataclass(frozen=True)
class Beam:
    """Settings of beam search, as `start`, `advance` and `result` over a state."""

    eos_ids: tuple[int, ...]
    pad_id: int = 0
    alpha: float = 0.6
    reweight: tuple[Reweight, ...] = ()
    allow: tuple[Allow, ...] = ()
    beam_size: int = 4
    n_best: int = 1
    spread: Spread = tile
    reorder: Reorder = gather_beams
    coverage: float = 0.0

    def __post_init__(self) -> None:
        if self.n_best < 1 or self.beam_size < self.n_best:
            raise ValueError(f"beam_size is {self.beam_size}, n_best {self.n_best}: expected beam_size >= n_best >= 1")
        if self.coverage < 0:
            raise ValueError(f"coverage is {self.coverage}: expected 0 or more")
        if self.coverage and self.beam_size == 1:
            raise ValueError(f"coverage is {self.coverage} and beam_size 1, which is greedy search: expected 2 or more")

    @property
    def kept(self) -> int:
        """Number of finished hypotheses that a row keeps."""
        return self.n_best

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
        source_mask: jax.Array | None = None,
    ) -> BeamState:
        """Feed the prompt once a row and choose the first beam."""
        prompt, known = check_prompt(prompt, seen)
        limit, length = row_limits(max_length, buffer_length, prompt.shape[0])
        logits, cache, *rest = prefill(step, cache, prompt, prefill_chunk)
        check_vocabulary(self.eos_ids, logits)
        weights = self._weights(rest, source_mask)
        state = BeamState(
            cache=self.spread(cache, self.beam_size),
            seen=known,
            live=_empty(jnp.where(limit < 1, -jnp.inf, 0.0)[:, None], length),
            ended=_empty(jnp.full((len(prompt), self.kept), -jnp.inf, jnp.float32), length),
            count=jnp.int32(0),
            limit=limit,
            done=limit < 1,
            attended=None if weights is None else jnp.zeros((len(prompt), 1, weights.shape[-1]), jnp.float32),
            source_mask=None if weights is None else source_mask,
        )
        return self._grow(state, last_logits(logits), weights)[0]

    def advance(self, step: Step, state: BeamState, until: jax.typing.ArrayLike) -> BeamState:
        """Go on until the live hypotheses have `until` tokens or every row is done."""

        def body(state: BeamState) -> BeamState:
            token = lax.dynamic_slice_in_dim(state.live.ids, state.count - 1, 1, axis=2).reshape(-1, 1)
            logits, cache, *rest = step(jnp.where(token < 0, self.pad_id, token), state.cache)
            state, parents = self._grow(state, last_logits(logits), self._weights(rest, state.source_mask))
            return replace(state, cache=self.reorder(cache, parents))

        return lax.while_loop(lambda s: (s.count < until) & ~jnp.all(s.done), body, state)

    def result(self, state: BeamState) -> Hypotheses:
        """The n best so far: finished ones first, then live ones; each kind best first."""
        lengths = jnp.sum(state.live.ids >= 0, axis=-1, dtype=jnp.int32)
        live = replace(state.live, scores=self._score(state.live.scores, lengths))
        live = live.take(*lax.top_k(live.scores, self.n_best)[::-1])
        finished = state.ended.scores > -jnp.inf
        places = jnp.arange(self.n_best) - jnp.sum(finished, axis=-1, keepdims=True)
        live = live.take(jnp.maximum(places, 0), jnp.take_along_axis(live.scores, jnp.maximum(places, 0), axis=1))
        found = jax.tree.map(
            lambda x, y: jnp.where(finished.reshape(*finished.shape, *[1] * (x.ndim - 2)), x, y), state.ended, live
        )
        exists = (found.scores > -jnp.inf)[..., None]
        ids = jnp.where(exists, found.ids, NOTHING)
        return Hypotheses(
            ids=jnp.where(ids < 0, self.pad_id, ids),
            scores=found.scores,
            finished=finished,
            lengths=jnp.sum(ids >= 0, axis=-1, dtype=jnp.int32),
            log_probs=jnp.where(exists, found.log_probs, 0.0),
        )

    def keep_rows(self, state: BeamState, rows: jax.Array) -> BeamState:
        """The state of the given rows only."""
        by_row = replace(state, count=jnp.broadcast_to(state.count, state.limit.shape))
        return replace(take_rows(by_row, rows, len(state.limit)), count=state.count)

    def run(self, step: Step, cache: Cache, prompt: jax.Array, **options: object) -> Hypotheses:
        """`start`, `advance` to the end, `result`."""
        state = self.start(step, cache, prompt, **options)  # type: ignore[arg-type]
        return self.result(self.advance(step, state, state.live.ids.shape[-1]))

    def _weights(self, rest: list[jax.Array], source_mask: jax.Array | None) -> jax.Array | None:
        """The attention weights [N, S] that a step returned, where the coverage penalty needs them."""
        if not self.coverage:
            return None
        if not rest or source_mask is None:
            raise ValueError(
                f"coverage is {self.coverage}: it needs source_mask, and a step that returns (logits, cache, "
                "attention weights [N, S])"
            )
        return rest[0].astype(jnp.float32)

    def _grow(self, state: BeamState, logits: jax.Array, weights: jax.Array | None) -> tuple[BeamState, jax.Array]:
        """One more token for each live hypothesis; logits [B * J, V]. Also the parents [B, K] among the J."""
        batch, width = state.live.scores.shape
        log_z = select.log_sum_exp(logits)
        changed, changed_z = self._reweighted(state, logits, log_z)
        allowed = adjusted(changed, (), self.allow, partial(_history, state))
        if weights is not None and state.attended is not None:
            state = replace(state, attended=state.attended + weights.reshape(batch, width, -1))

        def own(beams: jax.Array, tokens: jax.Array) -> jax.Array:  # the model's log-probabilities; all [B, C]
            places = beams * logits.shape[-1] + tokens
            chosen = jnp.take_along_axis(logits.reshape(batch, -1), places, axis=1)
            return chosen - jnp.take_along_axis(log_z.reshape(batch, -1), beams, axis=1)

        tokens, parents, sums = self._continue(state, allowed, changed_z)
        ended = self._end(state, allowed, changed_z, (tokens, parents, sums), own)
        live = state.live.take(parents, sums).append(tokens, own(parents, tokens), state.count)
        count = state.count + 1
        # Where nothing has ended and no token is possible, what there is stays as it is.
        stuck = jnp.all(live.scores == -jnp.inf, axis=-1) & (ended.scores[:, 0] == -jnp.inf)
        enough = self._enough(state, live, ended)
        new = replace(
            state,
            live=_where(state.done | stuck, state.live, live) if width == live.scores.shape[1] else live,
            ended=_where(state.done, state.ended, ended),
            attended=jax.tree.map(lambda x: jnp.take_along_axis(x, parents[..., None], axis=1), state.attended),
            count=count,
            done=state.done | self._settled(enough | stuck) | (count >= state.limit),
        )
        return new, parents

    def _reweighted(self, state: BeamState, logits: jax.Array, log_z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The logits after the reweighting rules, and what makes log-probabilities of them; log_z: of the logits."""
        changed = adjusted(logits, self.reweight, (), partial(_history, state))
        return changed, select.log_sum_exp(changed) if self.reweight else log_z

    def _enough(self, state: BeamState, live: Beams, ended: Beams) -> jax.Array:
        """The rows [B] whose finished hypotheses no live one can pass any more; `state` is that before this token."""
        # The best a live hypothesis can reach: its sum over the penalty of the limit (of the next length if alpha < 0).
        largest = jnp.maximum(length_penalty(state.limit, self.alpha), length_penalty(state.count + 2, self.alpha))
        return ended.scores[:, -1] >= jnp.max(live.scores, axis=-1) / largest

    def _score(self, sums: jax.Array, length: jax.Array) -> jax.Array:
        """What hypotheses are compared by, from their summed log-probabilities and lengths."""
        return sums / length_penalty(length, self.alpha)

    def _settled(self, enough: jax.Array) -> jax.Array:
        """The rows [B] that may stop, given those whose results cannot change any more."""
        return enough

    def _continue(
        self, state: BeamState, scores: jax.Array, log_z: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The next beam: tokens, parents and sums [B, K] from the scores [B * J, V] of what is allowed."""
        return best_continuations(state.live.scores, *self._candidates(scores, log_z), self.beam_size)

    def _candidates(self, scores: jax.Array, log_z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each row of scores [N, V] the best tokens that do not end it: ids and log-probabilities [N, C]."""
        size = min(self.beam_size + len(self.eos_ids), scores.shape[-1])
        values, ids = select.top_k(scores, size)
        values = jnp.where(is_eos(ids, self.eos_ids), -jnp.inf, values)
        return ids, jnp.minimum(values - log_z[:, None], 0.0)

    def _end(
        self,
        state: BeamState,
        scores: jax.Array,
        log_z: jax.Array,
        continued: tuple[jax.Array, jax.Array, jax.Array],
        own: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> Beams:
        """The n best finished hypotheses, with those that end now; continued: the next beam as `_continue` gives it."""
        if not self.eos_ids:
            return state.ended
        tokens, beams, sums = self._endings(state, scores, log_z)
        sums, ends = jnp.where(self._may_end(sums, continued[2]), sums, -jnp.inf), len(self.eos_ids)
        scores = self._score(sums, state.count + 1)
        if state.attended is not None and state.source_mask is not None:
            scores += jnp.repeat(self.coverage * coverage_penalty(state.attended, state.source_mask), ends, axis=1)
        ended = state.live.take(beams, scores).append(tokens, own(beams, tokens), state.count)
        return state.ended.best(self.n_best, ended)

    def _endings(
        self, state: BeamState, scores: jax.Array, log_z: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Every live hypothesis with every id that may end it: tokens, hypotheses and sums [B, J * E]."""
        (batch, width), ends = state.live.scores.shape, len(self.eos_ids)
        beams = jnp.broadcast_to(jnp.repeat(jnp.arange(width), ends), (batch, width * ends))
        tokens = jnp.broadcast_to(jnp.tile(jnp.array(self.eos_ids, jnp.int32), width), beams.shape)
        gains = jnp.minimum(scores[:, jnp.array(self.eos_ids, jnp.int32)] - log_z[:, None], 0.0)
        sums = (state.live.scores[..., None] + gains.reshape(batch, width, ends)).reshape(batch, -1)
        return tokens, beams, sums

    def _may_end(self, sums: jax.Array, continued: jax.Array) -> jax.Array:
        """Where an ending [B, J * E] is among the K most probable of all candidates, endings and continuations."""
        better = jnp.sum(continued[:, None, :] > sums[..., None], axis=-1)
        better += jnp.sum(sums[:, None, :] > sums[..., None], axis=-1)
        return better < self.beam_size


def best_continuations(
    live: jax.Array, ids: jax.Array, log_probs: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `size` candidates with the largest sums: live [B, J], ids and log_probs [B * J, C] -> three times [B, size].

    Returns:
        Tokens, the numbers of their hypotheses, and the sums, -inf where there are fewer candidates.
    """
    batch, width = live.shape
    sums = (live[..., None] + log_probs.reshape(batch, width, -1)).reshape(batch, -1)
    ids = ids.reshape(batch, -1)
    short = max(0, size - sums.shape[1])
    best, place = lax.top_k(jnp.pad(sums, ((0, 0), (0, short)), constant_values=-jnp.inf), size)
    place = jnp.minimum(place, sums.shape[1] - 1)
    return jnp.take_along_axis(ids, place, axis=1), place // log_probs.shape[-1], best


def coverage_penalty(attended: jax.Array, mask: jax.Array) -> jax.Array:
    """sum_i log(min(sum_j p_ij, 1)): how much of the source the translation has attended to, at best 0.

    Args:
        attended: [B, K, S] float32, attention that each source token got, summed over the target.
        mask: [B, S] bool, True on real source tokens.

    Returns:
        [B, K] float32.

    Reference: Wu et al., 2016, "Google's Neural Machine Translation System", equation 14.
    """
    covered = jnp.log(jnp.clip(attended, jnp.finfo(jnp.float32).tiny, 1.0))
    return jnp.sum(jnp.where(mask[:, None], covered, 0.0), axis=-1)


def _empty(scores: jax.Array, length: int) -> Beams:
    """Hypotheses without tokens of the given scores [B, K]."""
    shape = (*scores.shape, length)
    return Beams(jnp.full(shape, NOTHING, jnp.int32), jnp.zeros(shape, jnp.float32), scores)


def _where(rows: jax.Array, old: Beams, new: Beams) -> Beams:
    """Old hypotheses in the given rows [B], new ones elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y), old, new)


def _history(state: BeamState, vocab_size: int) -> History:
    batch, width, _ = state.live.ids.shape
    prompt_length = state.seen.shape[1]
    prompt = jnp.broadcast_to(state.seen[:, None], (batch, width, prompt_length))
    tokens = jnp.concatenate([prompt, state.live.ids], axis=-1).reshape(batch * width, -1)
    limit = jnp.repeat(state.limit, width)
    return History(tokens, prompt_length + state.count, prompt_length, vocab_size, limit)


def beam_search(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    *,
    beam_size: int = 4,
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
    spread: Spread = tile,
    reorder: Reorder = gather_beams,
    coverage: float = 0.0,
    source_mask: jax.Array | None = None,
) -> Hypotheses:
    """Search the n hypotheses Y with the largest log p(Y) / length_penalty(|Y|), keeping beam_size beginnings.

    A row stops exactly when no unfinished hypothesis can still enter its n best, or at its limit. With beam_size 1 it
    is greedy search.

    Args:
        step: (tokens [N, T] int32, cache) -> (logits [N, T, V] or [N, V], cache); N is B for the prompt and
            B * beam_size afterwards, the beams of a row being neighbours.
        cache: pytree, every leaf [B, ...].
        prompt: [B, P] int, fed before the first choice (a column of BOS for an encoder-decoder).
        beam_size: number K of beginnings kept.
        alpha: exponent of the length penalty.
        n_best: number of hypotheses returned, at most beam_size.
        max_length, eos_id, pad_id, seen, buffer_length, prefill_chunk: as in `greedy`.
        reweight: as in `greedy`; the search ranks by the log-probabilities after these.
        allow: as in `greedy`; what is not allowed is left out, the scores of the rest stay the model's.
        spread: (cache of the B prompts, K) -> cache of K equal beams a row. By default every leaf is repeated, [B * K,
            ...].
        reorder: (cache, parents [B, K]) -> cache in which beam k of row b goes on from its beam parents[b, k]. By
            default every leaf is gathered.
        coverage: weight of the coverage penalty that is added to the scores of finished hypotheses. Above 0 it needs a
            step that returns (logits, cache, attention weights [N, S] of the last position), and source_mask.
        source_mask: [B, S] bool, True on real source tokens.

    Returns:
        Hypotheses, which unpack as ids [B, n_best, L], scores [B, n_best], finished [B, n_best]: all distinct, finished
        ones first, each kind best first. Those cut off at the limit follow where fewer than n_best finished; where not
        even these suffice, the rest has score -inf and length 0. Where nothing finished and the rules allow no further
        token, what there is counts as cut off.

    Raises:
        ValueError: for a prompt, limit or beam size that does not fit.

    Example:
        >>> def step(tokens, cache):  # 1 and 2 follow anything, 2 being the end
        ...     return jnp.log(jnp.array([0.0, 0.6, 0.4])) + jnp.zeros((*tokens.shape, 1)), cache
        >>> options = {"beam_size": 2, "alpha": 0.0, "max_length": 3, "eos_id": 2, "n_best": 2}
        >>> search = jax.jit(lambda prompt: beam_search(step, None, prompt, **options))
        >>> ids, scores, finished = search(jnp.array([[1]]))
        >>> ids.tolist(), bool(jnp.allclose(jnp.exp(scores), jnp.array([[0.4, 0.24]])))
        ([[[2, 0, 0], [1, 2, 0]]], True)

    Reference: Wu et al., 2016, "Google's Neural Machine Translation System", section 7.
    """
    options = dict(max_length=max_length, buffer_length=buffer_length, seen=seen, prefill_chunk=prefill_chunk)
    ends, reweight, allow = eos_ids(eos_id), tuple(reweight), tuple(allow)
    search = Beam(ends, pad_id, alpha, reweight, allow, beam_size, n_best, spread, reorder, coverage)
    if beam_size > 1:
        return search.run(step, cache, prompt, source_mask=source_mask, **options)
    found = Greedy(ends, pad_id, alpha, reweight, allow).run(step, cache, prompt, **options)
    return jax.tree.map(lambda x: x[:, None], found)
