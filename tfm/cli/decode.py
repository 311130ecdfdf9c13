"""`tfm decode RUN < source.txt > out.txt`: a line out for each line in, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import jax

from tfm.bundle import Bundle, load
from tfm.cli.decode_modes import WINDOW, classify_lines, converse, say, score_lines, windows
from tfm.cli.decode_options import DecodeOptions, checkpoint_choice, own_beams
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import require
from tfm.nn.cache import cache_bytes
from tfm.parallel.compilation import enable_compilation_cache
from tfm.parallel.exchange import spread
from tfm.parallel.host import huge_pages_later, keep_freed_memory
from tfm.parallel.processes import together
from tfm.search import Result

Written = list[tuple[str, Result | None]]  # the outputs of one line, best first


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return together(lambda: run_main(lambda: run_decoding(parse(DecodeOptions, arguments, prog="decode.py"))))


def run_decoding(options: DecodeOptions) -> int:
    """Decode standard input as the options say; give the exit code."""
    if keep_freed_memory():
        huge_pages_later()
    enable_compilation_cache()
    options.processes.start()
    require(sys.stdin is not None and sys.stdout is not None, "a standard stream", "closed",
            "lines are read from standard input and written to standard output")
    bundle = load(options.model, checkpoint=checkpoint_choice(options.checkpoint), average=options.average,
                  weights=options.weights, say=say)
    draft = None if options.draft is None else load(options.draft, weights=options.weights, say=say)
    if options.verbose:
        say(_describe(bundle, options))
    lines = read_lines(sys.stdin.buffer, replace=options.replace_invalid)
    if bundle.model.num_classes:
        return classify_lines(bundle, lines, options)
    if options.score:
        return score_lines(bundle, lines, options)
    if options.interactive:
        return converse(bundle, lines, options)
    return _write_outputs(bundle, draft, lines, options.filled(bundle))


def _write_outputs(bundle: Bundle, draft: Bundle | None, lines: Iterator[str], options: DecodeOptions) -> int:
    drafted, taken = 0, 0

    def write(item: tuple[int, list[str]]) -> tuple[str, int, int]:
        (first, window), counts = item, [0, 0]

        def count(accepted: Any) -> None:
            counts[:] = counts[0] + int(accepted.drafted), counts[1] + int(accepted.accepted)

        outputs = decode_lines(bundle, window, options, first, draft=draft, accepted=count, scored=options.scores)
        pairs = _alignments(bundle, window, outputs) if options.alignment else [""] * len(window)
        numbered = enumerate(zip(outputs, pairs, strict=True), start=first)
        printed = "".join(format_outputs(written, number, options, pair) for number, (written, pair) in numbered)
        return printed, counts[0], counts[1]

    for printed, guessed, right in spread(windows(lines, WINDOW * (options.generation.batch_size or 1)), write):
        sys.stdout.write(printed)
        sys.stdout.flush()
        drafted, taken = drafted + guessed, taken + right
    if drafted:
        say(f"{taken:,} of {drafted:,} drafted tokens accepted ({taken / drafted:.1%})")
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


def decode_lines(bundle: Bundle, lines: Sequence[str], options: DecodeOptions, first: int,
                 **how: Any) -> list[Written]:
    """The outputs of each line, whose numbers begin at `first`; a blank line gives blank texts without a result."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    rows = []
    for i in filled:
        try:
            rows.append(bundle.source_ids(lines[i], too_long=options.too_long))
        except ValueError as error:
            raise ValueError(f"line {first + i + 1} of the input: {error}") from error
    chosen = replace(options.generation, seed=options.generation.seed + first)
    outputs: list[Written] = [[("", None)] * chosen.n_best for _ in lines]
    for i, written in zip(filled, bundle.write(rows, chosen, progress=_progress(first), **how), strict=True):
        outputs[i] = [(_one_line(text), result) for text, result in written]
    return outputs


def format_outputs(written: Written, number: int, options: DecodeOptions, pairs: str = "") -> str:
    """What is printed for one line: its best output, or its n best with their number and score.

    The n best are lines `number ||| text ||| score`, with ` ||| ` and the tokens' log-probabilities behind them where
    asked for, and ` ||| unfinished` where the limit cut an output off.
    """
    if options.generation.n_best == 1:
        text, result = written[0]
        return f"{_score(result)}\t{text}{pairs}\n" if options.scores else f"{text}{pairs}\n"
    printed = ""
    for text, result in written:
        fields = [str(number), text, _score(result)]
        if result is not None and options.token_scores:
            fields.append(" ".join(f"{value:.4f}" for value in result.log_probs))
        if result is not None and not result.finished:
            fields.append("unfinished")
        printed += " ||| ".join(fields) + "\n"
    return printed


def _alignments(bundle: Bundle, lines: Sequence[str], outputs: Sequence[Written]) -> list[str]:
    """` ||| 0-0 1-2 ||| 0.83` for each line: pairs of words, and how sure the attention is of them."""
    found = bundle.align(lines, [written[0][0] for written in outputs])
    return [f" ||| {' '.join(f'{i}-{j}' for i, j in pairs)} ||| {sure:.4f}" for pairs, sure in found]


def _score(result: Result | None) -> str:
    return "" if result is None else f"{result.score:.4f}"


def _one_line(text: str) -> str:
    return " ".join(text.split("\n")) if "\n" in text else text


def _progress(first: int) -> Callable[[int], None] | None:
    if not sys.stderr.isatty():
        return None
    return lambda done: print(f"\r{first + done:,} lines", end="", file=sys.stderr, flush=True)


def _describe(bundle: Bundle, options: DecodeOptions) -> str:
    model, generation = bundle.model, options.generation
    beams, length = generation.beam_size or own_beams(bundle), generation.max_length or 256
    size = cache_bytes(model, beams, length, dtype=generation.cache_dtype)
    return (f"{options.model}: {sum(x.size for x in jax.tree.leaves(bundle.params)):,} parameters, {model.dtype}; "
            f"cache of a sentence with {beams} hypotheses of {length} tokens: {size:,} bytes")
