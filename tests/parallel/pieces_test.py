"""Pieces of a program: its results bit for bit, with their shardings, and few programs."""

import functools
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.parallel.pieces import make_in_pieces

STATES = """
import dataclasses, sys
import jax
from tfm import ModelConfig, OptimizerConfig
from tfm.models import init_params
from tfm.models.adapters import join_params, trainable
from tfm.parallel.mesh import make_mesh, use_mesh
from tfm.parallel.pieces import make_in_pieces
from tfm.parallel.rules import state_shardings
from tfm.training.optimizer import make_optimizer
from tfm.training.step import init_state

BASE = ModelConfig(vocab_size=40, d_model=16, d_ff=32, num_heads=4, encoder_layers=2, decoder_layers=2)
MODELS = {
    "separate": dataclasses.replace(BASE, position="shaw", tie_embeddings="none", param_dtype="bfloat16"),
    "scanned": dataclasses.replace(BASE, scan_layers=True, position="learned"),
    "adapted": dataclasses.replace(BASE, lora_rank=2, encoder_layers=0),
}
model, mesh = MODELS[sys.argv[1]], make_mesh("fsdp=2,tensor=2")
optimizer = make_optimizer(OptimizerConfig(), lambda count: 1e-3)

def fresh(given):
    return init_state(lambda key: join_params(init_params(model, key), given), optimizer, 3, ema=True,
                      trainable=trainable(model))

with use_mesh(mesh):
    start = jax.tree.map(lambda x: x + 1, jax.jit(init_params, static_argnums=0)(model, jax.random.key(5))["decoder"])
    program, shapes = jax.make_jaxpr(fresh, return_shape=True)({"decoder": start})
    shardings = state_shardings(shapes, mesh)
    whole = jax.jit(fresh, out_shardings=shardings)({"decoder": start})
pieces = make_in_pieces(program, jax.tree.leaves(shardings), *jax.tree.leaves(start))
for expected, made in zip(jax.tree.leaves(whole), pieces, strict=True):
    assert made.aval == expected.aval and made.sharding == expected.sharding, (made, expected)
    assert (made == expected).all(), (made, expected)
arrays = [*pieces, *jax.tree.leaves(start)]
places = [shard.data.unsafe_buffer_pointer() for x in arrays for shard in x.addressable_shards]
assert len(set(places)) == len(places), "two arrays share memory, which a step could not take over"
"""


@pytest.mark.parametrize("model", ["separate", "scanned", "adapted"])
def test_a_state_is_that_of_one_program(model: str) -> None:
    """With parameters that are given, with an average of them, on a mesh of four devices."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run = subprocess.run([sys.executable, "-c", STATES, model], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def place() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_one_program_for_all_that_is_made_alike(caplog: pytest.LogCaptureFixture) -> None:
    keys = 6

    def draw() -> list[jax.Array]:
        split = jax.random.split(jax.random.key(0), keys)
        return [jax.random.normal(key, (5, 7)) * 3.0 for key in split] + [jnp.full((3,), 2.0), jnp.full((3,), 4.0)]

    program = jax.make_jaxpr(draw)()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        made = make_in_pieces(program, [place()] * (keys + 2))
    assert sum(record.getMessage().startswith("Compiling jit(make)") for record in caplog.records) == 3
    jax.tree.map(np.testing.assert_array_equal, made, jax.jit(draw)())


def test_results_of_arguments_and_of_results() -> None:
    def program(x: jax.Array) -> list[jax.Array]:
        y = x * 2.0
        return [x, y, y + 1.0, y, jnp.zeros(())]

    x = jnp.arange(3.0)
    made = make_in_pieces(jax.make_jaxpr(program)(x), [place()] * 5, x)
    jax.tree.map(np.testing.assert_array_equal, made, program(x))
    assert len({array.unsafe_buffer_pointer() for array in (x, *made)}) == 6


def test_operations_without_a_hash_are_pieces_of_their_own() -> None:
    """As those are that have a backward pass and arguments without one."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def times(x: jax.Array, factor: int) -> jax.Array:
        return factor * x

    times.defvjp(lambda x, factor: (factor * x, None), lambda factor, _, g: (factor * g,))
    program = jax.make_jaxpr(lambda key: [times(jax.random.normal(k, (3,)), 2) for k in jax.random.split(key)])
    key = jax.random.key(1)
    made = make_in_pieces(program(key), [jax.sharding.SingleDeviceSharding(jax.devices()[0])] * 2, key)
    for found, k in zip(made, jax.random.split(key), strict=True):
        np.testing.assert_array_equal(found, 2 * jax.random.normal(k, (3,)))
