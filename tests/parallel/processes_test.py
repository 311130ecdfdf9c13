"""Several processes over loopback: the same run as one process, one stop for all, going on with other numbers."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tfm.parallel.exchange import from_first
from tfm.parallel.mesh import make_mesh
from tfm.parallel.processes import batch_part, in_cluster, start_processes, whole_copy
from tfm.training.checkpoint import checkpoint_steps, load_checkpoint_params
from tfm.training.metrics import read_metrics

CONFIG = """
from tfm import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig

def get_config():
    return Config(
        ModelConfig(vocab_size=1, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1),
        DataConfig(generated_size=300, max_length=100, tokens_per_batch=900, buckets=1, tokenizer="byte",
                   too_long="cut"),
        OptimizerConfig(warmup_steps=10),
        TrainConfig(steps=6, eval_every=3, checkpoint_every=2, log_every=1, eval_sentences=0))
"""
LIMIT = 300
"""Seconds after which a test gives up on its processes, and ends them."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(CONFIG)
    return path


def start(command, processes, devices, *, stdin=None):
    """One process of a command for each of them, with so many host devices."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    several = [["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(processes), "--process-id", str(number),
                "--time-out", "10"] for number in range(processes)]
    return [subprocess.Popen([sys.executable, *map(str, command), *(extra if processes > 1 else [])], cwd=ROOT,
                             env=environment, stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for extra in several]


def train(config_file, folder, processes, devices, *options):
    return start(["train.py", config_file, "--workdir", folder, *options], processes, devices)


def finish(running, stdin=None):
    """(exit codes, what each wrote to stdout, to stderr); none runs on after the time limit."""
    deadline, outputs = time.monotonic() + LIMIT, []
    try:
        for process in running:
            outputs.append(process.communicate(stdin, timeout=max(deadline - time.monotonic(), 1)))
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], [out for out, _ in outputs], [error for _, error in outputs]


def complete(running, stdin=None):
    codes, outputs, errors = finish(running, stdin)
    assert codes == [0] * len(running), errors
    return outputs, errors


def wait_for_step(running, folder, step):
    deadline = time.monotonic() + LIMIT
    while not any(line["step"] >= step for line in read_metrics(folder)):
        if any(process.poll() is not None for process in running) or time.monotonic() > deadline:
            raise AssertionError(finish(running)[2])
        time.sleep(0.05)


def assert_same_run(folder, other):
    """The same losses at every step, so the same examples in each, and the same parameters at the end."""
    lines, others = read_metrics(folder), read_metrics(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for name in ("loss", "tokens", "valid_loss"):
        np.testing.assert_allclose([line[name] for line in lines if name in line],
                                   [line[name] for line in others if name in line], rtol=2e-5)
    last = str(checkpoint_steps(other)[-1])
    a, b = (load_checkpoint_params(run / "checkpoints" / last) for run in (folder, other))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), a, b)


def test_two_processes_are_one_run(tmp_path, tiny_config, tiny_run):
    """Two processes of two devices each do what the one process of `tiny_run` did."""
    _, errors = complete(train(tiny_config, tmp_path / "run", 2, 2, "--train.eval-sentences", "0"))
    assert "4 x cpu (data=4) in 2 processes" in errors[0]
    assert "step 3/3" in errors[0] and "step" not in errors[1]
    assert_same_run(tmp_path / "run", tiny_run)


@pytest.fixture(scope="module")
def alone(config_file, tmp_path_factory):
    """The run of one process with one device, never stopped."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    complete(train(config_file, folder, 1, 1))
    return folder


@pytest.fixture(scope="module")
def killed(config_file, tmp_path_factory):
    """A run of two processes with four devices each, of which one was killed between the steps 3 and 6."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    running = train(config_file, folder, 2, 4)
    wait_for_step(running, folder, 3)
    running[1].kill()
    codes, _, errors = finish(running)
    assert codes[0] not in (0, 143) and "process 1" in errors[0], errors[0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("processes, devices, mesh", [(1, 2, "data=2"), (4, 2, "fsdp=4,data=2"), (1, 1, "data=1")])
def test_goes_on_with_other_numbers_after_kill_9_of_one(config_file, tmp_path, alone, killed, processes, devices, mesh):
    shutil.copytree(killed, tmp_path / "run")
    complete(train(config_file, tmp_path / "run", processes, devices, "--mesh", mesh))
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_processes_that_split_the_parameters(config_file, tmp_path, alone):
    complete(train(config_file, tmp_path / "run", 2, 2, "--mesh", "fsdp=2,tensor=2"))
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_without_the_first_process_the_others_end(config_file, tmp_path):
    running = train(config_file, tmp_path / "run", 2, 1, "--train.steps", "100000")
    wait_for_step(running, tmp_path / "run", 1)
    running[0].kill()
    codes, _, errors = finish(running)
    assert codes[1] not in (0, 143) and re.search("process 0|task 0|leader", errors[1]), errors[1]


@pytest.mark.slow
def test_a_process_that_stands_still_is_named(config_file, tmp_path):
    running = train(config_file, tmp_path / "run", 2, 1, "--train.steps", "100000")
    wait_for_step(running, tmp_path / "run", 1)
    running[1].send_signal(signal.SIGSTOP)
    codes, _, errors = finish(running[:1])
    running[1].kill()
    assert codes[0] == 1 and "nothing was heard of process 1" in errors[0], errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[1], [0, 1]])
def test_sigterm_stops_all_at_the_same_step(config_file, tmp_path, asked):
    running = train(config_file, tmp_path / "run", 2, 1, "--train.steps", "100000")
    wait_for_step(running, tmp_path / "run", 3)
    for number in asked:
        running[number].send_signal(signal.SIGTERM)
    codes, _, errors = finish(running)
    assert codes == [143, 143], errors
    assert checkpoint_steps(tmp_path / "run")[-1] == read_metrics(tmp_path / "run")[-1]["step"]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_and_each_writes_its_examples(config_file, tmp_path):
    options = ["--optimizer.name", "sgd", "--optimizer.schedule", "constant", "--optimizer.learning-rate", "1e30"]
    codes, _, errors = finish(train(config_file, tmp_path / "run", 2, 1, *options))
    assert codes == [2, 2] and all("is nan at step" in error for error in errors), errors
    first, second = sorted((tmp_path / "run").glob("not_finite_*_process_*.txt"))
    assert first.read_text() and second.read_text() and first.read_text() != second.read_text()


@pytest.mark.slow
def test_a_mistake_ends_all(config_file, tmp_path):
    codes, _, errors = finish(train(config_file, tmp_path / "run", 2, 1, "--data.source", "text", "--data.train",
                                    "absent.txt"))
    assert codes == [2, 2] and all("absent.txt" in text.splitlines()[-1] for text in errors), errors


@pytest.mark.parametrize("given, message", [
    ({"coordinator": "127.0.0.1:1"}, "go together"), ({"num_processes": 2, "process_id": 0}, "go together"),
    ({"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 2}, "--process-id is 2")])
def test_what_is_wrong_with_process_options_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        start_processes(**given)


@pytest.mark.parametrize("variables, expected", [
    ({}, False), ({"SLURM_STEP_NUM_TASKS": "1"}, False), ({"SLURM_STEP_NUM_TASKS": "8"}, True),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, True), ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, True)])
def test_clusters_are_noticed(monkeypatch, variables, expected):
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert in_cluster() is expected


def test_alone_there_is_one_part_and_the_first_value_is_ours():
    mesh = make_mesh("data=1", jax.devices()[:1])
    assert batch_part(mesh) == (0, 1)
    assert from_first(0.1) == 0.1
    np.testing.assert_array_equal(whole_copy({"a": np.arange(3.0)}, mesh)["a"], np.arange(3.0))


def decode(run, lines, processes, *options):
    running = start(["decode.py", run, "--batch-size", "2", *options], processes, 1, stdin=True)
    for process in running[1:]:
        process.stdin.close()
        process.stdin = None
    return complete(running, lines)[0]


@pytest.mark.slow
def test_decode_and_eval_of_two_processes_write_what_one_writes(tiny_run, tmp_path):
    """Five windows of lines, of which three are the first process's; it alone reads and writes."""
    lines = "".join(f"line {number} {'x' * (number % 7)}\n" for number in range(150))
    short = ("--scores", "--max-length", "8")
    (one,), two = decode(tiny_run, lines, 1, *short), decode(tiny_run, lines, 2, *short)
    assert two == [one, ""] and one.count("\n") == 150
    pairs = "".join(f"ab\t{'c' * (1 + number % 5)}\n" for number in range(70))
    (one,), two = decode(tiny_run, pairs, 1, "--score"), decode(tiny_run, pairs, 2, "--score")
    assert two == [one, ""] and one.count("\n") == 70
    command = ["eval.py", tiny_run, "--limit", "100", "--batch-size", "2"]
    (one,), two = (complete(start(command, processes, 1))[0] for processes in (1, 2))
    assert two == [one, ""] and "BLEU" in one


@pytest.mark.slow
def test_a_line_that_cannot_be_decoded_ends_all(tiny_run):
    running = start(["decode.py", tiny_run, "--score"], 2, 1, stdin=True)
    running[1].stdin.close()
    running[1].stdin = None
    codes, _, errors = finish(running, "no tab\n")
    assert codes == [2, 2] and "line 1 of the input" in errors[0], errors
