"""Shared by all tests: a persistent compilation cache, hypothesis without time limits, one tiny trained run."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "tfm-test-jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("tfm", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tfm")

MAPPINGS = 30_000
"""Compiled programs hold memory mappings, and with 65,530 of them, which Linux gives a process, compiling crashes."""
_tests = itertools.count(1)


def pytest_runtest_teardown():
    """Every ten tests: forget the compiled programs where they are many."""
    maps = Path("/proc/self/maps")
    if next(_tests) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()


TINY_CONFIG = """
from tfm import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig

def get_config():
    return Config(
        ModelConfig(vocab_size=1, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1),
        DataConfig(generated_size=300, max_length=100, tokens_per_batch=400, buckets=1, tokenizer="byte",
                   too_long="cut"),
        OptimizerConfig(warmup_steps=10),
        TrainConfig(steps=3, eval_every=3, checkpoint_every=1, log_every=1, eval_sentences=2, samples=1))
"""


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory):
    """The config file of the tiny run."""
    path = tmp_path_factory.mktemp("configs") / "tiny.py"
    path.write_text(TINY_CONFIG)
    return path


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, tiny_config):
    """The run folder of a translator after three steps: it knows nothing, but all of its files are there."""
    from tfm.cli.train import main

    folder = tmp_path_factory.mktemp("tiny") / "run"
    assert main([str(tiny_config), "--workdir", str(folder)]) == 0
    return folder
