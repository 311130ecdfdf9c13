"""The schedule's published numbers, and the optimizers against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tfm.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from tfm.training.optimizer import (
    clip_by_global_norm,
    decay_mask,
    global_norm,
    make_optimizer,
    make_schedule,
    warmup_inverse_sqrt,
)

MODEL = ModelConfig(vocab_size=10)


def test_schedule_of_the_base_model():
    rate = warmup_inverse_sqrt(512, 4000)
    assert float(rate(0)) == pytest.approx(1.7469e-7, rel=1e-4)
    assert float(rate(3999)) == pytest.approx(6.9877e-4, rel=1e-4)
    assert float(rate(3998)) < float(rate(3999)) > float(rate(4000))


def test_schedule_equals_the_equation():
    steps = np.array([1.0, 7, 500, 501, 100_000])
    expected = 64**-0.5 * np.minimum(steps**-0.5, steps * 500**-1.5)
    rate = warmup_inverse_sqrt(64, 500)
    np.testing.assert_allclose([float(rate(int(s) - 1)) for s in steps], expected, rtol=1e-6)


@pytest.mark.parametrize("d_model, warmup", [(0, 10), (8, 0), (-1, 3)])
def test_schedule_refuses_sizes_below_one(d_model, warmup):
    with pytest.raises(ValueError, match="above 0"):
        warmup_inverse_sqrt(d_model, warmup)


@pytest.mark.parametrize("schedule, expected", [
    ("warmup_cosine", [0.025, 0.1, 0.055, 0.01]),
    ("warmup_linear", [0.025, 0.1, 0.055, 0.01]),
    ("constant", [0.025, 0.1, 0.1, 0.1]),
])
def test_other_schedules_at_first_peak_middle_and_last_update(schedule, expected):
    config = Config(MODEL, train=TrainConfig(steps=24), optimizer=OptimizerConfig(
        schedule=schedule, learning_rate=0.1, final_learning_rate=0.01, warmup_steps=4))
    rate = make_schedule(config)
    np.testing.assert_allclose([float(rate(count)) for count in (0, 3, 13, 23)], expected, rtol=1e-5)


def torch_steps(make, gradients, start):
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize("config, make", [
    (OptimizerConfig(name="adam"), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.98), eps=1e-9)),
    (OptimizerConfig(name="adamw", weight_decay=0.3),
     lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.3)),
    (OptimizerConfig(name="sgd", beta1=0.5), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5)),
    (OptimizerConfig(name="adafactor"), lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.0)),
    (OptimizerConfig(name="adafactor", weight_decay=0.3),
     lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.3)),
])
def test_update_rules_equal_torch(config, make):
    random = np.random.default_rng(0)
    shape = (128, 130) if config.name == "adafactor" else (3, 4)  # smaller matrices are not factored
    start = random.normal(size=shape).astype(np.float32)
    gradients = random.normal(size=(5, *shape)).astype(np.float32)
    optimizer = make_optimizer(config, lambda count: 0.01)
    params = {"kernel": jnp.asarray(start)}
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update({"kernel": jnp.asarray(gradient)}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    np.testing.assert_allclose(params["kernel"], torch_steps(make, gradients, start), rtol=2e-5, atol=1e-6)


def test_adafactor_treats_stacked_layers_as_separate_ones():
    """Layers whose weights and gradients differ in size: torch knows nothing of stacks."""
    random, sizes = np.random.default_rng(1), np.array([0.1, 1.0, 5.0], np.float32)[:, None, None]
    start = sizes * random.normal(size=(3, 130, 128)).astype(np.float32)
    gradients = sizes * random.normal(size=(4, 3, 130, 128)).astype(np.float32)
    gradients *= np.array([1, 4, 0.1, 9], np.float32)[:, None, None, None]
    optimizer = make_optimizer(OptimizerConfig(name="adafactor", weight_decay=0.1), lambda count: 0.01)
    params = {"encoder": {"layers": {"up": {"kernel": jnp.asarray(start)}}}}
    state = optimizer.init(params)
    for gradient in gradients:
        given = {"encoder": {"layers": {"up": {"kernel": jnp.asarray(gradient)}}}}
        updates, state = optimizer.update(given, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for layer in range(3):
        expected = torch_steps(lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1), gradients[:, layer],
                               start[layer])
        np.testing.assert_allclose(params["encoder"]["layers"]["up"]["kernel"][layer], expected, rtol=2e-5, atol=1e-6)


def test_clipping_scales_the_global_norm():
    config = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=1.0)
    optimizer = make_optimizer(config, lambda count: 1.0)
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    updates, _ = optimizer.update(gradients, optimizer.init(gradients), gradients)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("dtype, size", [("bfloat16", 1.0), ("float16", 300.0), ("float32", 1.0)])
def test_the_norm_of_narrow_gradients_is_that_of_float64(dtype, size):
    """400 arrays: in bfloat16 the sum of ones ends at 256, and the square of 300 is more than float16 holds."""
    gradients = [jnp.full(1, size, dtype) for _ in range(400)]
    norm = np.sqrt(np.sum(np.square(np.asarray(gradients, np.float64))))
    assert float(global_norm(gradients)) == pytest.approx(norm, rel=1e-6)
    clipped, _ = clip_by_global_norm(1.0).update(gradients, optax.EmptyState())
    np.testing.assert_allclose(np.asarray(clipped, np.float64), size / norm, rtol=0.005)
    assert clipped[0].dtype == dtype


def test_weight_decay_goes_by_names_in_stacked_layers():
    params = {"decoder": {"layers": {"query": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 4)),
                                               "lora_a": jnp.ones((2, 3, 1))},
                                     "self_attention_norm": {"scale": jnp.ones((2, 3))}}}}
    optimizer = make_optimizer(OptimizerConfig(name="adamw", weight_decay=0.5), lambda count: 0.1)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    layers = updates["decoder"]["layers"]
    for name in ("kernel", "lora_a"):
        np.testing.assert_allclose(layers["query"][name], -0.05, rtol=1e-6)
    assert not np.any(layers["query"]["bias"]) and not np.any(layers["self_attention_norm"]["scale"])


def test_weight_decay_leaves_norms_and_biases_alone():
    params = {"final_norm": {"scale": 1.0, "bias": 1.0}, "query": {"kernel": 1.0, "bias": 1.0},
              "token_embedding": {"table": 1.0}}
    assert decay_mask(params) == {"final_norm": {"scale": False, "bias": False},
                                  "query": {"kernel": True, "bias": False}, "token_embedding": {"table": True}}
