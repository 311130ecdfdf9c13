"""Trains the toy model in a process of its own: python run_toy.py RUN STEPS [seconds a step]."""

import sys
import time
from pathlib import Path

import jax
import optax
from toy import WHOLE, Batches, init, loss

from tfm.cli.errors import run_main
from tfm.config import Config, ModelConfig, TrainConfig
from tfm.parallel.mesh import make_mesh
from tfm.parallel.rules import state_shardings
from tfm.parallel.watch import Watch
from tfm.training.checkpoint import Checkpoints
from tfm.training.loop import Run, train
from tfm.training.metrics import MetricsWriter
from tfm.training.report import Reporter
from tfm.training.step import ByShape, init_state, make_train_step


def make_config(steps, checkpoint_every=10):
    return Config(ModelConfig(vocab_size=3), train=TrainConfig(
        steps=steps, eval_every=10, checkpoint_every=checkpoint_every, log_every=5, keep=2))


def run_toy(folder, steps, *, batches=None, evaluate=None, seconds=0.0, describe=lambda batch: [], checkpoint_every=10):
    """(final state, signal that stopped it)."""
    config, mesh = make_config(steps, checkpoint_every), make_mesh("data=1", jax.devices()[:1])
    optimizer, reporter, batches = optax.adam(0.05), Reporter(steps), batches or Batches()
    checkpoints = Checkpoints(folder, keep=config.train.keep, say=reporter.say)
    shapes = jax.eval_shape(lambda: init_state(init, optimizer, 0, ema=True))
    shardings = state_shardings(shapes, mesh, WHOLE)
    placed = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, shardings)
    try:
        restored = checkpoints.restore_newest(placed)
        if restored is None:
            state = jax.jit(lambda: init_state(init, optimizer, 0, ema=True), out_shardings=shardings)()
        else:
            state = restored.state
            batches.set_state(restored.data_state)
        step = ByShape(jax.jit(make_train_step(loss, optimizer, ema_decay=0.9), donate_argnums=0,
                               out_shardings=(shardings, None)))

        def slow_step(state, batch):
            time.sleep(seconds)
            return step(state, batch)

        slow_step.compile_seconds = 0.0
        writer = MetricsWriter(folder, start_step=int(state.step))
        result = train(Run(config, folder, mesh, slow_step, batches, lambda count: 0.05, evaluate, checkpoints, writer,
                           reporter, Watch(folder / "processes"), describe), state)
        writer.close()
        return result
    finally:
        checkpoints.close()


def main():
    _, stopped = run_toy(Path(sys.argv[1]), int(sys.argv[2]), seconds=float(sys.argv[3]))
    return 128 + stopped if stopped else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
