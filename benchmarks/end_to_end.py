"""Speed of the training loop on a config's own text beside that of its bare step, as a JSON line.

    python benchmarks/end_to_end.py configs/text_small.py --data.train text.en text.de --steps 60

The loop is that of `train.py`: batches are made while a step runs, losses are fetched, checked and reported. The bare
step runs the same programs on the same batches, which lie on the device beforehand, before and after the loop. Both
leave compilation out. Tokens are real ones, padding not counted.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from tfm.cli.options import parse
from tfm.cli.train import TrainOptions, prepare_run
from tfm.cli.train_parts import Parts
from tfm.parallel.compilation import enable_compilation_cache
from tfm.parallel.host import keep_freed_memory, run_in_turn
from tfm.parallel.mesh import make_mesh, use_mesh
from tfm.training.checkpoint import Checkpoints
from tfm.training.loop import Run, row_tokens, train
from tfm.training.report import Reporter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=60)
    ours, others = parser.parse_known_args()
    keep_freed_memory()
    run_in_turn()
    enable_compilation_cache()
    with tempfile.TemporaryDirectory() as folder:
        options = parse(TrainOptions, [ours.config, "--workdir", folder, *others], prog="end_to_end")
        print(json.dumps(measure(options, Path(folder), ours.steps)))


def measure(options: Any, folder: Path, steps: int) -> dict[str, Any]:
    """The row: tokens/s of the loop and of the bare step."""
    periods = {name: steps for name in ("steps", "log_every", "eval_every", "checkpoint_every")}
    config = dataclasses.replace(options.config, train=dataclasses.replace(options.config.train, **periods))
    reporter = Reporter(steps, silent=True)
    config, splits, tokenizer, start = prepare_run(folder, config, reporter.say)
    parts = Parts(config, folder, make_mesh(), splits, tokenizer, reporter, start)
    with contextlib.closing(Checkpoints(folder, keep=1, say=reporter.say)) as checkpoints:
        run, state = parts.start(checkpoints)
        run = dataclasses.replace(run, evaluate=None)
        batches = list(itertools.islice(parts.training_batches(), steps))
        bare = [bare_speed(run, state, batches)]
        train(run, jax.tree.map(jax.numpy.copy, state))
        bare.append(bare_speed(run, state, batches))
    loop = run.meter.tokens / run.meter.seconds
    return dict(bench="end_to_end", config=Path(options.config_file).stem, steps=steps, shapes=len(run.meter.shapes),
                loop_tokens_per_s=round(loop), bare_tokens_per_s=[round(speed) for speed in bare],
                ratio=round(2 * loop / sum(bare), 3), waited=round(run.meter.waited / run.meter.seconds, 4),
                padding=round(1 - run.meter.tokens / run.meter.positions, 4))


def bare_speed(run: Run, state: Any, batches: list[Any]) -> float:
    """Tokens per second of the steps alone."""
    with use_mesh(run.mesh):
        placed = [run.place(batch) for batch in batches]
        for batch in placed:
            run.step.compiled(state, batch)
        state = jax.block_until_ready(jax.tree.map(jax.numpy.copy, state))
        start = time.perf_counter()
        for batch in placed:
            state, metrics = run.step(state, batch)
        jax.block_until_ready((state, metrics))
    return float(sum(row_tokens(batch).sum() for batch in batches)) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
