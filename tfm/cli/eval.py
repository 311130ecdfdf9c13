"""`tfm eval RUN`: the figures of a run on its test split."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tfm.bundle import Bundle, load
from tfm.classification import class_figures, class_summary
from tfm.cli.decode_modes import say
from tfm.cli.decode_options import checkpoint_choice
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.cli.processes import ProcessOptions
from tfm.config import require
from tfm.data import Splits, Texts, load_splits
from tfm.evaluation import exact_reconstruction, pseudo_perplexity, summary, token_figures, translate_split
from tfm.generation import make_options
from tfm.parallel.compilation import enable_compilation_cache
from tfm.parallel.exchange import is_first
from tfm.parallel.host import keep_freed_memory
from tfm.parallel.processes import together


@dataclass(frozen=True)
class EvalOptions:
    """Measure a run on its test split: loss, perplexity and accuracy; BLEU and chrF for translation, F1 for classes."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    split: Literal["test", "valid"] = "test"
    """Which split."""
    limit: int | None = None
    """Only the first so many examples."""
    beam_size: int | None = None
    """Hypotheses kept; 1 is greedy. Default: the run's own."""
    alpha: float | None = None
    """Exponent of the length penalty. Default: the run's own."""
    batch_size: int | None = None
    """Sentences decoded together. Default: the run's own."""
    checkpoint: str = "newest"
    """A step, newest, or best (by BLEU on the validation split)."""
    average: int = 1
    """Mean of this many checkpoints (the paper: 5 for base, 20 for big)."""
    weights: Literal["bfloat16", "int8"] | None = None
    """Narrow the matrices of the model when it is loaded. Default: as they were trained."""
    output: Path | None = None
    """Folder for sources, translations, references (as sacrebleu's command reads them) and figures.json."""
    processes: Annotated[ProcessOptions, tyro.conf.arg(name="")] = field(default_factory=ProcessOptions)
    """Several processes measure a part each; the first one writes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return together(lambda: run_main(lambda: run_evaluation(parse(EvalOptions, arguments, prog="eval.py"))))


def run_evaluation(options: EvalOptions) -> int:
    """Measure as the options say and print; give the exit code."""
    keep_freed_memory()
    enable_compilation_cache()
    options.processes.start()
    require(options.limit is None or options.limit > 0, "--limit", options.limit, "it must be above 0")
    if not (options.run / "checkpoints").is_dir():
        raise FileNotFoundError(f"{options.run} is no run folder: it has no checkpoints/")
    bundle = load(options.run, checkpoint=checkpoint_choice(options.checkpoint), average=options.average,
                  weights=options.weights, say=say)
    splits = load_splits(bundle.config.data, bundle.config.train.seed, only=options.split)
    texts = splits.test if options.split == "test" else splits.valid
    require(len(texts) > 0, f"data.{options.split}", (), "the run's config names no files for it")
    generation = _generation(options, bundle.config.data.task)
    if options.output is not None and is_first():
        options.output.mkdir(parents=True, exist_ok=True)  # or a mistake would show when all is measured
    if options.limit is not None:
        texts = Texts([column[: options.limit] for column in texts.columns])
    figures: dict[str, Any]
    if bundle.config.data.task == "classify":
        figures = class_figures(bundle, splits, texts)
        rows = class_summary(figures)
    else:
        figures = token_figures(bundle, splits, texts)
        rows = list(summary(figures, bundle.config.data.task))
    for name, text in rows:
        print(f"{name:18} {text}", flush=True)
    figures |= _task_figures(bundle, splits, texts, options.output, generation)
    if options.output is not None and is_first():
        _write(options.output / "figures.json", json.dumps(figures, indent=1) + "\n")
    return 0


def _generation(options: EvalOptions, task: str) -> dict[str, Any]:
    """The options of generation that were given, checked before the work begins."""
    given = {name: getattr(options, name) for name in ("beam_size", "alpha", "batch_size")}
    chosen = {name: value for name, value in given.items() if value is not None}
    make_options(chosen)
    for name, value in chosen.items():
        require(task == "translate", f"--{name.replace('_', '-')}", value, f"this run's task is {task}, not translate")
    return chosen


def _task_figures(bundle: Bundle, splits: Splits, texts: Texts, output: Path | None,
                  generation: dict[str, Any]) -> dict[str, Any]:
    task = bundle.config.data.task
    if task in ("span_corruption", "infilling"):
        share = exact_reconstruction(bundle, splits, texts)
        print(f"{'exact':18} {share:.4f} of the examples reconstructed, of the first 100 at most")
        return {"exact": share}
    if task == "masked_lm":
        pseudo = pseudo_perplexity(bundle, splits, texts)
        print(f"{'pseudo-perplexity':18} {pseudo['pseudo_perplexity']:.4f} over {pseudo['pseudo_tokens']:,} tokens")
        return pseudo
    if task != "translate":
        return {}
    found = translate_split(bundle, list(texts), too_long="cut", progress=_progress(len(texts)), **generation)
    print(f"{found.bleu}\n  {found.bleu_signature}\n{found.chrf}\n  {found.chrf_signature}")
    if output is not None and is_first():
        for name in ("sources", "translations", "references"):
            _write(output / f"{name}.txt", "".join(f"{line}\n" for line in getattr(found, name)))
    return {"bleu": found.bleu.score, "bleu_signature": found.bleu_signature, "chrf": found.chrf.score,
            "chrf_signature": found.chrf_signature}


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _progress(total: int) -> Any:
    if not (sys.stderr.isatty() and is_first()):
        return None
    return lambda done: print(f"\r{done:,} of {total:,} translated", end="\n" if done == total else "",
                              file=sys.stderr, flush=True)
