"""What `tfm decode` does besides writing outputs: score pairs, name classes, talk to a person."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from tfm.bundle import Bundle
from tfm.cli.decode_options import DecodeOptions
from tfm.config import require

WINDOW = 16
"""Batches whose lines are read, sorted by length and written together."""


def windows(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    window: list[str] = []
    for line in lines:
        window.append(line)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def converse(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    chosen = {name: value for name, value in vars(options.generation).items() if value is not None}
    for line in lines:
        for piece in bundle.stream(line, too_long=options.too_long, **chosen) if line.strip() else ():
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


def score_lines(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    total, tokens, done = 0.0, 0, 0
    batch_size = options.generation.batch_size or bundle.config.decode.batch_size
    for window in windows(lines, WINDOW * batch_size):
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
        say(f"perplexity {math.exp(-total / tokens):.4f} over {tokens:,} tokens")
    return 0


def classify_lines(bundle: Bundle, lines: Iterator[str], options: DecodeOptions) -> int:
    batch_size, labels = options.generation.batch_size or bundle.config.decode.batch_size, bundle.config.data.labels
    options.refuse_others("a model that gives classes", ("batch_size",),
                          ("score", "interactive", "token_scores", "alignment", "draft"))
    for window in windows(lines, WINDOW * batch_size):
        filled = [i for i, line in enumerate(window) if line.strip()]
        found = bundle.class_probabilities([window[i] for i in filled], too_long=options.too_long,
                                           batch_size=batch_size)
        best = {i: (f"{row.max():.4f}", labels[int(row.argmax())]) for i, row in zip(filled, found, strict=True)}
        for i in range(len(window)):
            probability, label = best.get(i, ("", ""))
            sys.stdout.write(f"{probability}\t{label}\n" if options.scores else f"{label}\n")
        sys.stdout.flush()
    return 0


def say(text: str) -> None:
    """Tell the user on stderr."""
    print(text, file=sys.stderr, flush=True)
