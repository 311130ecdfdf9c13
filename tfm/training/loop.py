"""The training loop: host code only. Next batch, step, and what is due after it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tfm.config import Config
from tfm.parallel.exchange import wait_for_all
from tfm.parallel.mesh import use_mesh
from tfm.parallel.processes import batch_part
from tfm.parallel.rules import batch_shards, place_batch
from tfm.parallel.watch import Watch
from tfm.training.checkpoint import Checkpoints
from tfm.training.evaluation import EvaluationStopped, StopCheck, TrainingDivergedError
from tfm.training.loss import Params
from tfm.training.meter import Meter
from tfm.training.metrics import MetricsWriter
from tfm.training.report import Reporter
from tfm.training.step import ByShape, TrainState, pad_rows
from tfm.training.trace import Trace

LATE = 2
"""Steps that may be on their way while the host goes on; older ones are waited for and checked."""


@dataclass(frozen=True)
class Run:
    """What a training run consists of."""

    config: Config
    folder: Path
    mesh: Mesh
    step: ByShape
    """Compiled (state, batch) -> (state, metrics)."""
    batches: Iterator[Mapping[str, np.ndarray]]
    """Endless; `get_state` gives the position after the last batch."""
    schedule: Callable[[int], Any]
    evaluate: Callable[[Run, Params, int, StopCheck], dict[str, float]] | None
    """(run, params, step, stop) -> scores; `bleu`, or else `valid_loss`, decides which checkpoint is the best."""
    checkpoints: Checkpoints
    writer: MetricsWriter | None
    """None: another process writes."""
    reporter: Reporter
    watch: Watch
    describe: Callable[[Mapping[str, np.ndarray]], list[str]] = lambda batch: []
    """A batch's examples as text, for the message about a loss that is not finite."""
    trace: Trace | None = None
    """Profiles a few steps."""
    meter: Meter = field(default_factory=Meter)
    """What the steps cost."""

    def place(self, batch: Mapping[str, np.ndarray], stop: int = 0) -> dict[str, jax.Array]:
        """This process's rows of a batch on the mesh, padded to what devices and micro-batches divide.

        Args:
            batch: [rows, ...] arrays.
            stop: number of the signal that this process got; the step tells all processes.
        """
        shards = batch_shards(self.mesh) // batch_part(self.mesh)[1]
        rows = pad_rows(batch, shards * self.config.optimizer.accumulate)
        if jax.process_count() > 1:
            count = row_tokens(rows)
            rows |= {"stop": np.full(len(count), stop, np.int32), "count": count}
        return place_batch(rows, self.mesh)


def train(run: Run, state: TrainState) -> tuple[TrainState, int]:
    """Train from the state to the config's last step, or until Ctrl-C or SIGTERM.

    Args:
        run: all parts.
        state: at step 0 or restored; `run.batches` stands where it belongs to it.

    Returns:
        state, and the number of the signal that stopped the run (0: it is complete).

    Raises:
        TrainingDivergedError: a loss or gradient that is not finite; nothing was saved after it.
    """
    total, stopped = run.config.train.steps, 0
    done = int(state.step)
    window, several = _Window(run), jax.process_count() > 1
    run.reporter.start(done)
    try:
        with StopSignals() as stop:
            while done < total:
                with run.meter.waiting():
                    batch = next(run.batches)
                if run.trace is not None:
                    run.trace.before_step()
                with use_mesh(run.mesh):
                    state, metrics = run.step(state, run.place(batch, stop.received))
                if run.trace is not None:
                    run.trace.after_step(metrics)
                done += 1
                run.watch.at(done)
                window.add(done, metrics, batch)
                run.reporter.advance(done)
                stopped = window.stop if several else stop.received
                if stopped or _due(run.config, done):
                    _after_step(run, state, done, window, stopped, run.watch.moves if several else stop)
                if stopped:
                    break
    finally:
        run.reporter.stop()
        if run.trace is not None:
            run.trace.close()
    run.checkpoints.wait()
    return state, stopped if done < total else 0


class StopSignals:
    """Within it, Ctrl-C and SIGTERM are noted in `received`; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.received != 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


class _Window:
    """The steps since the last report: their sums, their time, and the batches whose metrics are not here yet."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pending: deque[tuple[int, Any, Mapping[str, np.ndarray]]] = deque()
        self.stop = 0
        """Signal that some process got, as the steps seen so far tell it."""
        self.restart()

    def restart(self) -> None:
        self._sums = {"loss": 0.0, "weight": 0.0}
        self._gradient_norm = 0.0
        self._tokens = 0
        self._start = time.perf_counter()
        self._compiled = self._run.step.compile_seconds

    def add(self, step: int, metrics: Any, batch: Mapping[str, np.ndarray]) -> None:
        self._pending.append((step, metrics, batch))
        if len(self._pending) > LATE:
            self._fetch()

    def close(self, step: int) -> dict[str, float]:
        """Wait for all steps, and give the means of the window."""
        while self._pending:
            self._fetch()
        compiling = self._run.step.compile_seconds - self._compiled
        seconds = max(time.perf_counter() - self._start - compiling, 1e-9)
        self._run.meter.seconds += seconds
        self._run.meter.tokens += self._tokens
        return {"loss": self._sums["loss"] / max(self._sums["weight"], 1.0),
                "learning_rate": float(self._run.schedule(step - 1)), "gradient_norm": self._gradient_norm,
                "tokens": float(self._tokens), "tokens_per_second": self._tokens / seconds}

    def _fetch(self) -> None:
        step, metrics, batch = self._pending.popleft()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                raise _diverged(self._run, step, name, values[name], batch)
        for name in self._sums:
            self._sums[name] += values[name]
        self._gradient_norm = values["gradient_norm"]
        self.stop = max(self.stop, int(values.get("stop", 0)))
        self._tokens += int(values.get("count", row_tokens(batch).sum()))
        self._run.meter.count(batch)


def row_tokens(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Real tokens of each row of a batch, source and target together: [B] int32.

    Example:
        >>> row_tokens({"mask": np.array([[True, True], [True, False]])}).tolist()
        [2, 1]
    """
    masks = [batch[name] for name in ("source_mask", "target_mask", "mask") if name in batch] or [batch["weights"]]
    counts = [np.count_nonzero(mask.reshape(len(mask), -1), axis=1) for mask in masks]
    return np.asarray(np.sum(counts, axis=0), np.int32)


def _due(config: Config, step: int) -> bool:
    train = config.train
    periods = (train.log_every, train.eval_every, train.checkpoint_every)
    return step == train.steps or any(step % period == 0 for period in periods)


def _after_step(run: Run, state: TrainState, step: int, window: _Window, stopped: int, stop: StopCheck) -> None:
    """Report, evaluate and save what is due. Only losses seen to be finite come before a checkpoint.

    What several processes do here follows from the step, and from figures that are the same on all of them; at the end
    they wait for each other, since an exchange of devices does not wait long.
    """
    train = run.config.train
    values = window.close(step)
    run.watch.at(step, "evaluation")
    run.checkpoints.poll()
    last = step == train.steps
    scores: dict[str, float] = {}
    failure: Exception | None = None
    if (last or step % train.eval_every == 0) and not stopped:
        scores, failure = _evaluate(run, state, step, stop)
    values |= scores
    run.reporter.report(step, values)
    if run.writer is not None:
        run.writer.write(step, values)
    score = _score(scores)
    run.watch.at(step, "checkpoint")
    if last or stopped or failure or step % train.checkpoint_every == 0 or run.checkpoints.beats(score):
        run.checkpoints.save(state, config=run.config, data_state=_position(run.batches), scores=score)
    wait_for_all(f"step {step}")
    if failure is not None:
        raise failure
    window.restart()


def _evaluate(run: Run, state: TrainState, step: int, stop: StopCheck) -> tuple[dict[str, float], Exception | None]:
    """The scores, if any, and what went wrong: what was trained is saved before that ends the run.

    A model that has diverged is not saved; and of several processes one that fails ends at once, since the others may
    wait for it.
    """
    if run.evaluate is None:
        return {}, None
    try:
        return run.evaluate(run, state.params if state.ema is None else state.ema, step, stop), None
    except EvaluationStopped:  # several processes never stop there: not all would
        return {}, None
    except Exception as error:
        if isinstance(error, TrainingDivergedError) or jax.process_count() > 1:
            raise
        return {}, error


def _score(scores: Mapping[str, float]) -> dict[str, float]:
    """What decides which checkpoint is the best: BLEU, or else the validation loss, the lower the better."""
    if "bleu" in scores:
        return {"bleu": scores["bleu"]}
    return {"minus_valid_loss": -scores["valid_loss"]} if "valid_loss" in scores else {}


def _position(batches: Any) -> Any:
    return batches.get_state()


def _diverged(run: Run, step: int, name: str, value: float, batch: Mapping[str, np.ndarray]) -> TrainingDivergedError:
    """The error, after the batch's examples were written beside the run; each process writes its own."""
    lines = run.describe(batch)
    part = f"_process_{jax.process_index()}" if jax.process_count() > 1 else ""
    path = run.folder / f"not_finite_{step}{part}.txt"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    first = f", such as {lines[0]!r}" if lines else ""
    return TrainingDivergedError(
        f"{name.replace('_', ' ')} is {value} at step {step}, learning rate {float(run.schedule(step - 1)):.3e}: the "
        f"run stops here and keeps the checkpoints before it. The step's {len(lines)} examples are in {path}{first}")
