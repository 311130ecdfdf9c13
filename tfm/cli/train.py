"""`tfm train CONFIG --workdir RUN`: from a config file to a trained model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import Config
from tfm.data import Splits, Tokenizer, build_tokenizer, load_splits, load_tokenizer, make_eval_batches, make_train_iterator
from tfm.models import build, init_params
from tfm.parallel.compilation import enable_compilation_cache
from tfm.parallel.host import huge_pages_hint, keep_freed_memory
from tfm.parallel.mesh import make_mesh, use_mesh
from tfm.parallel.rules import batch_shards, state_shardings
from tfm.training.checkpoint import Checkpoints
from tfm.training.evaluation import (
    StopCheck,
    Translation,
    corpus_bleu,
    sample_text,
    translate_all,
    validation_loss,
    write_samples,
)
from tfm.training.loop import Run, train
from tfm.training.loss import Params, make_loss
from tfm.training.metrics import MetricsWriter, plot_curves
from tfm.training.optimizer import make_optimizer, make_schedule
from tfm.training.report import Reporter, duration, parameter_rows, program_memory
from tfm.training.run_folder import CONFIG, TOKENIZER, open_run, resolve_config
from tfm.training.step import ByShape, TrainState, init_state, make_eval_step, make_train_step


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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: run_training(parse(TrainOptions, arguments, prog="train.py"), arguments))


def run_training(options: TrainOptions, arguments: Sequence[str]) -> int:
    """Train as the options say; give the exit code."""
    keep_freed_memory()
    enable_compilation_cache()
    mesh = make_mesh(options.mesh)
    reporter = Reporter(options.config.train.steps)
    config, splits, tokenizer = prepare_run(options.workdir, options.config)
    parts = Parts(config, options.workdir, mesh, splits, tokenizer, reporter)
    checkpoints = Checkpoints(options.workdir, keep=config.train.keep, say=reporter.say)
    try:
        run, state = parts.start(checkpoints)
        parts.announce(run, state, options)
        _, stopped = train(run, state)
    finally:
        checkpoints.close()
    run.writer.close()
    if stopped:
        command = shlex.join(["python", "train.py", *arguments])
        reporter.say(f"stopped after a whole step, and saved. To go on: {command}")
        return 128 + stopped
    curves = plot_curves(options.workdir)
    reporter.say(f"done: {config.train.steps} steps, checkpoints in {checkpoints.directory}, curves in {curves}")
    return 0


def prepare_run(folder: Path, config: Config) -> tuple[Config, Splits, Tokenizer]:
    """Open the data, make or load the tokenizer, resolve the config and write both to the run folder."""
    splits = load_splits(config.data, config.train.seed)
    if (folder / CONFIG).is_file() and (folder / TOKENIZER).is_file():
        tokenizer = load_tokenizer(folder / TOKENIZER)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = build_tokenizer(config.data, splits, folder / TOKENIZER, seed=config.train.seed)
    config = resolve_config(config, tokenizer.vocab_size)
    open_run(folder, config)
    return config, splits, tokenizer


class Peeked(Iterator[Any]):
    """A batch iterator of which the first batch was looked at; its position counts from the second one on."""

    def __init__(self, batches: Any) -> None:
        self._batches, self.first = batches, next(batches)
        self._held = [self.first]

    def __next__(self) -> Any:
        return self._held.pop() if self._held else next(self._batches)

    def get_state(self) -> Any:
        """Position after the last batch given out."""
        if self._held:
            raise RuntimeError("the first batch was not given out yet")
        return self._batches.get_state()


@dataclass(frozen=True)
class Parts:
    """What a run is put together from."""

    config: Config
    folder: Path
    mesh: Mesh
    splits: Splits
    tokenizer: Tokenizer
    reporter: Reporter

    @property
    def cache_dir(self) -> Path:
        """Where tokens are kept."""
        given = self.config.data.cache_dir
        return Path(given) if given else self.folder / "tokens"

    @property
    def multiple_of(self) -> int:
        """Rows of a batch are a multiple of this: devices times micro-batches."""
        return batch_shards(self.mesh) * self.config.optimizer.accumulate

    def start(self, checkpoints: Checkpoints) -> tuple[Run, TrainState]:
        """The run and its state: new, or that of the newest checkpoint."""
        config = self.config
        model = build(config.model)
        schedule = make_schedule(config)
        optimizer = make_optimizer(config.optimizer, schedule)
        batches = make_train_iterator(config, self.tokenizer, self.splits, multiple_of=self.multiple_of,
                                      cache_dir=self.cache_dir)

        def fresh() -> TrainState:
            return init_state(lambda key: init_params(config.model, key), optimizer, config.train.seed,
                              ema=config.optimizer.ema_decay is not None)

        shapes = jax.eval_shape(fresh)
        shardings = state_shardings(shapes, self.mesh)
        placed = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, shardings)
        restored = checkpoints.restore_newest(placed)
        if restored is None:
            with use_mesh(self.mesh):
                state = jax.jit(fresh, out_shardings=shardings)()
        else:
            state = restored.state
            batches.set_state(restored.data_state)
        loss = make_loss(model, config.model, smoothing=config.optimizer.label_smoothing)
        update = make_train_step(loss, optimizer, accumulate=config.optimizer.accumulate,
                                 ema_decay=config.optimizer.ema_decay)
        step = ByShape(jax.jit(update, donate_argnums=0, out_shardings=(shardings, None)))
        writer = MetricsWriter(self.folder, start_step=int(state.step))
        run = Run(config, self.folder, self.mesh, step, Peeked(batches), schedule, self.evaluation(model), checkpoints,
                  writer, self.reporter, self.describe)
        return run, state

    def evaluation(self, model: Any) -> Any:
        """What happens at each evaluation, or None without a validation split."""
        config, reporter = self.config, self.reporter
        if not len(self.splits.valid):
            return None
        batches = make_eval_batches(config, self.tokenizer, self.splits, self.splits.valid,
                                    multiple_of=batch_shards(self.mesh), cache_dir=self.cache_dir)
        step = ByShape(jax.jit(make_eval_step(make_loss(model, config.model))))
        task = self.translation()

        def evaluate(run: Run, params: Params, number: int, stop: StopCheck) -> dict[str, float]:
            scores = validation_loss(step, params, (run.place(batch) for batch in batches), stop)
            if task is not None:
                translations = translate_all(task, params, stop)
                scores["bleu"] = corpus_bleu(translations, task.references)
                write_samples(self.folder, number, task, translations)
                reporter.say(sample_text(task, translations, config.train.samples))
            return scores

        return evaluate

    def translation(self) -> Translation | None:
        """The validation sentences that are translated while training."""
        from tfm.bundle import Bundle, run_special

        config, count = self.config, self.config.train.eval_sentences
        if config.data.task != "translate" or not count:
            return None
        pairs = self.splits.valid[:count]

        def translate(params: Params, texts: list[str]) -> list[str]:
            bundle = Bundle(config, params, self.tokenizer, run_special(config, self.tokenizer))
            return bundle.translate(texts, too_long="cut")

        return Translation(translate, [source for source, _ in pairs], [target for _, target in pairs])

    def describe(self, batch: Mapping[str, np.ndarray]) -> list[str]:
        """The examples of a batch as text."""
        columns = [(batch[name], batch[mask]) for name, mask in
                   (("source", "source_mask"), ("target", "target_mask"), ("tokens", "mask")) if name in batch]
        rows = range(len(columns[0][0]))
        return ["\t".join(self.tokenizer.decode(ids[i][mask[i]].tolist()) for ids, mask in columns)
                for i in rows if any(mask[i].any() for _, mask in columns)]

    def announce(self, run: Run, state: TrainState, options: TrainOptions) -> None:
        """Print the table of what will run; compiles the first step for its memory."""
        config, done = self.config, int(state.step)
        devices = self.mesh.devices.flatten()
        axes = ",".join(f"{name}={size}" for name, size in self.mesh.shape.items() if size > 1) or "data=1"
        rows = [("config", str(options.config_file)), ("run folder", str(self.folder.absolute())),
                ("data", f"{config.data.source}, {len(self.splits.train):,} training examples, {config.data.task}"),
                *parameter_rows(state.params),
                ("tokens per step", f"up to {config.data.tokens_per_batch:,} a side, padding included"),
                ("steps", f"{config.train.steps:,}" + (f", going on from step {done:,}" if done else "")),
                ("devices", f"{devices.size} x {devices[0].device_kind} ({axes})"), ("activations", config.model.dtype)]
        if done < config.train.steps and isinstance(run.batches, Peeked):
            with use_mesh(self.mesh):
                program = run.step.compiled(state, run.place(run.batches.first))
            memory = program_memory(program)
            rows.append(("expected memory", "unknown" if memory is None else f"{memory / 2**20:,.0f} MiB a device"))
            rows.append(("compiled in", duration(run.step.compile_seconds)))
        self.reporter.table("training", rows)
        if devices[0].platform == "cpu" and (hint := huge_pages_hint()) is not None:
            self.reporter.say(hint)
