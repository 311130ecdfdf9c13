"""`tfm train CONFIG --workdir RUN`: from a config file to a trained model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh

from tfm.cli.errors import run_main
from tfm.cli.garbage import no_collection
from tfm.cli.init_from import Start, match, open_source, take_tokenizer, with_source
from tfm.cli.options import parse
from tfm.cli.processes import ProcessOptions
from tfm.cli.train_parts import Parts, Peeked
from tfm.cli.train_summary import summary_rows, trace_rows
from tfm.config import Config, require
from tfm.config_json import load_config
from tfm.data import BatchShape, Counts, Splits, Tokenizer, build_tokenizer, class_names, load_splits, load_tokenizer
from tfm.models.adapters import split_params, trainable
from tfm.parallel.compilation import enable_compilation_cache
from tfm.parallel.exchange import first_alone, is_first, wait_for_all
from tfm.parallel.host import huge_pages_hint, huge_pages_later, keep_freed_memory, run_in_turn
from tfm.parallel.mesh import make_mesh, use_mesh
from tfm.parallel.processes import together
from tfm.parallel.rules import sharding_table
from tfm.training.checkpoint import Checkpoints, checkpoint_steps
from tfm.training.loop import Run, train
from tfm.training.metrics import plot_curves
from tfm.training.report import Reporter, duration, parameter_rows, program_memory
from tfm.training.run_folder import CONFIG, TOKENIZER, RunLock, open_run, resolve_config
from tfm.training.step import TrainState
from tfm.training.trace import Trace


@dataclass(frozen=True)
class TrainOptions:
    """Train a model. Running the same command on the same folder again goes on from its newest checkpoint."""

    config_file: tyro.conf.Positional[Path]
    """Python file whose get_config() gives the config, such as configs/quickstart.py."""
    workdir: Path
    """Run folder: config, tokenizer, checkpoints, metrics and samples are written there."""
    config: Annotated[Config, tyro.conf.arg(name="")]
    """The config of the file, with the options below put in."""
    mesh: str = ""
    """Devices by axis, such as data=2,fsdp=4; -1 takes those that are left. Empty: all devices on data."""
    init_from: str | None = None
    """Start from the parameters and the tokenizer of a run folder, a Hugging Face folder or a .gguf file; the same as
    --train.init-from."""
    dry_run: bool = False
    """Compile the step, print what would run and how each parameter is split, and stop."""
    profile: int = 0
    """Trace this many steps into RUN/profile, for TensorBoard or ui.perfetto.dev, and print the time of each part."""
    processes: Annotated[ProcessOptions, tyro.conf.arg(name="")] = field(default_factory=ProcessOptions)
    """Several processes as one run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return together(lambda: run_main(lambda: run_training(parse(TrainOptions, arguments, prog="train"), arguments)))


def run_training(options: TrainOptions, arguments: Sequence[str]) -> int:
    """Train as the options say; give the exit code."""
    with RunLock(options.workdir) as lock:
        return _run_training(options, arguments, lock)


def _run_training(options: TrainOptions, arguments: Sequence[str], lock: RunLock) -> int:
    require(options.profile >= 0, "--profile", options.profile, "it is a number of steps, 0 or more")
    if keep_freed_memory():
        huge_pages_later()
    enable_compilation_cache()
    options.processes.start()
    run_in_turn()
    mesh = make_mesh(options.mesh)
    reporter = Reporter(options.config.train.steps, silent=not is_first())
    with no_collection():
        config, splits, tokenizer, start_from = first_alone(
            lambda: prepare_run(options.workdir, starting_config(options), reporter.say, lock), "run folder")
        parts = Parts(config, options.workdir, mesh, splits, tokenizer, reporter, start_from,
                      time_out=options.processes.time_out)
        checkpoints = Checkpoints(options.workdir, keep=config.train.keep, say=reporter.say)
    try:
        with no_collection():
            run, state = parts.start(checkpoints)
            if options.profile and is_first():
                run = replace(run, trace=Trace(options.workdir, options.profile))
            announce(parts, run, state, options)
        if options.dry_run:
            return 0
        stopped = _train(run, state)
        if is_first():
            summarize(run, reporter)
    finally:
        checkpoints.close()
    if run.writer is not None:
        run.writer.close()
    wait_for_all("end of training")
    run.watch.close()
    if stopped:
        start = "python train.py" if Path(sys.argv[0]).name == "train.py" else "tfm train"
        command = f"{start} {shlex.join(arguments)}"
        reporter.say(f"stopped after a whole step, and saved. To go on: {command}")
        return 128 + stopped
    curves = plot_curves(options.workdir) if is_first() else None
    reporter.say(f"done: {config.train.steps} steps, checkpoints in {checkpoints.directory}, curves in {curves}")
    return 0


def summarize(run: Run, reporter: Reporter) -> None:
    """Print what the steps cost, and where a traced step's time went."""
    reporter.table("cost", summary_rows(run))
    if run.trace is not None:
        rows = trace_rows(run.trace, list(run.step.programs.values()))
        reporter.table("time of a step by part, over all threads", rows)
        reporter.say(f"trace in {run.trace.folder}" if rows else "the run ended before the steps to be traced")


def _train(run: Run, state: TrainState) -> int:
    """Train; give the signal that stopped the run. Where an exchange with other processes fails, say which is lost."""
    try:
        return train(run, state)[1]
    except jax.errors.JaxRuntimeError:
        run.watch.explain()
        raise


def starting_config(options: TrainOptions) -> Config:
    """The config with `--init-from` put in."""
    config, given = options.config, options.init_from
    if given is None:
        return config
    require(config.train.init_from in (None, given), "--init-from", given,
            f"train.init_from is {config.train.init_from!r}: give one of the two")
    return config.replace(train=replace(config.train, init_from=given))


def prepare_run(folder: Path, config: Config, say: Callable[[str], None],
                lock: RunLock) -> tuple[Config, Splits, Tokenizer, Start | None]:
    """Open the data, make or load the tokenizer, resolve the config and write both to the run folder.

    The last result is what the parameters start from; None: from random numbers, or from the run's own checkpoints.
    """
    splits = load_splits(config.data, config.train.seed)
    started = (folder / CONFIG).is_file() and (folder / TOKENIZER).is_file()
    given, source = config.train.init_from, None
    if given is not None and not checkpoint_steps(folder):
        source = open_source(given, say)
    if source is not None:
        config = with_source(config, source.model)
    elif given is not None and started:
        config = with_source(config, load_config(folder / CONFIG).model)
    folder.mkdir(parents=True, exist_ok=True)
    if is_first():
        lock.take()
    if started:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    elif source is not None:
        tokenizer = take_tokenizer(source, config)
    else:
        tokenizer = build_tokenizer(config.data, splits, folder / TOKENIZER, seed=config.train.seed)
    labels = (config.data.labels or class_names(splits)) if config.data.task == "classify" else ()
    config = resolve_config(config, tokenizer.vocab_size if given is None else config.model.vocab_size, labels)
    start = None if source is None else Start(source, match(source, config.model))
    if is_first():
        if source is not None and not started:
            source.save_files(folder)
        open_run(folder, config)
    return config, splits, tokenizer, start


def trained_rows(params: Any, pattern: str | None) -> list[tuple[str, str]]:
    """How many of the parameters are trained, where it is not all of them."""
    if pattern is None:
        return []
    return [("trained", f"{sum(leaf.size for leaf in jax.tree.leaves(split_params(params, pattern)[0])):,}")]


def fate_rows(counts: Counts) -> list[tuple[str, str]]:
    """How many texts of the train split are not used, or not whole, where there are any.

    Example:
        >>> fate_rows(Counts(texts=9, examples=6, tokens=60, skipped=2, empty=1))
        [('left out', '2 longer than data.max_length, 1 empty')]
    """
    left = [f"{number:,} {why}" for number, why in ((counts.skipped, "longer than data.max_length"),
                                                   (counts.empty, "empty")) if number]
    rows = [("left out", ", ".join(left))] if left else []
    return [*rows, ("cut", f"{counts.cut:,} to data.max_length")] if counts.cut else rows


def unsplit_rows(mesh: Mesh, shapes: Sequence[BatchShape]) -> list[tuple[str, str]]:
    """Batches of which every device computes all positions, since the axis `sequence` does not divide their length.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((1, 2), ("data", "sequence"))
        >>> unsplit_rows(mesh, [BatchShape(4, 25, 30), BatchShape(4, 40, 40)])
        [('not split', 'lengths that sequence=2 does not divide: 25')]
    """
    parts = mesh.shape["sequence"]
    odd = sorted({length for shape in shapes for length in shape.sides if length % parts})
    return [("not split", f"lengths that sequence={parts} does not divide: {', '.join(map(str, odd))}")] if odd else []


def announce(parts: Parts, run: Run, state: TrainState, options: TrainOptions) -> None:
    """Print the table of what will run; compiles the first step for its memory."""
    config, mesh, done = parts.config, parts.mesh, int(state.step)
    devices = mesh.devices.flatten()
    axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "data=1"
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    rows = [("config", str(options.config_file)), ("run folder", str(parts.folder.absolute())),
            ("data", f"{config.data.source}, {len(parts.splits.train):,} training examples, {config.data.task}"),
            *(fate_rows(run.batches.counts) if isinstance(run.batches, Peeked) else []),
            *(unsplit_rows(mesh, run.batches.shapes) if isinstance(run.batches, Peeked) else []),
            *parameter_rows(state.params),
            *trained_rows(state.params, trainable(config.model)),
            ("tokens per step", f"up to {config.data.tokens_per_batch:,} a side, padding included"),
            ("steps", f"{config.train.steps:,}" + (f", going on from step {done:,}" if done else "")),
            ("devices", f"{devices.size} x {devices[0].device_kind} ({axes}){processes}"),
            ("activations", config.model.dtype)]
    if done < config.train.steps and isinstance(run.batches, Peeked):
        with use_mesh(mesh):
            program = run.step.compiled(state, run.place(run.batches.first))
        memory = program_memory(program)
        rows.append(("expected memory", "unknown" if memory is None else f"{memory / 2**20:,.0f} MiB a device"))
        rows.append(("compiled in", duration(run.step.compile_seconds)))
    parts.reporter.table("training", rows)
    if options.dry_run:
        parts.reporter.table("parameters", sharding_table(state.params, mesh))
    hint = huge_pages_hint() if devices[0].platform == "cpu" else None
    if hint:
        parts.reporter.say(hint)
