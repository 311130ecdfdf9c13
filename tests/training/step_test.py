"""One update: accumulation, the mean over devices, the moving average."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import batch, init, loss

from tfm.training.step import init_state, make_eval_step, make_train_step, pad_rows


def without_dropout(params, rows, key):
    return loss(params, rows, None)


def state_of(optimizer, ema=False):
    return init_state(init, optimizer, 0, ema=ema)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_equals_the_big_batch(accumulate):
    optimizer, rows = optax.adam(0.1), batch(3)
    whole, metrics = make_train_step(without_dropout, optimizer)(state_of(optimizer), rows)
    parts, summed = make_train_step(without_dropout, optimizer, accumulate=accumulate)(state_of(optimizer), rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole.params, parts.params)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], summed[name], rtol=1e-5)


def test_gradient_is_that_of_the_mean_over_tokens_in_float64():
    rows = batch(4)
    state = state_of(optax.sgd(1.0))
    new, metrics = make_train_step(without_dropout, optax.sgd(1.0))(state, rows)
    kernel = np.asarray(state.params["layer"]["kernel"], np.float64)
    x, w = np.asarray(rows["features"], np.float64), np.asarray(rows["weights"], np.float64)
    scores = np.exp(x @ kernel)
    error = scores / scores.sum(-1, keepdims=True) - np.eye(3)[rows["labels"]]
    gradient = np.einsum("btf,btc,bt->fc", x, error, w) / w.sum()
    np.testing.assert_allclose(new.params["layer"]["kernel"], kernel - gradient, rtol=1e-4, atol=1e-6)
    of_bias = np.einsum("btc,bt->c", error, w) / w.sum()
    np.testing.assert_allclose(metrics["gradient_norm"], np.hypot(*map(np.linalg.norm, (gradient, of_bias))), rtol=1e-5)


def test_moving_average():
    optimizer = optax.sgd(0.5)
    step = make_train_step(without_dropout, optimizer, ema_decay=0.75)
    state = state_of(optimizer, ema=True)
    expected = np.asarray(state.params["layer"]["kernel"], np.float64)
    for seed in range(3):
        state, _ = step(state, batch(seed))
        expected = 0.75 * expected + 0.25 * np.asarray(state.params["layer"]["kernel"], np.float64)
    np.testing.assert_allclose(state.ema["layer"]["kernel"], expected, rtol=1e-5)


def narrow_state(optimizer, **options):
    return init_state(lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(key)), optimizer, 0, **options)


@pytest.mark.parametrize("trainable", [None, "kernel"])
def test_moving_average_of_narrow_parameters_moves(trainable):
    """A part in a thousand is less than bfloat16 tells apart."""
    optimizer = optax.sgd(0.5)
    step = jax.jit(make_train_step(without_dropout, optimizer, ema_decay=0.999, trainable=trainable))
    state = narrow_state(optimizer, ema=True, trainable=trainable)
    shapes = jax.eval_shape(lambda: state)
    expected = np.asarray(state.params["layer"]["kernel"], np.float64)
    for seed in range(20):
        state, _ = step(state, batch(seed))
        expected = 0.999 * expected + 0.001 * np.asarray(state.params["layer"]["kernel"], np.float64)
    assert jax.eval_shape(lambda: state) == shapes
    np.testing.assert_allclose(state.ema["layer"]["kernel"], expected, rtol=1e-4)


def test_micro_batches_of_narrow_parameters_are_added_up_in_float32():
    """The sum of 64 gradients, each rounded to bfloat16 once, and then the sum."""
    optimizer, rows = optax.sgd(1.0), batch(5, rows=64)
    step = make_train_step(without_dropout, optimizer, accumulate=64)
    state = narrow_state(optimizer)
    parts = [jax.grad(lambda p, i=i: without_dropout(p, {n: x[i:i + 1] for n, x in rows.items()}, None)["loss"])(
        state.params)["layer"]["bias"] for i in range(64)]
    expected = -np.sum([np.asarray(part, np.float64) for part in parts], axis=0) / rows["weights"].sum()
    found = np.asarray(step(state, rows)[0].params["layer"]["bias"], np.float64)
    np.testing.assert_allclose(found, expected, rtol=0.01)


def test_dropout_differs_from_step_to_step_and_repeats_for_the_same_step():
    step = make_train_step(loss, optax.sgd(0.0))
    state = state_of(optax.sgd(0.0))
    second, first_loss = step(state, batch(0))
    _, second_loss = step(second, batch(0))
    _, again = step(state, batch(0))
    assert float(first_loss["loss"]) == float(again["loss"]) != float(second_loss["loss"])


def test_a_batch_without_tokens_changes_nothing():
    rows = batch(0) | {"weights": np.zeros((8, 5), np.float32)}
    state = state_of(optax.sgd(1.0))
    new, metrics = make_train_step(without_dropout, optax.sgd(1.0))(state, rows)
    assert float(metrics["loss"]) == 0.0
    np.testing.assert_array_equal(new.params["layer"]["kernel"], state.params["layer"]["kernel"])


def test_padded_rows_have_no_weight():
    rows = batch(1, rows=5)
    evaluate = make_eval_step(loss)
    params = init(jax.random.key(0))
    before, after = evaluate(params, rows), evaluate(params, pad_rows(rows, 8))
    assert len(pad_rows(rows, 8)["labels"]) == 8
    for name in before:
        np.testing.assert_allclose(before[name], after[name], rtol=1e-6)


EIGHT_DEVICES = """
import json, sys
import jax, numpy as np, optax
from toy import batch, init, loss
from tfm.parallel.mesh import make_mesh
from tfm.parallel.rules import place_batch
from tfm.training.step import init_state, make_train_step

def given_losses(params, batch, key):
    return {"loss": (batch["losses"] * params["one"]).sum(), "weight": batch["weights"].sum()}

# Two devices hold 2 and 10 tokens with mean losses of 3 and 1.
weights = np.zeros((2, 10), np.float32); weights[0, :2] = 1; weights[1] = 1
rows = {"losses": np.where(weights > 0, [[3.0], [1.0]], 0).astype(np.float32), "weights": weights}
two = make_mesh("data=2", jax.devices()[:2])
sgd = optax.sgd(1.0)
step = jax.jit(make_train_step(given_losses, sgd))
state = init_state(lambda key: {"one": jax.numpy.ones(())}, sgd, 0)
new, metrics = step(state, place_batch(rows, two))
out = {"mean": float(metrics["loss"] / metrics["weight"]), "gradient": 1.0 - float(new.params["one"])}

losses = {}
for spec, devices, accumulate in (("data=1", 1, 1), ("data=8", 8, 1), ("data=4,fsdp=2", 8, 1), ("data=4", 4, 2)):
    mesh = make_mesh(spec, jax.devices()[:devices])
    adam = optax.adam(0.1)
    step = jax.jit(make_train_step(loss, adam, accumulate=accumulate))
    state = init_state(init, adam, 0)
    losses[spec] = []
    for seed in range(4):
        state, metrics = step(state, place_batch(batch(seed, rows=8), mesh))
        losses[spec].append(float(metrics["loss"] / metrics["weight"]))
print(json.dumps(out | {"losses": losses}))
"""


def test_devices_count_tokens_and_not_means():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", EIGHT_DEVICES], env=environment, capture_output=True, text=True,
                          timeout=300, check=True)
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["mean"] == pytest.approx(16 / 12, rel=1e-6)
    assert out["gradient"] == pytest.approx(16 / 12, rel=1e-6)
    losses = out["losses"]
    np.testing.assert_allclose(losses["data=8"], losses["data=1"], rtol=1e-5)
    np.testing.assert_allclose(losses["data=4,fsdp=2"], losses["data=1"], rtol=1e-5)
