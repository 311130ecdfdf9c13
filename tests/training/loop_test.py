"""The loop as a whole: stopping, going on, and refusing to go on."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from run_toy import run_toy
from toy import Batches

from tfm.training.checkpoint import checkpoint_steps
from tfm.training.evaluation import TrainingDivergedError, validation_loss
from tfm.training.loop import row_tokens
from tfm.training.metrics import plot_curves, read_metrics

STEPS = 30


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_toy(folder, STEPS)[0]


def start(folder, seconds=0.05):
    here = Path(__file__).parent
    return subprocess.Popen([sys.executable, str(here / "run_toy.py"), str(folder), str(STEPS), str(seconds)],
                            stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])})


def wait_for_checkpoint(process, folder, step):
    deadline = time.monotonic() + 300
    while step not in checkpoint_steps(folder):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.02)


def without_speed(lines):
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def test_goes_on_bit_for_bit_after_kill_9(tmp_path, whole):
    process = start(tmp_path)
    wait_for_checkpoint(process, tmp_path, 10)
    time.sleep(0.2)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert max(checkpoint_steps(tmp_path)) < STEPS
    state, stopped = run_toy(tmp_path, STEPS)
    assert stopped == 0
    assert same(state, whole[1])
    assert without_speed(read_metrics(tmp_path)) == without_speed(read_metrics(whole[0]))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_exit(tmp_path, whole, number, code):
    process = start(tmp_path)
    wait_for_checkpoint(process, tmp_path, 10)
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == code
    assert checkpoint_steps(tmp_path)[-1] == read_metrics(tmp_path)[-1]["step"] < STEPS
    state, _ = run_toy(tmp_path, STEPS)
    assert same(state, whole[1])


def test_metrics_and_curves(whole):
    lines = read_metrics(whole[0])
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25, 30]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"loss", "learning_rate", "gradient_norm", "tokens_per_second"} <= set(lines[0])
    picture = plot_curves(whole[0])
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert list(whole[0].glob("events.out.tfevents.*"))


def test_event_file_holds_the_scalars(whole):
    """Read as the TFRecord format is specified: length, CRC, an Event message, CRC."""
    from tensorboardX.proto.event_pb2 import Event

    content, losses = next(whole[0].glob("events.out.tfevents.*")).read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12:12 + length])
        losses += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
        content = content[16 + length:]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in read_metrics(whole[0])]


class Poisoned(Batches):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def __next__(self):
        batch = super().__next__()
        if self.position == self.step:
            batch["features"][1, 0, 0] = np.nan
        return batch


@pytest.mark.parametrize("step", [12, 20])
def test_nan_stops_before_it_is_saved(tmp_path, step):
    with pytest.raises(TrainingDivergedError) as caught:
        run_toy(tmp_path, STEPS, batches=Poisoned(step), describe=lambda batch: [f"row {i}" for i in range(8)])
    message = str(caught.value)
    assert f"nan at step {step}" in message and "5.000e-02" in message and "row 0" in message
    assert checkpoint_steps(tmp_path) == [10]
    assert (tmp_path / f"not_finite_{step}.txt").read_text().count("row") == 8
    run_toy(tmp_path, STEPS)
    assert checkpoint_steps(tmp_path) == [20, 30]


def test_an_evaluation_that_fails_loses_nothing(tmp_path, whole):
    def evaluate(run, params, step, stop):
        raise OSError("no space left for samples")

    for steps in ([10], [10, 20]):
        with pytest.raises(OSError, match="no space left"):
            run_toy(tmp_path, STEPS, evaluate=evaluate, checkpoint_every=STEPS)
        assert checkpoint_steps(tmp_path) == steps and read_metrics(tmp_path)[-1]["step"] == steps[-1]
    assert same(run_toy(tmp_path, STEPS)[0], whole[1])


def test_a_model_without_a_finite_validation_loss_is_not_saved(tmp_path):
    def evaluate(run, params, step, stop):
        step_loss = {"loss": np.float32(np.nan if step == 20 else 1.0), "weight": np.float32(1.0)}
        return validation_loss(lambda params, batch: step_loss, params, [None])

    with pytest.raises(TrainingDivergedError, match="validation loss is nan"):
        run_toy(tmp_path, STEPS, evaluate=evaluate)
    assert checkpoint_steps(tmp_path) == [10]


def test_newest_and_best_checkpoints_stay(tmp_path):
    bleu = {10: 7.0, 20: 3.0, 30: 5.0, 40: 6.0, 50: 4.0}
    run_toy(tmp_path, 50, evaluate=lambda run, params, step, stop: {"valid_loss": 1.0, "bleu": bleu[step]})
    assert checkpoint_steps(tmp_path) == [10, 40, 50]
    assert [line["bleu"] for line in read_metrics(tmp_path) if "bleu" in line] == list(bleu.values())


def test_a_finished_run_trains_no_further(tmp_path, whole):
    before = json.dumps(read_metrics(whole[0]))
    state, _ = run_toy(whole[0], STEPS)
    assert same(state, whole[1]) and json.dumps(read_metrics(whole[0])) == before


def test_tokens_are_counted_by_masks():
    batch = {"source_mask": np.array([[True, False], [True, True]]), "target_mask": np.array([[True], [False]])}
    assert row_tokens(batch).sum() == 4
