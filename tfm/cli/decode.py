"""`tfm decode RUN < source.txt > out.txt`: a line out for each line in, in order."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import jax
import tyro

from tfm.bundle import Bundle, load
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import require
from tfm.inference import Result
from tfm.nn.cache import cache_bytes
from tfm.parallel.compilation import enable_compilation_cache
from tfm.parallel.host import keep_freed_memory

WINDOW = 16
"""Batches whose lines are read, sorted by length and written together."""


@dataclass(frozen=True)
class DecodeOptions:
    """Translate, or continue, the lines of standard input; one line out for each line in."""

    model: tyro.conf.Positional[Path]
    """Run folder, Hugging Face checkpoint folder, or .gguf file."""
    beam_size: int | None = None
    """Hypotheses kept; 1 is greedy. Default: the run's own."""
    alpha: float | None = None
    """Exponent of the length penalty. Default: the run's own."""
    n_best: int = 1
    """Above 1: that many lines `number ||| text ||| score` for each line in."""
    max_length: int | None = None
    """Most new tokens. Default: source length + 50."""
    scores: bool = False
    """Put the score and a tab before each line."""
    score: bool = False
    """Score lines `source TAB target` instead: a log-probability for each, perplexity on stderr."""
    temperature: float = 0.0
    """Above 0: sample."""
    top_k: int | None = None
    """Sample among the k most probable tokens."""
    top_p: float | None = None
    """Sample within the smallest set of this probability."""
    min_p: float | None = None
    """Sample among tokens of at least this share of the best one's probability."""
    seed: int = 0
    """Of sampling."""
    batch_size: int | None = None
    """Lines decoded together. Default: the run's own."""
    checkpoint: str = "newest"
    """A step, newest, or best (by BLEU on the validation split)."""
    average: int = 1
    """Mean of this many checkpoints."""
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
    require(not (options.score and options.n_best > 1), "--n-best", options.n_best, "it does not go with --score")
    bundle = load(options.model, checkpoint=checkpoint_choice(options.checkpoint), average=options.average, say=_say)
    if options.verbose:
        _say(_describe(bundle, options))
    lines = read_lines(sys.stdin.buffer, replace=options.replace_invalid)
    if options.score:
        return _score_lines(bundle, lines, options)
    batch_size = options.batch_size or bundle.config.decode.batch_size
    done = 0
    for window in _windows(lines, WINDOW * batch_size):
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
    decode = bundle.config.decode
    beam_size = decode.beam_size if options.beam_size is None else options.beam_size
    if options.temperature > 0.0 and options.beam_size is None:
        beam_size = 1
    found = bundle.results(rows, beam_size=beam_size, alpha=options.alpha, n_best=options.n_best,
                           max_length=options.max_length, temperature=options.temperature, top_k=options.top_k,
                           top_p=options.top_p, min_p=options.min_p, batch_size=options.batch_size,
                           seed=options.seed + first, progress=_progress(first))
    outputs: list[list[tuple[str, Result | None]]] = [[("", None)] * options.n_best for _ in lines]
    for i, hypotheses in zip(filled, found, strict=True):
        outputs[i] = [(_one_line(bundle.decode(h.ids)), h) for h in hypotheses]
    return outputs


def _score_lines(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    total, tokens, done = 0.0, 0, 0
    for window in _windows(lines, WINDOW * (options.batch_size or bundle.config.decode.batch_size)):
        pairs = [line.split("\t") for line in window]
        for number, pair in enumerate(pairs, start=done + 1):
            require(len(pair) == 2, f"line {number} of the input", "\t".join(pair)[:60],
                    "it must be a source, a tab and a target")
        scores = bundle.token_scores([s for s, _ in pairs], [t for _, t in pairs], batch_size=options.batch_size)
        for row in scores:
            sys.stdout.write(f"{sum(row):.4f}\n")
        sys.stdout.flush()
        total, tokens, done = total + sum(map(sum, scores)), tokens + sum(map(len, scores)), done + len(window)
    if tokens:
        _say(f"perplexity {math.exp(-total / tokens):.4f} over {tokens:,} tokens")
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
    if options.n_best > 1:
        return "".join(f"{number} ||| {text} ||| {_score(result)}\n" for text, result in hypotheses)
    text, result = hypotheses[0]
    return f"{_score(result)}\t{text}\n" if options.scores else f"{text}\n"


def _score(result: Result | None) -> str:
    return "" if result is None else f"{result.score:.4f}"


def _one_line(text: str) -> str:
    return " ".join(text.split("\n")) if "\n" in text else text


def checkpoint_choice(which: str) -> int | str:
    """A step number, "newest" or "best", from the option."""
    require(which in ("newest", "best") or which.isdecimal(), "--checkpoint", which, "it must be a step, newest or best")
    return int(which) if which.isdecimal() else which


def _progress(first: int) -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None
    return lambda done: print(f"\r{first + done:,} lines", end="", file=sys.stderr, flush=True)


def _describe(bundle: Bundle, options: DecodeOptions) -> str:
    model = bundle.model
    beams = bundle.config.decode.beam_size if options.beam_size is None else options.beam_size
    size = cache_bytes(model, beams, 256)
    return (f"{options.model}: {sum(x.size for x in jax.tree.leaves(bundle.params)):,} parameters, {model.dtype}; "
            f"cache of a sentence with {beams} hypotheses of 256 tokens: {size:,} bytes")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
