"""Adapters: the formula of Hu et al. in NumPy, merged and unmerged logits, with separate and stacked layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import ModelConfig, build, init_params, presets
from tfm.models.adapters import ADAPTED, join_params, merge_adapters, split_params
from tfm.models.scanned import stack_layers
from tfm.nn.projection import Lora, Projection

CONFIG = presets.llama(vocab_size=11, d_model=8, d_ff=12, num_heads=2, num_kv_heads=1, decoder_layers=2, lora_rank=3,
                       lora_alpha=6.0, lora_targets=("query|down", "attention/output"))
IDS = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)


def random_params(init):
    """Random numbers in the shapes that a function makes."""
    random, shapes = np.random.default_rng(0), jax.eval_shape(init)
    return jax.tree.map(lambda x: 0.5 * random.normal(size=x.shape).astype(np.float32), shapes)


def logits(config, params):
    return jax.jit(build(config).apply)({"params": params}, IDS)


@pytest.fixture(scope="module")
def params():
    return random_params(lambda: init_params(CONFIG, jax.random.key(0)))


def test_the_formula_of_the_paper():
    layer = Projection(4, True, lora=Lora(2, 3.0, ("",)))
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    params = random_params(lambda: layer.init(jax.random.key(0), x)["params"])
    w, b, down, up = (np.asarray(params[name], np.float64) for name in ("kernel", "bias", "lora_a", "lora_b"))
    np.testing.assert_allclose(layer.apply({"params": params}, x), x @ w + b + 3.0 / 2 * x @ down @ up, rtol=1e-4,
                               atol=1e-5)


def test_adapters_change_nothing_at_first_and_sit_where_the_patterns_say():
    params = jax.jit(lambda: init_params(CONFIG, jax.random.key(0)))()
    _, plain = split_params(params, ADAPTED)
    without = dataclasses.replace(CONFIG, lora_rank=0)
    np.testing.assert_allclose(logits(CONFIG, params), logits(without, plain), rtol=1e-5, atol=1e-6)
    layer = params["decoder"]["layers_1"]
    adapted = {f"{part}/{name}" for part in ("self_attention", "feed_forward") for name, leaves in layer[part].items()
               if "lora_a" in leaves}
    assert adapted == {"self_attention/query", "self_attention/output", "feed_forward/down"}


@pytest.mark.parametrize("scan", [False, True])
def test_merged_and_unmerged_logits_are_equal(params, scan):
    config = dataclasses.replace(CONFIG, scan_layers=scan)
    if scan:
        params = stack_layers(params, CONFIG)
        shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    merged_config, merged = merge_adapters(config, params)
    assert merged_config.lora_rank == 0 and not split_params(merged, "lora_")[0]
    unmerged = logits(config, params)
    np.testing.assert_allclose(logits(merged_config, merged), unmerged, atol=2e-5)
    assert np.max(np.abs(logits(merged_config, split_params(params, ADAPTED)[1]) - unmerged)) > 0.1


def test_splitting_and_joining_are_inverse(params):
    chosen, rest = split_params(params, ADAPTED)
    assert len(jax.tree.leaves(chosen)) == 2 * 3 * 2
    jax.tree.map(np.testing.assert_array_equal, join_params(chosen, rest), params)


@pytest.mark.parametrize("targets, message", [
    (("quary",), "no projection matches it: there are self_attention/query, self_attention/key"),
    (("query", "cross_attention"), "model.lora_targets is 'cross_attention'"),
    (("(",), "is no regular expression"),
])
def test_patterns_that_match_nothing_are_refused(targets, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        ModelConfig(vocab_size=5, encoder_layers=0, lora_rank=2, lora_targets=targets)


def test_parameters_without_adapters_cannot_be_merged():
    with pytest.raises(ValueError, match="the parameters have no adapters"):
        merge_adapters(CONFIG, {"token_embedding": {"table": jnp.ones(3)}})
