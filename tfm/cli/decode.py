"""`tfm decode RUN < source.txt > out.txt`: a line out for each line in, in order."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import jax
import tyro

from tfm.bundle import Bundle, load
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import require
from tfm.decoding.text import cut_at_stop
from tfm.generation import GenerationOptions
from tfm.inference import Result
from tfm.nn.cache import cache_bytes
from tfm.parallel.compilation import enable_compilation_cache
from tfm.parallel.host import keep_freed_memory

WINDOW = 16
"""Batches whose lines are read, sorted by length and written together."""


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
    score: bool = False
    """Score lines `source TAB target` instead: a log-probability for each, perplexity on stderr."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: run_decoding(parse(DecodeOptions, arguments, prog="decode.py")))


def run_decoding(options: DecodeOptions) -> int:
    """Decode standard input as the options say; give the exit code."""
    keep_freed_memory()
    enable_compilation_cache()
    require(not (options.score and options.generation.n_best > 1), "--n-best", options.generation.n_best,
            "it does not go with --score")
    bundle = load(options.model, checkpoint=checkpoint_choice(options.checkpoint), average=options.average,
                  weights=options.weights, say=_say)
    if options.verbose:
        _say(_describe(bundle, options))
    lines = read_lines(sys.stdin.buffer, replace=options.replace_invalid)
    if bundle.model.num_classes:
        return _classify_lines(bundle, lines, options)
    if options.score:
        return _score_lines(bundle, lines, options)
    if options.interactive:
        return _converse(bundle, lines, options)
    options = replace(options, generation=bundle.filled(options.generation, beam_size=_own_beams(bundle)))
    done = 0
    for window in _windows(lines, WINDOW * (options.generation.batch_size or 1)):
        for number, hypotheses in enumerate(decode_lines(bundle, window, options, done)):
            sys.stdout.write(_format(hypotheses, done + number, options))
        sys.stdout.flush()
        done += len(window)
    return 0


def read_lines(stream: BinaryIO, *, replace: bool = False) -> Iterator[str]:
    """Lines of a stream, split at line feeds alone, without their ends; a carriage return at the end goes too.

    Raises:
        ValueError: a line is not UTF-8 and replace is False; the message names it.
    """
    for number, line in enumerate(stream, start=1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            yield line.decode("utf-8", errors="replace" if replace else "strict")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of the input is not UTF-8 (byte {error.start + 1}, "
                             f"0x{line[error.start]:02x}): use --replace-invalid to go on") from error


def decode_lines(bundle: Bundle, lines: Sequence[str], options: DecodeOptions,
                 first: int) -> list[list[tuple[str, Result | None]]]:
    """The n best (text, result) of each line; a blank line gives blank texts without a result."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    rows = []
    for i in filled:
        try:
            rows.append(bundle.source_ids(lines[i], too_long=options.too_long))
        except ValueError as error:
            raise ValueError(f"line {first + i + 1} of the input: {error}") from error
    chosen = replace(options.generation, seed=options.generation.seed + first)
    found = bundle.run(rows, chosen, progress=_progress(first))
    outputs: list[list[tuple[str, Result | None]]] = [[("", None)] * chosen.n_best for _ in lines]
    for i, hypotheses in zip(filled, found, strict=True):
        outputs[i] = [(_one_line(cut_at_stop(bundle.decode(h.ids), chosen.stop)[0]), h) for h in hypotheses]
    return outputs


def _converse(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    chosen = {name: value for name, value in vars(options.generation).items() if value is not None}
    for line in lines:
        for piece in bundle.stream(line, too_long=options.too_long, **chosen) if line.strip() else ():
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


def _own_beams(bundle: Bundle) -> int:
    return bundle.config.decode.beam_size if bundle.model.is_encoder_decoder else 1


def _score_lines(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    total, tokens, done = 0.0, 0, 0
    batch_size = options.generation.batch_size or bundle.config.decode.batch_size
    for window in _windows(lines, WINDOW * batch_size):
        pairs = [line.split("\t") for line in window]
        for number, pair in enumerate(pairs, start=done + 1):
            require(len(pair) == 2, f"line {number} of the input", "\t".join(pair)[:60],
                    "it must be a source, a tab and a target")
        scores = bundle.token_scores([s for s, _ in pairs], [t for _, t in pairs], batch_size=batch_size)
        for row in scores:
            sys.stdout.write(f"{sum(row):.4f}\n")
        sys.stdout.flush()
        total, tokens, done = total + sum(map(sum, scores)), tokens + sum(map(len, scores)), done + len(window)
    if tokens:
        _say(f"perplexity {math.exp(-total / tokens):.4f} over {tokens:,} tokens")
    return 0


def _classify_lines(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    batch_size, labels = options.generation.batch_size or bundle.config.decode.batch_size, bundle.config.data.labels
    chosen = [name for name, value in vars(options.generation).items()
              if name != "batch_size" and value != getattr(GenerationOptions(), name)]
    chosen += [name for name in ("score", "interactive") if getattr(options, name)]
    require(not chosen, ", ".join(f"--{name.replace('_', '-')}" for name in chosen), True,
            "this model gives classes, and no text")
    for window in _windows(lines, WINDOW * batch_size):
        filled = [i for i, line in enumerate(window) if line.strip()]
        found = bundle.class_probabilities([window[i] for i in filled], too_long=options.too_long,
                                           batch_size=batch_size)
        best = {i: (f"{row.max():.4f}", labels[int(row.argmax())]) for i, row in zip(filled, found, strict=True)}
        for i in range(len(window)):
            probability, label = best.get(i, ("", ""))
            sys.stdout.write(f"{probability}\t{label}\n" if options.scores else f"{label}\n")
        sys.stdout.flush()
    return 0


def _windows(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    window: list[str] = []
    for line in lines:
        window.append(line)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def _format(hypotheses: Sequence[tuple[str, Result | None]], number: int, options: DecodeOptions) -> str:
    if options.generation.n_best > 1:
        return "".join(f"{number} ||| {text} ||| {_score(result)}\n" for text, result in hypotheses)
    text, result = hypotheses[0]
    return f"{_score(result)}\t{text}\n" if options.scores else f"{text}\n"


def _score(result: Result | None) -> str:
    return "" if result is None else f"{result.score:.4f}"


def _one_line(text: str) -> str:
    return " ".join(text.split("\n")) if "\n" in text else text


def checkpoint_choice(which: str) -> int | str:
    """A step number, "newest" or "best", from the option."""
    known = which in ("newest", "best") or which.isdecimal()
    require(known, "--checkpoint", which, "it must be a step, newest or best")
    return int(which) if which.isdecimal() else which


def _progress(first: int) -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None
    return lambda done: print(f"\r{first + done:,} lines", end="", file=sys.stderr, flush=True)


def _describe(bundle: Bundle, options: DecodeOptions) -> str:
    model = bundle.model
    beams = options.generation.beam_size or _own_beams(bundle)
    size = cache_bytes(model, beams, 256)
    return (f"{options.model}: {sum(x.size for x in jax.tree.leaves(bundle.params)):,} parameters, {model.dtype}; "
            f"cache of a sentence with {beams} hypotheses of 256 tokens: {size:,} bytes")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
