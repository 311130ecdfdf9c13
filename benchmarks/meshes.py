"""The same training on several meshes of eight devices: losses side by side, and the memory of each by the compiler.

    python benchmarks/meshes.py [--steps 50] [--rows 8] [--length 128] [--meshes data=1 sequence=8 ...]

One JSON line for each mesh, then a table. The devices are those of the host's CPU, so times mean nothing here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax

from tfm.cli.plan import use_host_devices
from tfm.config import ModelConfig
from tfm.models import build, init_params
from tfm.parallel.mesh import make_mesh, parse_mesh, use_mesh
from tfm.parallel.rules import place_batch, state_shardings
from tfm.training.loss import make_loss
from tfm.training.report import program_memory
from tfm.training.step import init_state, make_train_step

MESHES = ("data=1", "data=8", "fsdp=8", "data=2,tensor=4", "sequence=8", "fsdp=2,tensor=2,sequence=2")
CONFIG = ModelConfig(vocab_size=256, d_model=64, d_ff=128, num_heads=4, num_kv_heads=4, encoder_layers=0,
                     decoder_layers=2, position="rotary", norm="rms", norm_position="pre", gated=True,
                     activation="silu", feed_forward_bias=False, dropout_rate=0.0)


def make_batch(rows: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Tokens that follow from those before: each is a multiple of the last but one, with some noise."""
    random = np.random.default_rng(seed)
    ids = np.zeros((rows, length + 1), np.int32)
    ids[:, :2] = random.integers(1, CONFIG.vocab_size, (rows, 2))
    for place in range(2, length + 1):
        noise = random.integers(1, CONFIG.vocab_size, rows)
        ids[:, place] = np.where(random.random(rows) < 0.1, noise, (5 * ids[:, place - 2] + 3) % CONFIG.vocab_size)
    return {"tokens": ids[:, :-1], "mask": np.ones((rows, length), bool), "labels": ids[:, 1:],
            "weights": np.ones((rows, length), np.float32)}


def run(spec: str, steps: int, rows: int, length: int) -> dict[str, object]:
    """Losses per token of all steps, and bytes of the program on each device."""
    sizes = parse_mesh(spec)
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    optimizer = optax.adam(3e-3)
    shapes = jax.eval_shape(lambda: init_state(lambda key: init_params(CONFIG, key), optimizer, 0))
    shardings = state_shardings(shapes, mesh)
    with use_mesh(mesh):
        state = jax.jit(lambda: init_state(lambda key: init_params(CONFIG, key), optimizer, 0),
                        out_shardings=shardings)()
        update = make_train_step(make_loss(build(CONFIG), CONFIG), optimizer)
        step = jax.jit(update, donate_argnums=0, out_shardings=(shardings, None)).lower(
            state, place_batch(make_batch(rows, length, 0), mesh)).compile()
        losses = []
        for seed in range(steps):
            state, sums = step(state, place_batch(make_batch(rows, length, seed), mesh))
            losses.append(float(sums["loss"] / sums["weight"]))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    return {"mesh": spec, "losses": losses, "state_bytes": held, "program_bytes": program_memory(step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    options = parser.parse_args()
    use_host_devices(8)
    found = []
    for spec in options.meshes:
        found.append(run(spec, options.steps, options.rows, options.length))
        print(json.dumps(found[-1]), flush=True)
    print("\n| step | " + " | ".join(str(x["mesh"]) for x in found) + " |\n|---" * 1 + "|---" * len(found) + "|")
    for step in sorted({1, 2, 5, *range(10, options.steps + 1, 10), options.steps}):
        if step <= options.steps:
            print(f"| {step} | " + " | ".join(f"{x['losses'][step - 1]:.5f}" for x in found) + " |")  # type: ignore[index]
    for name in ("state", "program"):
        print(f"| {name}, KiB a device | " + " | ".join(f"{x[name + '_bytes'] / 1024:,.0f}" for x in found) + " |")  # type: ignore[operator]


if __name__ == "__main__":
    main()
