"""Ring attention over four devices against `attention` on the whole sequence, values and gradients."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tfm.ops import ring_attention

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from tfm.masks import Causal, Padding, Prefix, Segments, Window
from tfm.ops import attention
from tfm.ops.ring import ring_attention
from tfm.positions import Alibi, T5Bias

random = np.random.default_rng(0)
mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,))
query, key, value, cotangent = (
    jnp.asarray(random.standard_normal((2, 24, n, 8)), jnp.float32) for n in (4, 2, 2, 4))
valid = jnp.asarray(random.random((2, 24)) < 0.7)
ids = jnp.sort(jnp.asarray(random.integers(0, 3, (2, 24))))
table = jnp.asarray(random.standard_normal((8, 4)), jnp.float32)

def rule(kind, valid, ids):
    return {
        "causal": Causal(),
        "padding": (Causal() | Prefix(5)) & Padding(valid),
        "segments": Segments(ids, ids) & Window(6, 6),
    }[kind]

for kind in ("causal", "padding", "segments"):
    def ring(query, key, value, table, valid, ids):
        return ring_attention(query, key, value, axis_name="seq", mask=rule(kind, valid, ids),
                              bias=T5Bias(table, True, 20), soft_cap=3.0, block_size=4)

    def whole(query, key, value, table, valid, ids):
        return attention(query, key, value, mask=rule(kind, valid, ids), bias=T5Bias(table, True, 20), soft_cap=3.0,
                         implementation="dense")

    spec = P(None, "seq")
    spread = jax.shard_map(ring, mesh=mesh, in_specs=(spec, spec, spec, P(), spec, spec), out_specs=spec)
    results = []
    for attend in (spread, whole):
        def run(query, key, value, table):
            output, pull = jax.vjp(lambda *x: attend(*x, valid, ids), query, key, value, table)
            return output, pull(cotangent)
        results.append(jax.tree.leaves(jax.jit(run)(query, key, value, table)))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=kind)
print("equal")
"""


@pytest.mark.slow
def test_equals_the_whole():
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


def test_a_bias_that_is_an_array_is_refused():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="bias is an array"):
        ring_attention(x, x, x, axis_name="seq", bias=np.zeros((4, 4), np.float32))
