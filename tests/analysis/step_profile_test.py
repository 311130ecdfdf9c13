"""The profile of a step by part of the model."""

import jax
import jax.numpy as jnp
import pytest

from tfm.analysis.devices import DEVICES, peak_flops
from tfm.analysis.step_profile import profile_rows, step_profile


def test_the_part_with_all_the_work_has_nearly_all_the_time(tmp_path):
    def loss(w, x):
        with jax.named_scope("self_attention"):
            y = x @ w
        with jax.named_scope("self_attention_norm"):
            y = y / jnp.sqrt(jnp.mean(y[:8, :8] ** 2))
        with jax.named_scope("loss"):
            return jnp.sum(jnp.sin(y[:4]))

    def step(w, x):
        g = jax.grad(loss)(w, x)
        with jax.named_scope("optimizer"):
            return w - 0.1 * g

    w = x = jnp.ones((512, 512))
    program = jax.jit(step).lower(w, x).compile()
    program(w, x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            w = program(w, x)
        w.block_until_ready()
    times = step_profile(next(tmp_path.rglob("*.xplane.pb")), [program.as_text()], 3)
    whole = sum(times.values())
    assert times["attention", "forward"] + times["attention", "backward"] > 0.5 * whole
    assert times["attention", "backward"] > 0 and ("optimizer", "update") in times
    assert profile_rows(times)[0][0] == "attention"


class Kind:
    def __init__(self, device_kind):
        self.device_kind, self.platform = device_kind, "gpu"


@pytest.mark.parametrize(("kind", "name"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla V100-SXM2-16GB", "v100"),
    ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("NVIDIA H200", "h200")])
def test_devices_are_known_by_the_names_that_jax_gives_them(kind, name):
    assert peak_flops(Kind(kind), "bfloat16") == (DEVICES[name].half_flops, "data sheet")


def test_another_device_is_measured():
    rate, source = peak_flops(jax.devices()[0], "float32")
    assert source == "measured" and 1e8 < rate < 1e15
