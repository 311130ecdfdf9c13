"""Gradients inside `jax.shard_map`, rows spread over devices and parameters on all of them, against plain formulas."""

import os
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from tfm.ops import fused_cross_entropy, fused_cross_entropy_sum, linear_attention, projection
from tfm.ops.norms import layer_norm, rms_norm

random = np.random.default_rng(0)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
x, gain, shift, kernel, table = (
    jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((8, 5, 6), (6,), (6,), (6, 3), (11, 6)))
keys = jnp.asarray(random.standard_normal((5, 6)), jnp.float32)

def deviation(x):
    return jnp.sqrt(((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + 1e-6)

def cross_entropy(x, table):
    return -jax.nn.log_softmax(x @ table.T)[..., 3]

def threes(x):
    return jnp.full(x.shape[:-1], 3)

def features(x):
    return jax.nn.elu(x) + 1

def causal(x, keys):
    weights = jnp.tril(features(x) @ features(keys).T)
    return weights @ keys / weights.sum(-1, keepdims=True)

def our_causal(x, keys):
    keys = jnp.broadcast_to(keys, x.shape)[:, :, None]
    return linear_attention(x[:, :, None], keys, keys, causal=True, chunk_size=2)[:, :, 0]

cases = {
    "layer_norm": (layer_norm, lambda x, g, b: (x - x.mean(-1, keepdims=True)) / deviation(x) * g + b, gain, shift),
    "rms_norm": (rms_norm, lambda x, g: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * g, gain),
    "projection": (projection, lambda x, w, b: x @ w + b, kernel, shift[:3]),
    "fused_cross_entropy": (lambda x, e: fused_cross_entropy(x, e, threes(x), chunk_size=4), cross_entropy, table),
    "fused_cross_entropy_sum": (lambda x, e: fused_cross_entropy_sum(x, e, threes(x), chunk_size=4)[None],
                                lambda x, e: cross_entropy(x, e).reshape(4, -1).sum(-1), table),
    "linear_attention": (our_causal, causal, keys),
}

for name, (ours, plain, *params) in cases.items():
    specs = P("data"), *(P() for _ in params)
    spread = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=P("data"))
    results = []
    for function in (spread, plain):
        loss = lambda *arguments: (function(*arguments) ** 2).sum()
        results.append(jax.jit(jax.value_and_grad(loss, tuple(range(len(specs)))))(x, *params))
    for ours, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4, err_msg=name)
print("done")
"""


def test_gradients_inside_shard_map_are_those_of_the_formulas():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout.strip() == "done", run.stderr
