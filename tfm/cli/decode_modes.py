"""What `tfm decode` does besides writing outputs: score pairs, name classes, talk to a person."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator

import jax

from tfm.bundle import Bundle
from tfm.cli.decode_options import DecodeOptions
from tfm.config import require
from tfm.parallel.exchange import is_first, spread

WINDOW = 16
"""Batches whose lines are read, sorted by length and written together."""


def windows(lines: Iterator[str], size: int) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line from 0, lines), so many lines at a time.

    Example:
        >>> list(windows(iter("abc"), 2))
        [(0, ['a', 'b']), (2, ['c'])]
    """
    for first in itertools.count(0, size):
        window = list(itertools.islice(lines, size))
        if not window:
            return
        yield first, window


def converse(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    require(jax.process_count() == 1, "--interactive", True, "one process can talk to a person, not several")
    chosen = {name: value for name, value in vars(options.generation).items() if value is not None}
    for line in lines:
        for piece in bundle.stream(line, too_long=options.too_long, **chosen) if line.strip() else ():
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


def score_lines(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    total, tokens = 0.0, 0
    batch_size = options.generation.batch_size or bundle.config.decode.batch_size

    def score(item: tuple[int, list[str]]) -> list[list[float]]:
        first, window = item
        pairs = [line.split("\t") for line in window]
        for number, pair in enumerate(pairs, start=first + 1):
            require(len(pair) == 2, f"line {number} of the input", "\t".join(pair)[:60],
                    "it must be a source, a tab and a target")
        found = bundle.token_scores([s for s, _ in pairs], [t for _, t in pairs], batch_size=batch_size)
        return [[float(x) for x in row] for row in found]

    for scores in spread(windows(lines, WINDOW * batch_size), score):
        for row in scores:
            sys.stdout.write(f"{sum(row):.4f}\n")
        sys.stdout.flush()
        total, tokens = total + sum(map(sum, scores)), tokens + sum(map(len, scores))
    if tokens:
        say(f"perplexity {math.exp(-total / tokens):.4f} over {tokens:,} tokens")
    return 0


def classify_lines(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    batch_size, labels = options.generation.batch_size or bundle.config.decode.batch_size, bundle.config.data.labels
    options.refuse_others("a model that gives classes", ("batch_size",),
                          ("score", "interactive", "token_scores", "alignment", "draft"))

    def classify(item: tuple[int, list[str]]) -> str:
        _, window = item
        filled = [i for i, line in enumerate(window) if line.strip()]
        found = bundle.class_probabilities([window[i] for i in filled], too_long=options.too_long,
                                           batch_size=batch_size)
        best = {i: (f"{row.max():.4f}", labels[int(row.argmax())]) for i, row in zip(filled, found, strict=True)}
        pairs = [best.get(i, ("", "")) for i in range(len(window))]
        return "".join(f"{probability}\t{label}\n" if options.scores else f"{label}\n" for probability, label in pairs)

    for printed in spread(windows(lines, WINDOW * batch_size), classify):
        sys.stdout.write(printed)
        sys.stdout.flush()
    return 0


def say(text: str) -> None:
    """Tell the user on stderr, once."""
    if is_first():
        print(text, file=sys.stderr, flush=True)
