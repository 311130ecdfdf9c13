"""What a training run is put together from: model, optimizer, data, evaluation, and where it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from tfm.cli.init_from import Start
from tfm.config import Config
from tfm.data import (
    BatchShape,
    Counts,
    EvalBatches,
    Splits,
    Tokenizer,
    TrainIterator,
    make_eval_batches,
    make_train_iterator,
)
from tfm.decoding.program import compiler_options
from tfm.models import build, init_params
from tfm.models.adapters import join_params, trainable
from tfm.parallel.exchange import first_alone, from_first, is_first
from tfm.parallel.kept_programs import kept_programs
from tfm.parallel.mesh import use_mesh
from tfm.parallel.pieces import make_in_pieces
from tfm.parallel.processes import batch_part, whole_copy
from tfm.parallel.rules import batch_shards, place_whole_batch, state_shardings
from tfm.parallel.watch import Watch
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
from tfm.training.loop import Run
from tfm.training.loss import Params, make_loss
from tfm.training.metrics import MetricsWriter
from tfm.training.optimizer import make_optimizer, make_schedule
from tfm.training.report import Reporter
from tfm.training.step import ByShape, TrainState, init_state, make_eval_step, make_train_step


class Peeked(Iterator[Any]):
    """A batch iterator of which the first batch was looked at; its position counts from the second one on."""

    def __init__(self, batches: Any) -> None:
        self._batches, self.first = batches, next(batches)
        self._held = [self.first]
        self.counts: Counts = batches.counts
        self.shapes: list[BatchShape] = batches.shapes

    def __next__(self) -> Any:
        return self._held.pop() if self._held else next(self._batches)

    def get_state(self) -> Any:
        """Position after the last batch given out."""
        if self._held:
            raise RuntimeError("the first batch was not given out yet")
        return self._batches.get_state()


@dataclass(frozen=True)
class Parts:
    """Makes the parts of a run from its config, data and tokenizer."""

    config: Config
    folder: Path
    mesh: Mesh
    splits: Splits
    tokenizer: Tokenizer
    reporter: Reporter
    start_from: Start | None = None
    """What the parameters start from."""
    time_out: float = 60.0
    """Seconds without a pulse after which another process is lost."""

    @cached_property
    def model(self) -> Any:
        """The Flax module."""
        return build(self.config.model)

    @property
    def cache_dir(self) -> Path:
        """Where tokens are kept."""
        given = self.config.data.cache_dir
        return Path(given) if given else self.folder / "tokens"

    def start(self, checkpoints: Checkpoints) -> tuple[Run, TrainState]:
        """The run and its state: new, or that of the newest checkpoint."""
        config, watch = self.config, Watch(self.folder / "processes", time_out=self.time_out)
        schedule = make_schedule(config)
        optimizer = make_optimizer(config.optimizer, schedule)
        batches = first_alone(self.training_batches, "training batches")
        program, shapes = self.initial(optimizer)
        restored = checkpoints.restore_newest(shapes)
        if restored is not None:
            batches.set_state(restored.data_state)
        loss = make_loss(self.model, config.model, smoothing=config.optimizer.label_smoothing)
        update = make_train_step(loss, optimizer, accumulate=config.optimizer.accumulate,
                                 ema_decay=config.optimizer.ema_decay, trainable=trainable(config.model))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        jitted: Any = jax.jit(update, donate_argnums=0, out_shardings=(shardings, None),
                              compiler_options=compiler_options())
        step = ByShape(jitted, kept_programs("training step", config.model, config.optimizer, config.train.steps))
        done = 0 if restored is None else int(restored.state.step)
        writer = MetricsWriter(self.folder, start_step=done) if is_first() else None
        peeked = Peeked(batches)
        run = Run(config, self.folder, self.mesh, step, peeked, schedule, None, checkpoints,
                  writer, self.reporter, watch, self.describe)
        if restored is None and jax.process_count() == 1:
            with use_mesh(self.mesh):
                step.begin(shapes, run.place(peeked.first))
        state = self.new_state(program, shardings) if restored is None else restored.state
        return replace(run, evaluate=self.evaluation()), state

    def training_batches(self) -> TrainIterator:
        """This process's part of the training batches."""
        index, count = batch_part(self.mesh)
        return make_train_iterator(self.config, self.tokenizer, self.splits, process_index=index, process_count=count,
                                   multiple_of=batch_shards(self.mesh) * self.config.optimizer.accumulate,
                                   cache_dir=self.cache_dir)

    def initial(self, optimizer: optax.GradientTransformation) -> tuple[ClosedJaxpr, TrainState]:
        """(program that makes the state before the first update, its shapes and shardings)."""
        config = self.config

        def fresh(given: Params) -> TrainState:
            return init_state(lambda key: join_params(init_params(config.model, key), given), optimizer,
                              config.train.seed, ema=config.optimizer.ema_decay is not None,
                              trainable=trainable(config.model))

        with use_mesh(self.mesh):
            given = {} if self.start_from is None else self.start_from.shapes()
            program, shapes = jax.make_jaxpr(fresh, return_shape=True)(given)
        shardings = state_shardings(shapes, self.mesh)
        return program, jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, shardings)

    def new_state(self, program: ClosedJaxpr, shardings: TrainState) -> TrainState:
        """The state before the first update. No array is ever made unsharded."""
        given = {} if self.start_from is None else self.given_params(self.start_from)
        places, form = jax.tree.flatten(shardings)
        return jax.tree.unflatten(form, make_in_pieces(program, places, *jax.tree.leaves(given)))

    def given_params(self, start: Start) -> Params:
        """The parameters that `train.init_from` gives: some, or all."""
        self.reporter.table("initial parameters", start.rows(self.config.model))
        return start.params(self.config.model, self.mesh)

    def evaluation(self) -> Any:
        """What happens at each evaluation, or None without a validation split."""
        if not len(self.splits.valid):
            return None
        batches = first_alone(self.validation_batches, "validation batches")
        loss = make_loss(self.model, self.config.model)
        jitted: Any = jax.jit(make_eval_step(loss), compiler_options=compiler_options())
        step = ByShape(jitted, kept_programs("evaluation step", self.config.model))
        task = self.translation()

        def evaluate(run: Run, params: Params, number: int, stop: StopCheck) -> dict[str, float]:
            placed = (place_whole_batch(batch, self.mesh) for batch in batches)
            with use_mesh(self.mesh):
                scores = validation_loss(step, params, placed, stop)
            if task is not None:
                scores["bleu"] = self.bleu(task, params, number, stop)
            return scores

        return evaluate

    def validation_batches(self) -> EvalBatches:
        """The validation split in batches, all rows on every process."""
        return make_eval_batches(self.config, self.tokenizer, self.splits, self.splits.valid,
                                 multiple_of=batch_shards(self.mesh), cache_dir=self.cache_dir)

    def bleu(self, task: Translation, params: Params, number: int, stop: StopCheck) -> float:
        """BLEU of the validation sentences; process 0 translates them and shows a few."""
        if jax.process_count() > 1:
            params = whole_copy(params, self.mesh)
        score = 0.0
        if is_first():
            with use_mesh(None if jax.process_count() > 1 else self.mesh):
                translations = translate_all(task, params, stop)
            score = corpus_bleu(translations, task.references)
            write_samples(self.folder, number, task, translations)
            self.reporter.say(sample_text(task, translations, self.config.train.samples))
        return from_first(score)

    def translation(self) -> Translation | None:
        """The validation sentences that are translated while training."""
        from tfm.bundle import Bundle, special_of_run

        config, count = self.config, self.config.train.eval_sentences
        if config.data.task != "translate" or not count:
            return None
        sources, references = (list(column[:count]) for column in self.splits.valid.columns)

        special = special_of_run(self.folder, config, self.tokenizer)

        def translate(params: Params, texts: list[str]) -> list[str]:
            bundle = Bundle(config, params, self.tokenizer, special)
            return bundle.translate(texts, too_long="cut")

        return Translation(translate, sources, references)

    def describe(self, batch: Mapping[str, np.ndarray]) -> list[str]:
        """The examples of a batch as text."""
        masks = {"source": "source_mask", "target": "target_mask", "tokens": "mask"}
        columns = [(batch[name], batch[mask]) for name, mask in masks.items() if name in batch]
        lines = []
        for i in range(len(batch["weights"])):
            rows = [ids[i][mask[i]].tolist() for ids, mask in columns]
            if any(rows):
                lines.append("\t".join(self.tokenizer.decode(row) for row in rows))
        return lines
