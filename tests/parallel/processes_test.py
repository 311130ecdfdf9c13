"""Several processes over loopback: the same run as one process, one stop for all, going on with other numbers."""

import os
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
        DataConfig(generated_size=300, max_length=100, tokens_per_batch=700, buckets=1, tokenizer="byte",
                   too_long="cut"),
        OptimizerConfig(warmup_steps=10),
        TrainConfig(steps=6, eval_every=3, checkpoint_every=2, log_every=1, eval_sentences=2, samples=0))
"""
LIMIT = 600


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(CONFIG)
    return str(path)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(config_file, folder, processes, devices, *options):
    """One train.py for each process, with so many host devices each."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "train.py", config_file, "--workdir", str(folder), *options]
    port = free_port()
    several = [["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(processes), "--process-id", str(number)]
               for number in range(processes)]
    return [subprocess.Popen([*command, *(extra if processes > 1 else [])], env=environment, stderr=subprocess.PIPE,
                             text=True, cwd=Path(__file__).parents[2]) for extra in several]


def finish(running):
    """(exit codes, stderr texts); none runs on after the time limit."""
    deadline, texts = time.monotonic() + LIMIT, []
    try:
        for process in running:
            texts.append(process.communicate(timeout=max(deadline - time.monotonic(), 1))[1])
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], texts


def complete(config_file, folder, processes, devices, *options):
    codes, texts = finish(start(config_file, folder, processes, devices, *options))
    assert codes == [0] * processes, texts
    return texts


def wait_for_step(running, folder, step):
    deadline = time.monotonic() + LIMIT
    while not any(line["step"] >= step for line in read_metrics(folder)):
        assert all(process.poll() is None for process in running) and time.monotonic() < deadline
        time.sleep(0.05)



def assert_same_run(folder, other):
    lines, others = read_metrics(folder), read_metrics(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for name in ("loss", "valid_loss"):
        np.testing.assert_allclose([line[name] for line in lines if name in line],
                                   [line[name] for line in others if name in line], rtol=2e-5)
    last = str(checkpoint_steps(other)[-1])
    a, b = (load_checkpoint_params(run / "checkpoints" / last) for run in (folder, other))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), a, b)


@pytest.fixture(scope="module")
def alone(config_file, tmp_path_factory):
    """The run of one process with one device, never stopped."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    complete(config_file, folder, 1, 1)
    return folder


@pytest.mark.slow
def test_two_processes_are_one_run(config_file, tmp_path, alone):
    texts = complete(config_file, tmp_path / "run", 2, 2)
    assert "4 x cpu (data=4) in 2 processes" in texts[0]
    assert "step 6/6" in texts[0] and "step" not in texts[1]
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_processes_that_split_the_parameters(config_file, tmp_path, alone):
    complete(config_file, tmp_path / "run", 2, 2, "--mesh", "fsdp=2,tensor=2")
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_sigterm_to_one_stops_all_at_the_same_step(config_file, tmp_path):
    running = start(config_file, tmp_path / "run", 2, 1, "--train.steps", "100000")
    wait_for_step(running, tmp_path / "run", 3)
    running[1].send_signal(signal.SIGTERM)
    codes, texts = finish(running)
    assert codes == [143, 143], texts
    assert checkpoint_steps(tmp_path / "run")[-1] == read_metrics(tmp_path / "run")[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("processes, devices", [(1, 2), (4, 2)])
def test_goes_on_with_other_numbers_after_kill_9_of_one(config_file, tmp_path, alone, processes, devices):
    running = start(config_file, tmp_path / "run", 2, 4)
    wait_for_step(running, tmp_path / "run", 3)
    running[1].kill()
    codes, texts = finish(running)
    assert codes[0] != 0 and "process" in texts[0]
    complete(config_file, tmp_path / "run", processes, devices)
    assert_same_run(tmp_path / "run", alone)


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
