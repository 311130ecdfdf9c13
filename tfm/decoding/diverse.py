"""Diverse beam search: groups of beams that avoid each other's words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tfm.decoding.beam import Beam, BeamState, best_continuations
from tfm.decoding.logits import counts
from tfm.decoding.loop import Allow, Reweight
from tfm.decoding.state import Cache, Hypotheses, Step, eos_ids, row_limits, tile


@dataclass(frozen=True)
class DiverseBeam(Beam):
    """Settings of one group, `beam_size` beams of which all are kept, and how many groups there are.

    A state has B * groups rows, the groups of a sentence being neighbours.
    """

    groups: int = 2
    diversity: float = 0.5
    each: int = 1
    """Results taken from each group."""

    def start(self, step: Step, cache: Cache, prompt: jax.Array, **options: Any) -> BeamState:
        """Feed the prompt and choose the first beams."""
        limit, options["buffer_length"] = row_limits(
            options.pop("max_length"), options.get("buffer_length"), len(prompt)
        )
        rows = tile({"max_length": limit, "seen": options.pop("seen", None)}, self.groups)
        return super().start(step, tile(cache, self.groups), tile(prompt, self.groups), **rows, **options)

    def keep_rows(self, state: BeamState, rows: jax.Array) -> BeamState:
        """The state of the given sentences only."""
        return super().keep_rows(state, (rows[:, None] * self.groups + jnp.arange(self.groups)).reshape(-1))

    def result(self, state: BeamState) -> Hypotheses:
        """`each` from every group that no group before it has given, sorted together: finished first, best first."""
        found = super().result(state)
        found = jax.tree.map(lambda x: x.reshape(-1, self.groups * self.beam_size, *x.shape[2:]), found)
        taken = jnp.zeros(found.scores.shape, bool)
        same = jnp.all(found.ids[:, :, None] == found.ids[:, None], axis=-1)
        same &= found.lengths[:, :, None] == found.lengths[:, None]
        for g in range(self.groups):
            own = (jnp.arange(taken.shape[1]) // self.beam_size) == g
            fresh = own & ~jnp.any(same & taken[:, None], axis=-1)
            taken |= fresh & (jnp.cumsum(fresh, axis=1) <= self.each)
        repeated = jnp.any(same & (jnp.tril(jnp.ones(same.shape[1:], bool), -1) | taken[:, None]), axis=-1)
        real = found.scores > -jnp.inf
        kind = jnp.where(real & taken, 0, jnp.where(real & ~repeated, 1, 2))  # 1 fills up where a group had nothing new
        order = jnp.lexsort((-found.scores, ~found.finished, kind))[:, : self.groups * self.each]
        again = jnp.lexsort(
            tuple(jnp.take_along_axis(x, order, axis=1) for x in (-found.scores, ~found.finished, kind == 2))
        )
        order = jnp.take_along_axis(order, again, axis=1)
        exists = jnp.take_along_axis(kind < 2, order, axis=1)

        def pick(x: jax.Array, otherwise: float) -> jax.Array:
            extra = (1,) * (x.ndim - 2)
            chosen = jnp.take_along_axis(x, order.reshape(*order.shape, *extra), axis=1)
            return jnp.where(exists.reshape(*exists.shape, *extra), chosen, jnp.asarray(otherwise, x.dtype))

        return Hypotheses(
            pick(found.ids, self.pad_id),
            pick(found.scores, -jnp.inf),
            pick(found.finished, False),
            pick(found.lengths, 0),
            pick(found.log_probs, 0.0),
        )

    def _settled(self, enough: jax.Array) -> jax.Array:
        """Groups stop together, since each looks at what the others choose."""
        return jnp.repeat(jnp.all(enough.reshape(-1, self.groups), axis=1), self.groups)

    def _continue(
        self, state: BeamState, scores: jax.Array, log_z: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Group after group, a token costing `diversity` for each beam of the groups before that has just taken it."""
        width = state.live.scores.shape[1]
        log_probs = (scores - log_z[:, None]).reshape(-1, self.groups, width, scores.shape[-1])
        live = state.live.scores.reshape(-1, self.groups, width)
        used = jnp.zeros((len(live), scores.shape[-1]), jnp.float32)
        chosen = []
        for g in range(self.groups):
            flat = (log_probs[:, g] - self.diversity * used[:, None]).reshape(len(live) * width, -1)
            ids, values = self._candidates(flat, jnp.zeros(len(flat), jnp.float32))
            tokens, parents, sums = best_continuations(live[:, g], ids, values, self.beam_size)
            exists = sums > -jnp.inf
            sums += self.diversity * jnp.take_along_axis(used, tokens, axis=1)
            used += counts(jnp.where(exists, tokens, -1), used.shape[1])
            chosen.append((tokens, parents, sums))
        tokens, parents, sums = (jnp.stack(x, axis=1).reshape(-1, self.beam_size) for x in zip(*chosen, strict=True))
        sums, order = lax.top_k(sums, self.beam_size)
        return jnp.take_along_axis(tokens, order, axis=1), jnp.take_along_axis(parents, order, axis=1), sums


def diverse_beam_search(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    *,
    beam_size: int = 4,
    groups: int = 2,
    diversity: float = 0.5,
    alpha: float = 0.6,
    max_length: jax.typing.ArrayLike,
    eos_id: int | Sequence[int] | None,
    n_best: int = 2,
    pad_id: int = 0,
    seen: jax.Array | None = None,
    buffer_length: int | None = None,
    prefill_chunk: int | None = None,
    reweight: Sequence[Reweight] = (),
    allow: Sequence[Allow] = (),
) -> Hypotheses:
    """Beam search in groups: each group ranks a token lower by `diversity` for every earlier beam that chose it now.

    Args:
        step, cache, prompt, alpha, max_length, eos_id, pad_id, seen, buffer_length, prefill_chunk, reweight, allow: as
            in `beam_search`.
        beam_size: beams in all, a multiple of groups.
        groups: number of groups; 1 is beam search.
        diversity: strength of the penalty. It guides the choice; scores are log-probabilities without it.
        n_best: results in all, a multiple of groups, the same number from each group.

    Returns:
        Hypotheses, which unpack as ids [B, n_best, L], scores, finished [B, n_best]: distinct, finished ones first,
        each kind best first.

    Raises:
        ValueError: beam_size or n_best is no multiple of groups, or another option does not fit.

    Reference: Vijayakumar et al., 2018, "Diverse Beam Search for Improved Description of Complex Scenes", algorithm 1
        with Hamming diversity.
    """
    for name, value in (("beam_size", beam_size), ("n_best", n_best)):
        if groups < 1 or value % groups:
            raise ValueError(f"{name} is {value}: expected a multiple of groups, {groups}")
    if n_best > beam_size or n_best < 1:
        raise ValueError(f"beam_size is {beam_size}, n_best {n_best}: expected beam_size >= n_best >= 1")
    if diversity < 0:
        raise ValueError(f"diversity is {diversity}: expected 0 or more")
    size = beam_size // groups
    search = DiverseBeam(
        eos_ids(eos_id),
        pad_id,
        alpha,
        tuple(reweight),
        tuple(allow),
        size,
        size,
        groups=groups,
        diversity=diversity,
        each=n_best // groups,
    )
    options = dict(max_length=max_length, buffer_length=buffer_length, seen=seen, prefill_chunk=prefill_chunk)
    return search.run(step, cache, prompt, **options)
