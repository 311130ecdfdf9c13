"""The training step's operations, bytes and compilations against a stored table: what a change must not make worse.

`python tests/training/costs_test.py` measures the table of the JAX that is installed, and writes it.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("costs_table.json")
# Fusion depends on the instruction set; this one is on every x86 processor of the last ten years.
FLAGS = "--xla_cpu_max_isa=AVX2 --xla_cpu_multi_thread_eigen=true"
TOLERANCE = 0.02


def shapes() -> dict[str, tuple[Any, dict[str, tuple[int, int]], dict[str, Any]]]:
    """name -> (config, batch arrays and their shapes, arguments of make_train_step)."""
    from tfm import ModelConfig
    from tfm.models import presets

    sizes = dict(d_model=32, d_ff=64, num_heads=2)
    pair = ModelConfig(vocab_size=512, encoder_layers=1, decoder_layers=1, attention_dropout_rate=0.1, **sizes)
    half = ModelConfig(vocab_size=512, encoder_layers=1, decoder_layers=1, dtype="bfloat16", **sizes)
    # Wide enough for the products over rows that large matrices have.
    wide = ModelConfig(vocab_size=512, encoder_layers=1, decoder_layers=1, d_model=256, d_ff=256, num_heads=2)
    decoder = presets.llama(512, decoder_layers=2, num_kv_heads=1, dropout_rate=0.1, **sizes)
    encoder = presets.bert_base(512, encoder_layers=2, **sizes)
    return {
        "translation 8x16": (pair, dict(source=(8, 16), target=(8, 16)), {}),
        "translation 4x32": (pair, dict(source=(4, 32), target=(4, 32)), {}),
        "translation bfloat16 8x16": (half, dict(source=(8, 16), target=(8, 16)), {}),
        "translation accumulated 8x16": (pair, dict(source=(8, 16), target=(8, 16)), dict(accumulate=2)),
        "decoder 4x64": (decoder, dict(tokens=(4, 64)), {}),
        "encoder 4x64": (encoder, dict(tokens=(4, 64)), {}),
        "translation wide 2x16": (wide, dict(source=(2, 16), target=(2, 16)), {}),
    }


def measure(name: str) -> dict[str, float]:
    """Counts of one shape: FLOPs and bytes of its program, and programs made by three steps."""
    import jax
    import numpy as np

    from tfm.models import build, init_params
    from tfm.training.loss import make_loss
    from tfm.training.optimizer import OptimizerConfig, make_optimizer
    from tfm.training.step import init_state, make_train_step

    config, arrays, options = shapes()[name]
    rule = make_optimizer(OptimizerConfig(), lambda count: 1e-3)
    abstract = jax.eval_shape(lambda: init_state(lambda key: init_params(config, key), rule, 0))
    state = jax.device_put(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract))
    shape = next(reversed(arrays.values()))
    batch = {name: np.ones(s, np.int32) for name, s in arrays.items()}
    batch |= {"mask" if name == "tokens" else f"{name}_mask": np.ones(s, bool) for name, s in arrays.items()}
    batch |= dict(labels=np.ones(shape, np.int32), weights=np.ones(shape, np.float32))
    step = jax.jit(make_train_step(make_loss(build(config), config, smoothing=0.1), rule, **options), donate_argnums=0)
    costs = step.lower(state, batch).compile().cost_analysis()
    for _ in range(3):
        state, _ = step(state, batch)
    return {"flops": costs["flops"], "bytes": costs["bytes accessed"], "programs": step._cache_size()}


def release() -> str:
    """The part of JAX's version that the counts depend on, such as 0.10."""
    import jax

    return ".".join(jax.__version__.split(".")[:2])


@functools.cache
def counts() -> dict[str, dict[str, float]]:
    """All shapes, measured in a process of its own, whose instruction set is fixed and whose programs are new."""
    with tempfile.TemporaryDirectory() as cache:  # a step's program is compiled once, and loaded when the step is run
        environment = os.environ | dict(XLA_FLAGS=FLAGS, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=cache,
                                        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        run = subprocess.run([sys.executable, __file__, "--print"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", json.loads(TABLE.read_text())["shapes"] if TABLE.exists() else [])
def test_a_step_costs_what_it_did(name: str) -> None:
    stored = json.loads(TABLE.read_text())["releases"]
    if release() not in stored:
        pytest.skip(f"nothing was compared: the table has counts for jax {', '.join(sorted(stored))}, and {release()} "
                    f"fuses in its own way. Run python tests/training/{Path(__file__).name} to add its counts")
    for kind, expected in stored[release()][name].items():
        found = counts()[name][kind]
        assert abs(found - expected) <= (0 if kind == "programs" else TOLERANCE * expected), (
            f"{kind} of {name}: {found:,.0f}, stored {expected:,.0f}; if that is meant, run {Path(__file__).name}")


def main() -> None:
    """Print the counts, or write them to the table."""
    if "--print" in sys.argv:
        print(json.dumps({name: measure(name) for name in shapes()}))
        return
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"releases": {}}
    table["releases"][release()] = counts()
    table["shapes"] = list(counts())
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
