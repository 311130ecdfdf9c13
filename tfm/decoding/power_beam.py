"""Beam search as transformers' `generate` does it, for checkpoints whose settings were chosen with it.

It differs from `beam_search` in what sums are divided by (length ** power), in when a row stops, and in that hypotheses
cut off at the limit compete with the finished ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tfm.decoding import select
from tfm.decoding.beam import Beam, Beams, BeamState, _history
from tfm.decoding.loop import Allow, Reweight, adjusted
from tfm.decoding.state import Cache, Hypotheses, Step, eos_ids, is_eos

Early = bool | Literal["never"]


@dataclass(frozen=True)
class PowerBeam(Beam):
    """Settings of `power_beam_search`."""

    power: float = 1.0
    early_stopping: Early = False
    renormalize: bool = False

    @property
    def kept(self) -> int:
        return self.beam_size

    def _reweighted(self, state: BeamState, logits: jax.Array, log_z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rules change log-probabilities, whose probabilities sum to 1 afterwards only with `renormalize`."""
        allow = self.allow if self.renormalize else ()
        changed = adjusted(logits - log_z[:, None], self.reweight, allow, partial(_history, state))
        total = select.log_sum_exp(changed) if self.renormalize else jnp.zeros_like(log_z)
        return changed, jnp.where(jnp.isfinite(total), total, 0.0)

    def _end(
        self,
        state: BeamState,
        scores: jax.Array,
        log_z: jax.Array,
        continued: tuple[jax.Array, jax.Array, jax.Array],
        own: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> Beams:
        """The K best of those that ended; at the limit also the continuations among the K best candidates."""
        ending, going = self._endings(state, scores, log_z), continued
        sums = jnp.where(self._may_end(ending[2], going[2]), ending[2], -jnp.inf)
        rank = jnp.arange(self.beam_size) + jnp.sum(sums[:, None, :] > going[2][..., None], axis=-1)
        cut = (rank < self.beam_size) & (state.count + 1 >= state.limit)[:, None]
        sums = jnp.concatenate([sums, jnp.where(cut, going[2], -jnp.inf)], axis=1)
        tokens, beams = (jnp.concatenate(pair, axis=1) for pair in zip(ending[:2], going[:2], strict=True))
        ended = state.live.take(beams, self._score(sums, state.count + 1))
        return state.ended.best(self.kept, ended.append(tokens, own(beams, tokens), state.count))

    def _enough(self, state: BeamState, live: Beams, ended: Beams) -> jax.Array:
        worst, best = ended.scores[:, -1], jnp.max(live.scores, axis=-1)
        if self.early_stopping is True:
            return worst > -jnp.inf
        length = state.limit if self.early_stopping == "never" and self.power > 0 else state.count + 1
        return (worst > -jnp.inf) & (worst >= self._score(best, length))

    def _score(self, sums: jax.Array, length: jax.Array) -> jax.Array:
        return sums / jnp.asarray(length, jnp.float32) ** self.power

    def result(self, state: BeamState) -> Hypotheses:
        """The n best, whether they ended by themselves or were cut off."""
        found = super().result(replace(state, ended=jax.tree.map(lambda x: x[:, : self.n_best], state.ended)))
        last = jnp.take_along_axis(found.ids, jnp.maximum(found.lengths - 1, 0)[..., None], axis=-1)[..., 0]
        return replace(found, finished=found.finished & is_eos(last, self.eos_ids))


def power_beam_search(
    step: Step,
    cache: Cache,
    prompt: jax.Array,
    *,
    beam_size: int,
    power: float = 1.0,
    early_stopping: Early = False,
    renormalize: bool = False,
    eos_id: int | Sequence[int] | None,
    n_best: int = 1,
    pad_id: int = 0,
    reweight: Sequence[Reweight] = (),
    allow: Sequence[Allow] = (),
    **options: Any,
) -> Hypotheses:
    """Search the n hypotheses Y with the largest log p(Y) / |Y| ** power among those that transformers would look at.

    Args:
        step, cache, prompt, n_best, eos_id, pad_id, allow: as in `beam_search`.
        beam_size: number K of beginnings, and of finished hypotheses that a row keeps.
        power: `length_penalty` there; above 0 it favours longer hypotheses.
        early_stopping: when a row with K finished hypotheses stops. True: at once. False: when the best live one, at
            its present length, is no better than the worst of them. "never": when it cannot become better.
        renormalize: let the probabilities that the rules leave of each next token sum to 1 again.
        reweight: functions that change log-probabilities.
        **options: max_length, seen, buffer_length and prefill_chunk of `beam_search`.

    Returns:
        Hypotheses [B, n_best, ...], best first; `finished` says which of them ended by themselves.

    Example:
        >>> def step(tokens, cache):  # 1 and 2 follow anything, 2 being the end
        ...     return jnp.log(jnp.array([0.0, 0.6, 0.4])) + jnp.zeros((*tokens.shape, 1)), cache
        >>> options = {"beam_size": 2, "power": 0.0, "max_length": 3, "eos_id": 2}
        >>> jax.jit(lambda prompt: power_beam_search(step, None, prompt, **options))(jnp.array([[1]])).ids.tolist()
        [[[2, 0, 0]]]

    Reference: Wolf et al., 2020, "Transformers: State-of-the-Art Natural Language Processing"; its `_beam_search`.
    """
    search = PowerBeam(eos_ids(eos_id), pad_id, 0.0, tuple(reweight), tuple(allow), beam_size, n_best, power=power,
                       early_stopping=early_stopping, renormalize=renormalize)
    return search.run(step, cache, prompt, **options)
