"""The same losses on every mesh: all families, eight host devices, uneven batches."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

PROGRAM = """
import dataclasses, json, sys
import jax, numpy as np, optax
from tfm.config import ModelConfig
from tfm.models import build, init_params
from tfm.parallel.mesh import make_mesh, use_mesh
from tfm.parallel.rules import batch_shards, place_batch, state_shardings
from tfm.training.loss import make_loss
from tfm.training.step import init_state, make_train_step, pad_rows

BASE = ModelConfig(vocab_size=40, d_model=16, d_ff=32, num_heads=4, encoder_layers=1, decoder_layers=1,
                   attention_dropout_rate=0.1)
FAMILIES = {
    "transformer": BASE,
    "t5": dataclasses.replace(BASE, position="t5", norm="rms", norm_position="pre", gated=True, tie_embeddings="none"),
    "gpt2": dataclasses.replace(BASE, encoder_layers=0, position="learned", attention_bias=True, norm_position="pre"),
    "llama": dataclasses.replace(BASE, encoder_layers=0, position="rotary", num_kv_heads=2, norm="rms", gated=True,
                                 norm_position="pre", scan_layers=True),
    "bert": dataclasses.replace(BASE, decoder_layers=0, position="learned", token_types=2, token_head=True,
                                logit_bias=True, embedding_norm=True),
}

def make_batch(config, seed, rows=7, length=8):
    random = np.random.default_rng(seed)
    ids = lambda: random.integers(1, 40, (rows, length)).astype(np.int32)
    mask = np.arange(length) < random.integers(1, length + 1, (rows, 1))
    if config.is_encoder_decoder:
        return {"source": ids(), "source_mask": mask, "target": ids(), "target_mask": mask, "labels": ids(),
                "weights": mask.astype(np.float32)}
    return {"tokens": ids(), "mask": mask, "labels": ids(), "weights": mask.astype(np.float32)}

def losses(config, spec, devices):
    mesh = make_mesh(spec, jax.devices()[:devices])
    optimizer = optax.adam(0.01)
    fresh = lambda: init_state(lambda key: init_params(config, key), optimizer, 0)
    shardings = state_shardings(jax.eval_shape(fresh), mesh)
    with use_mesh(mesh):
        state = jax.jit(fresh, out_shardings=shardings)()
        loss = make_loss(build(config), config, smoothing=0.1)
        step = jax.jit(make_train_step(loss, optimizer), out_shardings=(shardings, None), donate_argnums=0)
        out = []
        for seed in range(3):
            state, metrics = step(state, place_batch(pad_rows(make_batch(config, seed), 8), mesh))
            out.append(float(metrics["loss"] / metrics["weight"]))
    split = max(x.size / x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params))
    return {"losses": out, "split": split}

family, specs = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps({spec: losses(FAMILIES[family], spec, devices) for spec, devices in specs.items()}))
"""

ALL = {"data=1": 1, "data=8": 8, "fsdp=8": 8, "data=2,tensor=4": 8, "fsdp=2,tensor=2,sequence=2": 8}
MIXED = {"data=1": 1, "fsdp=2,tensor=2,sequence=2": 8}


def compare(family, meshes):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                                "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, family, json.dumps(meshes)], env=environment, text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    one = found["data=1"]["losses"]
    assert one[0] != one[1]
    for spec in meshes:
        np.testing.assert_allclose(found[spec]["losses"], one, rtol=2e-5, err_msg=spec)
    return found


def test_a_decoder_on_four_axes():
    assert compare("gpt2", MIXED)["fsdp=2,tensor=2,sequence=2"]["split"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "llama", "bert"])
def test_every_family_on_four_axes(family):
    compare(family, MIXED)


@pytest.mark.slow
def test_the_paper_model_on_every_mesh():
    found = compare("transformer", ALL)
    assert found["fsdp=8"]["split"] == 8 and found["data=2,tensor=4"]["split"] == 4
