"""The vendors' kernels: splash attention is right, and "auto" takes only what JAX and the device accept."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from tfm import masks
from tfm.masks import Causal, Padding, Window
from tfm.ops import attention, vendor
from tfm.ops.dense import Scoring

RULES = [None, Causal(), masks.sliding_window(100), Causal() & Window(9, 9), Window(20, 30), Window(None, 5),
         Window(5, None)]


@pytest.fixture
def device(monkeypatch):
    """Makes programs be written for a device that is not here; JAX's own checks then speak for it."""

    def become(platform, capability="", version="cuda 12090"):
        found = SimpleNamespace(platform=platform, compute_capability=capability,
                                client=SimpleNamespace(platform_version=version))
        monkeypatch.setattr(vendor, "target", lambda: found)
        numbers = tuple(map(int, (capability or "0.0").split(".")))
        at_least = lambda wanted: numbers >= tuple(map(int, wanted.split(".")))  # noqa: E731
        monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91100)
        monkeypatch.setattr(cudnn, "check_compute_capability", at_least)
        monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda wanted: False)

    return become


def lowered(platform, shapes, dtype, **options):
    """The program of values and gradients for a platform, as text."""

    def total(q, k, v):
        return attention(q, k, v, **options).astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(jax.grad(total, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def shapes(length, width, value_width=None):
    return [(2, length, 4, width), (2, length, 2, width), (2, length, 2, value_width or width)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_cudnn_is_taken_where_jax_takes_it_and_nowhere_else(device, rule):
    found = {}
    for capability, dtype, width in itertools.product(["7.5", "8.0", "9.0"], ["bfloat16", "float32"], [20, 64, 136]):
        device("gpu", capability)
        text = lowered("cuda", shapes(24, width), dtype, mask=rule)
        found[capability, dtype, width] = "__cudnn$fmha" in text
    allowed = rule is None or vendor.reach(rule)[1] == 0
    halves = {("8.0", "bfloat16", 64), ("9.0", "bfloat16", 64), ("9.0", "bfloat16", 136)}
    assert {case for case, taken in found.items() if taken} == (halves if allowed else set())


@pytest.mark.parametrize(("options", "sizes"), [
    ({"mask": Padding(np.ones((2, 24), bool))}, shapes(24, 64)),
    ({"soft_cap": 5.0}, shapes(24, 64)),
    ({}, shapes(24, 64, 32)),
    ({"query_positions": np.arange(24) + 1}, shapes(24, 64)),
])
def test_what_cudnn_lacks_is_computed_otherwise(device, options, sizes):
    device("gpu", "9.0")
    assert "__cudnn" not in lowered("cuda", sizes, "bfloat16", **options)


def test_a_gpu_of_another_vendor_has_no_cudnn(device):
    device("gpu", "9.0", version="rocm 60300")
    assert "__cudnn" not in lowered("rocm", shapes(24, 64), "bfloat16", mask=Causal())


@pytest.mark.parametrize(("change", "words"), [
    ({"mask": Window(2, 2)}, "lacks windows that see what comes later"),
    ({"dtype": "float32"}, "lacks float32, float32 and float32: it has bfloat16 or float16"),
    ({"capability": "7.5"}, "lacks this device: it has NVIDIA GPUs from compute capability 8.0"),
    ({"platform": "cpu"}, "lacks this device: it has NVIDIA GPUs"),
    ({"width": 12}, r"lacks heads of width \[12\]: it has multiples of 8 up to 256"),
    ({"width": 160, "capability": "8.6"}, r"lacks heads of width \[160\]: it has multiples of 8 up to 128"),
    ({"value_width": 32}, r"lacks heads of width \[32, 64\]"),
])
def test_cudnn_asked_for_by_name_says_what_it_lacks(device, change, words):
    device(change.get("platform", "gpu"), change.get("capability", "9.0"))
    sizes = shapes(8, change.get("width", 64), change.get("value_width"))
    with pytest.raises(ValueError, match=f"implementation 'cudnn' {words}.*'blockwise' has it"):
        lowered("cuda", sizes, change.get("dtype", "bfloat16"), mask=change.get("mask"), implementation="cudnn")


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_splash_attention_is_taken_where_it_fits_a_tpu(device, rule):
    device("tpu")
    taken = {(length, width): "tpu_custom_call" in lowered("tpu", shapes(length, width), "bfloat16", mask=rule)
             for length in (256, 250) for width in (64, 128)}
    assert [case for case, yes in taken.items() if yes] == [(256, 128)]
    assert "tpu_custom_call" not in lowered("tpu", shapes(256, 128), "bfloat16", mask=rule, soft_cap=5.0)


MESHES = """
from types import SimpleNamespace
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tfm.masks import Causal
from tfm.config import ModelConfig
from tfm.models import build, init_params
from tfm.ops import attention, vendor
from tfm.parallel.mesh import make_mesh, use_mesh

vendor.target = lambda: SimpleNamespace(platform="tpu")
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
x = jax.ShapeDtypeStruct((8, 128, 2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))

def attend(x):
    return attention(x, x, x, mask=Causal())

def has_kernel(f):
    gradient = jax.grad(lambda x: f(x).astype(jnp.float32).sum())
    return "tpu_custom_call" in jax.jit(gradient).trace(x).lower(lowering_platforms=("tpu",)).as_text()

def mapped(**options):
    return jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"), **options)

print(has_kernel(attend), has_kernel(mapped()), has_kernel(mapped(axis_names={"data"})),
      has_kernel(mapped(check_vma=False)))

config = ModelConfig(vocab_size=8, d_model=256, d_ff=8, num_heads=2, encoder_layers=0, decoder_layers=1)
params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32)
with use_mesh(make_mesh("data=4,tensor=2")):
    model = jax.jit(lambda params, tokens: build(config).apply({"params": params}, tokens))
    print("tpu_custom_call" in model.trace(params, tokens).lower(lowering_platforms=("tpu",)).as_text())
"""


def test_a_kernel_that_jax_cannot_split_is_taken_on_each_device_only(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", MESHES], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["False", "False", "False", "True", "True"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_splash_attention_in_interpret_mode(rule, heads):
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((2, 256, n, 128)), jnp.float32) for n in (*heads, heads[1]))
    scoring = Scoring(rule, None, None, 128**-0.5, None, 0.0)
    got = vendor.splash_attention(q, k, v, scoring, interpret=True)
    np.testing.assert_allclose(got, attention(q, k, v, mask=rule, implementation="dense"), atol=2e-5)
