"""Stacked layers in one scan, and recomputation: the numbers of separate layers, for less compile time or memory."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import AttentionPattern, ModelConfig
from tfm.models import build, init_params
from tfm.models.scanned import stack_layers, unstack_layers

WINDOW_THEN_FULL = (AttentionPattern("window", window=2), AttentionPattern())


def loss_of(config):
    """Loss of (params, source, target), the second source padded."""

    def loss(params, source, target):
        mask = jnp.asarray([[True] * source.shape[1], [True] * 3 + [False] * (source.shape[1] - 3)])
        logits = build(config).apply({"params": params}, source, target, source_mask=mask)
        return -jax.nn.log_softmax(logits)[..., 1].mean()

    return loss


def close(a, b, tolerance=2e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance), a, b)


@pytest.mark.parametrize(("depth", "changes"), [
    (2, {"position": "t5", "norm_position": "pre"}), (3, {"attention_pattern": WINDOW_THEN_FULL}),
    (1, {"attention_pattern": WINDOW_THEN_FULL, "position": "shaw", "remat": "full"})])
def test_scanned_layers_give_the_loss_and_gradients_of_separate_ones(small, depth, changes):
    config = small.config(encoder_layers=depth, decoder_layers=depth, **changes)
    scanned = dataclasses.replace(config, scan_layers=True)
    params, ids = small.params(config), (small.ids(0, (2, 5)), small.ids(1, (2, 4)))
    expected = jax.jit(jax.value_and_grad(loss_of(config)))(params, *ids)
    loss, gradients = jax.jit(jax.value_and_grad(loss_of(scanned)))(stack_layers(params, config), *ids)
    close((loss, unstack_layers(gradients, config)), expected)


def test_conversion_loses_nothing_and_makes_what_init_makes(small):
    config = small.config(encoder_layers=3, num_kv_heads=2, norm="rms", position="learned")
    params = small.params(config)
    stacked = stack_layers(params, config)
    assert stacked["decoder"]["layers"]["self_attention"]["key"]["kernel"].shape == (2, 16, 8)
    back = unstack_layers(stacked, config)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    scanned = dataclasses.replace(config, scan_layers=True)
    made = jax.eval_shape(lambda: init_params(scanned, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, stacked)


def test_a_tree_of_another_depth_is_refused(small):
    config = small.config()
    params = small.params(config)
    with pytest.raises(ValueError, match="encoder/layers_2"):
        stack_layers(params, dataclasses.replace(config, encoder_layers=3))
    with pytest.raises(ValueError, match="2 decoder layers"):
        unstack_layers(stack_layers(params, config), dataclasses.replace(config, decoder_layers=1))
    with pytest.raises(ValueError, match="no decoder/layers: they are not those of scan_layers"):
        unstack_layers(params, config)


def test_layers_start_with_numbers_of_their_own(small):
    config = small.config(scan_layers=True, encoder_layers=0, decoder_layers=3)
    kernels = np.asarray(init_params(config, jax.random.key(0))["decoder"]["layers"]["feed_forward"]["up"]["kernel"])
    assert min(np.abs(kernels[i] - kernels[j]).max() for i in range(3) for j in range(i)) > 0.1
    limit = np.sqrt(6 / (16 + 24))  # of one layer, not of the stack
    assert 0.9 * limit < np.abs(kernels).max() <= limit


def test_dropout_of_scanned_layers_has_the_distribution_of_separate_ones(small):
    """Mean and deviation of a loss over many keys; and the layers of one scan drop different entries."""
    config = small.config(encoder_layers=0, decoder_layers=2, dropout_rate=0.3)
    params, ids = small.params(config), small.ids(0, (2, 5))

    def losses(config, params):
        def one(key):
            logits = build(config).apply({"params": params}, ids, deterministic=False, rngs={"dropout": key})
            return -jax.nn.log_softmax(logits)[..., 1].mean()
        return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 800)))

    separate = losses(config, params)
    scanned = losses(dataclasses.replace(config, scan_layers=True), stack_layers(params, config))
    error = np.sqrt((separate.var() + scanned.var()) / 800)
    assert abs(separate.mean() - scanned.mean()) < 4 * error
    np.testing.assert_allclose(scanned.std(), separate.std(), rtol=0.15)


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recomputation_changes_memory_and_not_gradients(small, scan):
    config = small.config(d_ff=256, encoder_layers=0, decoder_layers=3, scan_layers=scan, dropout_rate=0.1)
    params, ids, memory, gradients = small.params(config), jnp.ones((2, 64), jnp.int32), {}, {}
    for remat in ("none", "dots", "full"):
        model = build(dataclasses.replace(config, remat=remat))

        def loss(params, model=model):
            logits = model.apply({"params": params}, ids, deterministic=False, rngs={"dropout": jax.random.key(0)})
            return -jax.nn.log_softmax(logits)[..., 1].mean()

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
        gradients[remat] = compiled(params)
    close(gradients["full"], gradients["none"], 1e-5)
    close(gradients["dots"], gradients["none"], 1e-5)
    if scan:  # unrolled, the CPU's compiler is free to recompute at once what the backward pass wants later
        assert memory["full"] < 0.7 * memory["none"]


@pytest.mark.slow
def test_compile_time_does_not_grow_with_the_depth(small):
    def seconds(depth):
        config = small.config(encoder_layers=0, decoder_layers=depth, scan_layers=True, norm_position="pre")
        params, ids = small.params(config), small.ids(0, (2, 8))

        def loss(params):
            return build(config).apply({"params": params}, ids).mean()

        traced = jax.jit(jax.grad(loss)).lower(params)
        start = time.process_time()
        traced.compile()
        return time.process_time() - start

    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        seconds(2)
        shallow, deep = (min(seconds(depth) for _ in range(3)) for depth in (6, 48))
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
    assert deep <= 1.5 * shallow, f"6 layers compile in {shallow:.2f} s, 48 in {deep:.2f} s"


@pytest.mark.parametrize("scan", [False, True])
def test_recomputation_of_all_but_the_products_repeats_no_projection(small, scan):
    """Products in a gradient's program: "dots" repeats the two of attention, "full" the six projections as well."""
    def products(remat):
        config = small.config(encoder_layers=0, decoder_layers=1, remat=remat, scan_layers=scan)
        ids, shapes = jnp.ones((2, 4), jnp.int32), jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

        def total(params):
            return build(config).apply({"params": params}, ids).sum()

        return str(jax.make_jaxpr(jax.grad(total))(shapes)).count("dot_general")

    plain = products("none")
    assert (products("dots"), products("full")) == (plain + 2, plain + 8)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_initial_parameters_are_made_without_rematerialisation(remat):
    """Else each parameter would be made by a whole layer: its forward pass is needed for none."""
    config = ModelConfig(vocab_size=20, d_model=8, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    plain, program = (jax.make_jaxpr(lambda key, c=c: init_params(c, key))(jax.random.key(0))
                      for c in (config, dataclasses.replace(config, remat=remat)))
    assert str(program) == str(plain)
