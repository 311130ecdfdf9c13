"""Plans against the compiler's analysis, the traced program and hand counts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tfm.analysis.costs import PARTS, training_flops
from tfm.analysis.devices import DEVICES, sustained_flops
from tfm.analysis.hlo import Collective
from tfm.analysis.plan import Memory, Plan, compiled_mesh
from tfm.analysis.program import matmul_flops
from tfm.models import build, init_params, presets
from tfm.training.loss import make_loss

PRESETS = ("transformer_base", "transformer_big", "bert_base", "gpt2", "t5_small", "bart_base", "marian", "llama",
           "mistral")
EIGHT_DEVICES = """
import json, jax
from jax.sharding import NamedSharding, PartitionSpec
from tfm.analysis.hlo import parse_program
from tfm.ops.losses import fused_cross_entropy_sum
from tfm.parallel.mesh import make_mesh
from tfm.cli.plan import compile_step, use_host_devices
from tfm.analysis.plan import make_plan
from tfm.analysis.devices import find_device
from tfm.config import Config, DataConfig, ModelConfig
use_host_devices(8)
config = Config(ModelConfig(vocab_size=64, d_model=16, d_ff=32, num_heads=4, encoder_layers=1, decoder_layers=1),
                DataConfig(max_length=8, tokens_per_batch=64))
found = {}
for name, mesh in (("data", {"data": 8}), ("mixed", {"data": 2, "fsdp": 2, "tensor": 2})):
    mesh = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1} | mesh
    state, batch, compiled = compile_step(config, mesh, 8, 8)
    plan = make_plan(config, mesh, find_device("h100"), state, batch, compiled)
    stats = compiled.memory_analysis()
    found[name] = {"memory": vars(plan.memory), "arguments": stats.argument_size_in_bytes, "all": plan.memory.total,
                   "compiler": stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes
                   - stats.alias_size_in_bytes, "params": sum(x.size for x in jax.tree.leaves(state.params)),
                   "reduced": sum(c.size * c.count for c in plan.collectives if c.kind == "all-reduce"),
                   "flops": plan.flops}

mesh = make_mesh("data=8", jax.devices())
spread, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in (
    ((16, 64, 8), "float32", spread), ((32, 8), "float32", whole), ((16, 64), "int32", spread))]
for parts in ((1, 1), (8, 1)):
    loss = lambda hidden, embedding, targets: fused_cross_entropy_sum(hidden, embedding, targets, chunk_size=64,
                                                                      parts=parts)
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().as_text()
    found[f"loss in {parts[0]}"] = sum(c.size * c.count for c in parse_program(text).collectives())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def eight_devices():
    found = subprocess.run([sys.executable, "-c", EIGHT_DEVICES], capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", ["data", "mixed"])
def test_memory_is_the_compilers(eight_devices, mesh):
    """All but the step's number (4 bytes) and the random key (8) is accounted for, part by part."""
    found = eight_devices[mesh]
    memory = found["memory"]
    assert found["arguments"] == memory["parameters"] + memory["optimizer"] + memory["batch"] + 12
    assert found["all"] == found["compiler"] - 12


def test_copies_sum_their_gradients(eight_devices):
    """On data=8 every gradient is summed over the devices at least once, and parameters are whole on each."""
    found = eight_devices["data"]
    assert found["memory"]["parameters"] == 4 * found["params"]
    assert found["reduced"] >= 4 * found["params"]


def test_the_losss_gradient_of_the_embedding_is_summed_once(eight_devices):
    """[32, 8] in float32 and nothing else of size, in place of once for each of the 16 chunks."""
    assert 4 * 32 * 8 <= eight_devices["loss in 8"] <= 1.1 * 4 * 32 * 8
    assert eight_devices["loss in 1"] >= 16 * 4 * 32 * 8


@pytest.mark.parametrize("name", PRESETS)
def test_flops_of_presets_are_those_of_the_traced_step(name):
    """The real loss and its gradient, every product counted; two layers of each stack, the published widths."""
    config = getattr(presets, name)()
    config = dataclasses.replace(config, encoder_layers=min(2, config.encoder_layers), dropout_rate=0.0,
                                 decoder_layers=min(2, config.decoder_layers), attention_implementation="dense")
    ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    texts = {"source": ids, "target": ids} if config.is_encoder_decoder else {"tokens": ids}
    batch = texts | {"labels": ids, "weights": jax.ShapeDtypeStruct((4, 128), jnp.float32)}
    loss = make_loss(build(config), config, smoothing=0.1)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    counted = matmul_flops(jax.grad(lambda params, batch: loss(params, batch, None)["loss"]), params, batch)
    flops = training_flops(config, 4, 128, dense=True)
    assert sum(flops[part] for part in PARTS if part != "softmax") == pytest.approx(counted, rel=0.01)


def plan_of(**changes):
    fields = {"mesh": {"data": 4, "fsdp": 4}, "device": DEVICES["h100"], "rows": 16, "length": 128, "flops": 10**15,
              "model_flops": 75 * 10**13,
              "memory": Memory(10**9, 2 * 10**9, 10**6, 5 * 10**9),
              "collectives": (Collective("all-reduce", 9e9, 16, 16, 1), Collective("all-gather", 9e9, 4, 4, 2)),
              "traffic": 3.35e12, "half": True}
    return Plan(**{**fields, **changes})


def test_roofline_by_hand():
    """10^15 / 16 / 989e12; 1 s of traffic; 16.875 GB between nodes at 50 GB/s, 13.5 GB within one at 450 GB/s."""
    plan = plan_of()
    assert plan.compute_seconds == pytest.approx(0.063195, rel=1e-4)
    assert plan.memory_seconds == pytest.approx(1.0)
    assert plan.network_seconds == pytest.approx(16.875 / 50 + 13.5 / 450)
    assert plan.seconds == pytest.approx(1.0) and plan.mfu(plan.seconds) == pytest.approx(0.75 * 0.063195, rel=1e-4)
    assert plan_of(half=False).compute_seconds == pytest.approx(10**15 / 16 / 494e12)


def test_what_does_not_fit_is_told():
    assert plan_of().fits and plan_of().advice() == []
    activations = plan_of(memory=Memory(10**9, 10**9, 0, 80 * 10**9))
    assert not activations.fits and "accumulate" in activations.advice()[0]
    state = plan_of(memory=Memory(30 * 10**9, 60 * 10**9, 0, 10**9))
    assert not state.fits and "fsdp" in state.advice()[0]


def test_the_papers_count_of_its_own_models():
    """Table 2 of Vaswani et al. (2017): 12 hours and 3.5 days on 8 P100 at 9.5 TFLOPS."""
    rate = DEVICES["p100"].sustained
    assert f"{sustained_flops(12 * 3600, 8, rate):.1e}" == "3.3e+18"
    assert f"{sustained_flops(3.5 * 86400, 8, rate):.1e}" == "2.3e+19"


def test_large_meshes_are_compiled_with_fewer_copies():
    mesh = {"data": 64, "fsdp": 16, "tensor": 4, "sequence": 1}
    assert compiled_mesh(mesh, 2048) == mesh | {"data": 32}
    assert compiled_mesh(mesh, 4096) == mesh
    with pytest.raises(ValueError, match="64 devices"):
        compiled_mesh(mesh, 63)
