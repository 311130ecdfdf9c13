"""What a user may ask of generation: one dataclass for `Bundle` and the command line, checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from tfm.config import DecodeConfig, require
from tfm.config_checks import require_types
from tfm.config_json import unknown_field
from tfm.decoding import logits as rules
from tfm.decoding.power_beam import Early
from tfm.search import Search


@dataclass(frozen=True)
class GenerationOptions:
    """How texts are generated."""

    beam_size: int | None = None
    """Hypotheses kept; 1 is greedy, or sampling where `temperature` is above 0. None: the model's own."""
    alpha: float | None = None
    """Exponent of the length penalty ((5 + length) / 6) ** alpha. None: the model's own."""
    length_penalty: float | None = None
    """Instead of alpha: beam search as the transformers library has it, where sums are divided by length to this
    power. None: alpha, or the checkpoint's own."""
    early_stopping: Early | None = None
    """With length_penalty: stop when beam_size outputs are finished (True), when the best unfinished one is no better
    at its present length (False), or when it cannot become better (never). None: the checkpoint's own, or False."""
    renormalize: bool | None = None
    """With length_penalty: let the probabilities that the rules leave of each next token sum to 1 again. None: the
    checkpoint's own, or False."""
    n_best: int = 1
    """Hypotheses returned for each input; at most beam_size."""
    max_length: int | None = None
    """Most new tokens. None: the checkpoint's own, or source length + 50 for an encoder-decoder, 128 for a decoder."""
    min_length: int | None = None
    """Least new tokens before the end. None: the checkpoint's own, or 0."""
    temperature: float = 0.0
    """Above 0: sample; 1 is the model's own distribution."""
    top_k: int | None = None
    """Sample among the k most probable tokens."""
    top_p: float | None = None
    """Sample within the smallest set of tokens of this probability."""
    min_p: float | None = None
    """Sample among tokens of at least this share of the best one's probability."""
    typical_p: float | None = None
    """Sample within the most typical tokens of this probability."""
    repetition_penalty: float | None = None
    """Above 1: tokens that occurred before become less probable. None: the checkpoint's own, or 1."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """Taken off for each time that it was."""
    no_repeat_ngram: int | None = None
    """No sequence of so many tokens occurs twice; 0: any may. None: the checkpoint's own, or 0."""
    suppress: tuple[int, ...] = ()
    """Ids that are never written."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never written, where they are spelled with the tokens that the tokenizer gives them."""
    prefix: str = ""
    """What every output begins with."""
    stop: tuple[str, ...] = ()
    """Texts that end an output; they are left off."""
    groups: int = 1
    """Groups of beams that are made to differ; beam_size and n_best must be multiples of it."""
    diversity: float = 0.5
    """Strength with which groups differ."""
    phrases: tuple[str, ...] = ()
    """Texts that every output must hold; needs beam_size above 1."""
    coverage: float = 0.0
    """Weight of Wu et al.'s coverage penalty: above 0, beams that leave words of the source out rank lower."""
    mbr: int = 0
    """Samples drawn for each input, of which the one most like the others is given (minimum Bayes risk with chrF)."""
    draft_length: int = 0
    """Speculative decoding: tokens a round guessed by a smaller model; the output stays the same. 0: none."""
    lookup: int = 0
    """Speculative decoding: tokens a round guessed from what the text repeats; the output stays the same. 0: none."""
    cache_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Type of the stored keys and values. None: the model's."""
    batch_size: int | None = None
    """Texts generated together. None: the model's own."""
    seed: int = 0
    """Of sampling."""

    def __post_init__(self) -> None:
        require_types("generation", self)
        for name in ("beam_size", "n_best", "batch_size", "max_length", "groups"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "it must be above 0")
        for name in ("stop", "bad_words", "phrases"):
            require("" not in getattr(self, name), name, getattr(self, name), "it cannot hold an empty text")
        require(self.max_length is None or self.max_length < 2**30, "max_length", self.max_length,
                "it must be below 2^30")
        for name in ("min_length", "no_repeat_ngram", "lookup", "draft_length", "mbr", "diversity"):
            require((getattr(self, name) or 0) >= 0, name, getattr(self, name), "it cannot be negative")
        require(self.max_length is None or (self.min_length or 0) <= self.max_length, "min_length", self.min_length,
                f"it can be at most max_length={self.max_length}")
        require(self.repetition_penalty is None or self.repetition_penalty > 0.0, "repetition_penalty",
                self.repetition_penalty, "it must be above 0")
        require(self.alpha is None or self.length_penalty is None, "length_penalty", self.length_penalty,
                f"alpha={self.alpha} is the other penalty: give one of the two")
        require(self.mbr == 0 or (self.temperature > 0.0 and self.n_best == 1), "mbr", self.mbr,
                "it chooses one of several samples: set temperature above 0 and n_best=1")
        require(self.diversity == 0.5 or self.groups > 1, "diversity", self.diversity, "it needs groups above 1")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "it must lie in [-2^63, 2^63)")
        require(self.early_stopping in (None, True, False, "never"), "early_stopping", self.early_stopping,
                "it must be True, False or 'never'")
        require(self.cache_dtype in (None, "float32", "bfloat16", "int8"), "cache_dtype", self.cache_dtype,
                "it must be 'float32', 'bfloat16' or 'int8'")
        require(self.n_best == 1 or not self.stop, "stop", self.stop, f"it does not go with n_best={self.n_best}")
        self.search(eos_ids=(), pad_id=0)

    def filled(self, decode: DecodeConfig, *, beam_size: int,
               own: Mapping[str, Any] = MappingProxyType({})) -> GenerationOptions:
        """These options with a model's own where they say None; sampling has no beams.

        Args:
            decode: of the model's config.
            beam_size: where neither the options nor `own` have one.
            own: fields that the checkpoint's generation settings fill in, before the config.

        Raises:
            ValueError: the two do not go together; the message names what is the model's own.
        """
        single = self.temperature > 0.0 or self.lookup > 0 or self.draft_length > 0
        found = {"beam_size": beam_size, "batch_size": decode.batch_size, "max_length": decode.max_length,
                 **{name: value for name, value in own.items() if value is not None}}
        found["beam_size"] = 1 if single else max(found["beam_size"], self.n_best)
        if self.alpha is not None or ((self.groups > 1 or self.phrases) and self.length_penalty is None):
            found["length_penalty"] = None
        if self.length_penalty is None and found.get("length_penalty") is None:
            found["alpha"] = decode.alpha
        if self.max_length is not None and found.get("min_length"):
            found["min_length"] = min(found["min_length"], self.max_length)
        missing = {name: value for name, value in found.items() if getattr(self, name) is None}
        try:
            chosen = dataclasses.replace(self, **missing)
        except ValueError as error:
            taken = [f"{name}={value!r}" for name, value in missing.items() if name in str(error)]
            if not taken:
                raise
            raise ValueError(f"{error}; the model's own settings (generation_config.json, config.json) say "
                             f"{', '.join(taken)}") from error
        for name in ("early_stopping", "renormalize"):
            require(getattr(self, name) is None or chosen.length_penalty is not None, name, getattr(self, name),
                    "it goes with length_penalty, and alpha is used here")
        return chosen

    def search(self, *, eos_ids: tuple[int, ...], pad_id: int, reweight: Sequence[Any] = (), allow: Sequence[Any] = (),
               encode: Callable[[str], list[int]] | None = None) -> Search:
        """The settings of the compiled search.

        Args:
            eos_ids: ids that end an output.
            pad_id: what fills up rows.
            reweight: further rules that change the choice; where one of them is `Forced`, it goes before all others.
            allow: further rules that say what may come next.
            encode: text to ids, for `bad_words` and `prefix`.

        Raises:
            ValueError: options that cannot work together.
        """
        forced = next((rule for rule in reweight if isinstance(rule, rules.Forced)), rules.Forced())
        allow = [*allow, *self._allow(eos_ids, encode, forced.first)]
        if forced != rules.Forced():
            allow = [rules.UnlessForced(rule, forced) for rule in allow]
        return Search(
            beam_size=self.n_best if self.beam_size is None else self.beam_size,
            alpha=0.0 if self.alpha is None else self.alpha, length_penalty=self.length_penalty,
            early_stopping=self.early_stopping or False, renormalize=self.renormalize or False, n_best=self.n_best,
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            typical_p=self.typical_p, eos_ids=eos_ids, pad_id=pad_id,
            reweight=(*reweight, *self._reweight()), allow=tuple(allow),
            groups=self.groups, diversity=self.diversity,
            phrases=() if encode is None else tuple(tuple(encode(phrase)) for phrase in self.phrases),
            cache_dtype=self.cache_dtype, coverage=self.coverage, lookup=self.lookup, draft=self.draft_length)

    def _reweight(self) -> list[Any]:
        chosen: list[Any] = []
        if self.repetition_penalty not in (None, 1.0):
            chosen.append(rules.RepetitionPenalty(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            chosen.append(rules.CountPenalty(self.presence_penalty, self.frequency_penalty))
        return chosen

    def _allow(self, eos_ids: tuple[int, ...], encode: Callable[[str], list[int]] | None,
               first: tuple[int, ...]) -> list[Any]:
        """The rules that the options ask for; `first` are the ids that outputs begin with in any case."""
        chosen: list[Any] = []
        if self.min_length and eos_ids:
            chosen.append(rules.MinLength(self.min_length, eos_ids))
        if self.no_repeat_ngram:
            chosen.append(rules.NoRepeatNgram(self.no_repeat_ngram))
        if self.suppress:
            chosen.append(rules.Suppress(self.suppress))
        if self.bad_words and encode is not None:
            chosen.append(rules.BadWords(tuple(tuple(encode(word)) for word in self.bad_words)))
        if self.prefix and encode is not None:
            chosen.append(rules.ForceFirst((*first, *encode(self.prefix))))
        return chosen


def make_options(options: dict[str, Any]) -> GenerationOptions:
    """Options from keyword arguments; None takes the default.

    Raises:
        ValueError: an unknown name (with the nearest one), or values that do not fit.

    Example:
        >>> make_options({"beam_sise": 2})
        Traceback (most recent call last):
        ValueError: ...did you mean beam_size?...
    """
    known = [field.name for field in dataclasses.fields(GenerationOptions)]
    for name in options:
        if name not in known:
            raise ValueError(unknown_field(name, known))
    return GenerationOptions(**{name: _plain(value) for name, value in options.items() if value is not None})


def _plain(value: Any) -> Any:
    """A list as a tuple, NumPy's numbers and arrays as Python's."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    return tuple(value) if isinstance(value, list) else value
