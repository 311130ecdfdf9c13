"""One long document on eight devices that split it: the same run as on one, through the whole training command."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfm.parallel.sequence import SIDES, in_ring_order, zigzag
from tfm.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONFIG = """
from tfm import Config, DataConfig, OptimizerConfig, TrainConfig, presets

def get_config():
    return Config(
        presets.llama(vocab_size=1, d_model=16, d_ff=32, num_heads=2, num_kv_heads=1, decoder_layers=2,
                      max_positions=1024),
        DataConfig(source="text", train=("FOLDER/long.txt",), task="causal_lm", batching="pack", max_length=1024,
                   tokens_per_batch=1024, tokenizer="byte", too_long="cut"),
        OptimizerConfig(name="adamw", schedule="constant", learning_rate=1e-2, warmup_steps=0),
        TrainConfig(steps=10, eval_every=10, checkpoint_every=10, log_every=1))
"""


def causal_pairs(order, devices):
    """How many (query, key) pairs with key <= query the queries of each device have."""
    return [int(np.sum(np.sort(part) + 1)) for part in np.split(order, devices)]


def test_each_device_has_the_same_causal_work():
    order = zigzag(48, 4)
    assert sorted(order.tolist()) == list(range(48))
    even, plain = causal_pairs(order, 4), causal_pairs(np.arange(48), 4)
    assert max(even) == min(even) and sum(even) == sum(plain) == 48 * 49 // 2
    assert max(plain) > 1.7 * max(even)


def test_without_a_mesh_a_batch_stays_as_it_is():
    batch = {name: np.arange(16).reshape(2, 8) for name in SIDES["tokens"]}
    assert all(after is batch[name] for name, after in in_ring_order(batch).items())


@pytest.mark.slow
def test_a_long_document_on_eight_devices_is_the_run_on_one(tmp_path):
    words = np.random.default_rng(0).choice(["ring", "turn", "key", "value", "round", "wait"], 2000)
    (tmp_path / "long.txt").write_text(" ".join(words) + "\n")
    (tmp_path / "config.py").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    losses = []
    for mesh, devices in (("data=1", 1), ("sequence=8", 8)):
        environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        command = ["train.py", str(tmp_path / "config.py"), "--workdir", str(tmp_path / mesh), "--mesh", mesh]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, text=True, capture_output=True,
                              timeout=300)
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in read_metrics(tmp_path / mesh)])
    assert len(losses[0]) == 10 and losses[0][-1] < 0.9 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
