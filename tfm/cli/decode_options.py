"""The options of `tfm decode`, and which of them cannot work together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tfm.bundle import Bundle
from tfm.cli.processes import ProcessOptions
from tfm.config import require
from tfm.generation import GenerationOptions

DRAFT_LENGTH = 4
"""Tokens a round that a draft model guesses where the options do not say."""


@dataclass(frozen=True)
class DecodeOptions:
    """Translate, continue, or classify the lines of standard input; one line out for each line in."""

    model: tyro.conf.Positional[Path]
    """Run folder, Hugging Face checkpoint folder, or .gguf file."""
    generation: Annotated[GenerationOptions, tyro.conf.arg(name="")] = field(
        default_factory=GenerationOptions)
    """How outputs are chosen."""
    scores: bool = False
    """Put the score (of a class its probability) and a tab before each line."""
    token_scores: bool = False
    """With several outputs for a line: put the log-probability of each token behind the score."""
    alignment: bool = False
    """Put ` ||| 0-0 1-2 ||| 0.83` behind each line: which source word each output word attends to, and how surely."""
    score: bool = False
    """Score lines `source TAB target` instead: a log-probability for each, perplexity on stderr."""
    draft: Path | None = None
    """Folder of a smaller model with the same tokenizer, whose guesses are checked; the output stays the same."""
    interactive: bool = False
    """Read a line, show its output as it is written, and so on, for a person at a terminal."""
    checkpoint: str = "newest"
    """A step, newest, or best (by BLEU on the validation split)."""
    average: int = 1
    """Mean of this many checkpoints."""
    weights: Literal["bfloat16", "int8"] | None = None
    """Narrow the matrices of the model when it is loaded. Default: as they were trained."""
    too_long: Literal["error", "cut"] = "error"
    """What to do with lines longer than the model can take."""
    replace_invalid: bool = False
    """Put U+FFFD for bytes that are not UTF-8, instead of stopping."""
    verbose: bool = False
    """Say on stderr what was loaded and how large a cache is."""
    processes: Annotated[ProcessOptions, tyro.conf.arg(name="")] = field(default_factory=ProcessOptions)
    """Several processes take turns with the lines; the first one reads and writes."""

    def __post_init__(self) -> None:
        several = self.generation.n_best > 1
        require(not self.token_scores or several, "--token-scores", True, "it needs --n-best above 1")
        require(not (self.alignment and several), "--alignment", True,
                f"it does not go with --n-best {self.generation.n_best}")
        require(not (self.scores and several), "--scores", True, "lines of --n-best carry their scores already")
        require(self.generation.draft_length == 0 or self.draft is not None, "--draft-length",
                self.generation.draft_length, "it needs --draft, a model that guesses")
        require(not (self.score and self.interactive), "--score", True, "it does not go with --interactive")
        if self.score:
            self.refuse_others("--score", ("batch_size",), ("scores", "token_scores", "alignment", "draft"))
        if self.interactive:
            require(self.generation.mbr == 0, "--mbr", self.generation.mbr, "it does not go with --interactive")
            self.refuse_others("--interactive", None, ("scores", "token_scores", "alignment", "draft"))

    def refuse_others(self, mode: str, generation: tuple[str, ...] | None, own: tuple[str, ...]) -> None:
        """Refuse options of generation other than those named (None: allow all), and the named ones of one's own."""
        plain = GenerationOptions()
        given = [] if generation is None else [
            name for name, value in vars(self.generation).items()
            if name not in generation and value != getattr(plain, name)]
        given += [name for name in own if getattr(self, name)]
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        require(not given, names, "given", f"it does not go with {mode}")

    def filled(self, bundle: Bundle) -> DecodeOptions:
        """The same with the model's own settings where these say none."""
        generation = self.generation
        if self.draft is not None and not generation.draft_length:
            generation = replace(generation, draft_length=DRAFT_LENGTH)
        return replace(self, generation=bundle.filled(generation, beam_size=own_beams(bundle)))


def own_beams(bundle: Bundle) -> int:
    """Hypotheses that a model keeps where nothing is said."""
    return bundle.config.decode.beam_size if bundle.model.is_encoder_decoder else 1


def checkpoint_choice(which: str) -> int | str:
    """A step number, "newest" or "best", from the option."""
    known = which in ("newest", "best") or which.isdecimal()
    require(known, "--checkpoint", which, "it must be a step, newest or best")
    return int(which) if which.isdecimal() else which
