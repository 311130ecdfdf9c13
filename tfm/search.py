"""What a search is asked for, and what it gives: settings of one compiled program, and one hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfm.config import require
from tfm.decoding.power_beam import Early


@dataclass(frozen=True)
class Search:
    """How hypotheses are chosen; hashable, since one program is compiled for each."""

    beam_size: int = 1
    """1: greedy, or sampling where `temperature` is above 0."""
    alpha: float = 0.6
    length_penalty: float | None = None
    """Beams as `power_beam_search` has them; None: as `beam_search`, with `alpha`."""
    early_stopping: Early = False
    """With length_penalty: when a row stops."""
    renormalize: bool = False
    """With length_penalty: whether the probabilities that the rules leave sum to 1 again."""
    n_best: int = 1
    temperature: float = 0.0
    """0: the most probable token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int = 0
    reweight: tuple[Any, ...] = ()
    """Rules of `tfm.decoding.logits` that change the choice."""
    allow: tuple[Any, ...] = ()
    """Rules of `tfm.decoding.logits` that say which tokens may come next."""
    cache_dtype: str | None = None
    """Type of stored keys and values; None: the model's."""
    groups: int = 1
    """Groups of beams that are made to differ (Vijayakumar et al., 2018)."""
    diversity: float = 0.5
    """Strength with which they are."""
    phrases: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that every hypothesis must hold."""
    coverage: float = 0.0
    """Weight of Wu et al.'s coverage penalty, for beams of an encoder-decoder."""
    lookup: int = 0
    """Tokens drafted a round from the text so far (speculative decoding by prompt lookup); 0: none."""
    draft: int = 0
    """Tokens drafted a round by a smaller model; 0: none."""
    scored: bool = True
    """False: nobody asks for probabilities. Greedy search and sampling then save a pass over the logits, and results
    have NaN for them."""

    @property
    def token_by_token(self) -> bool:
        """Greedy search or sampling, without drafts."""
        return self.beam_size == 1 and not (self.lookup or self.draft)

    def __post_init__(self) -> None:
        require(self.temperature >= 0.0, "temperature", self.temperature, "it cannot be negative")
        require(self.temperature == 0.0 or self.beam_size == 1, "temperature", self.temperature,
                f"sampling does not go together with beam_size={self.beam_size}: set one of the two")
        for name in ("lookup", "draft"):
            require(getattr(self, name) == 0 or self.beam_size == 1, name, getattr(self, name),
                    f"speculative decoding does not go together with beam_size={self.beam_size}")
        require(not (self.lookup and self.draft), "lookup", self.lookup,
                f"draft={self.draft} is the other source of guesses: give one of the two")
        plain = self.beam_size > 1 and self.groups == 1 and not self.phrases and self.length_penalty is None
        require(self.coverage >= 0.0, "coverage", self.coverage, "it cannot be negative")
        require(self.coverage == 0.0 or plain, "coverage", self.coverage,
                "it needs beam_size above 1, and does not go together with groups, phrases or length_penalty")
        for name in ("groups", "n_best"):
            require(self.groups == 1 or self.beam_size % self.groups == self.n_best % self.groups == 0, name,
                    getattr(self, name), f"beam_size={self.beam_size} and n_best must be multiples of groups")
        require(not self.phrases or (self.beam_size > 1 and self.groups == 1), "phrases", self.phrases,
                "required phrases need beam_size above 1 and groups=1")
        require(all(self.phrases), "phrases", self.phrases, "each needs at least one id")
        require(self.length_penalty is None or (self.groups == 1 and not self.phrases), "length_penalty",
                self.length_penalty, "it does not go together with groups or phrases: use alpha")
        require(self.scored or self.token_by_token, "scored", False, "beams and drafts need probabilities")
        cuts = [name for name in ("top_k", "top_p", "min_p", "typical_p") if getattr(self, name) is not None]
        require(not cuts or self.temperature > 0.0, ", ".join(cuts), tuple(getattr(self, name) for name in cuts),
                "it needs sampling: set temperature above 0")
        require(1 <= self.n_best <= self.beam_size, "n_best", self.n_best,
                f"it must be from 1 to beam_size={self.beam_size}")


@dataclass(frozen=True)
class Result:
    """One hypothesis: new ids with EOS left off, its score, and whether it ended by itself."""

    ids: list[int]
    score: float
    finished: bool
    log_probs: list[float]
