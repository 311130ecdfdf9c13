"""Where dropout acts, and that a key decides it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tfm.models import build


def test_a_key_gives_the_same_numbers_and_another_key_others(small):
    config = small.config(dropout_rate=0.3, attention_dropout_rate=0.2, activation_dropout_rate=0.1)
    variables, ids = {"params": small.params(config)}, small.ids(0, (2, 5))

    @jax.jit
    def run(key):
        return build(config).apply(variables, ids, ids, deterministic=False, rngs={"dropout": key})

    first, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.asarray(first - other)).max() > 1e-2
    plain = build(config).apply(variables, ids, ids)
    np.testing.assert_array_equal(plain, build(config).apply(variables, ids, ids, rngs={"dropout": jax.random.key(2)}))


def test_the_sum_of_embedding_and_position_is_dropped_first(small):
    """With sub-layers of zeros, a Pre-LN stack passes its input on: entries are zero or scaled."""
    config = small.config(encoder_layers=0, dropout_rate=0.5, norm_position="pre")
    params = small.params(config)
    params["decoder"] = {name: part if name == "final_norm" else jax.tree.map(jnp.zeros_like, part)
                         for name, part in params["decoder"].items()}
    stack_input = []

    def remember(next_function, arguments, keywords, context):
        if context.module.name == "final_norm":
            stack_input.append(np.asarray(arguments[0]))
        return next_function(*arguments, **keywords)

    ids = small.ids(0, (4, 8))
    with nn.intercept_methods(remember):
        build(config).apply({"params": params}, ids)
        build(config).apply({"params": params}, ids, deterministic=False, rngs={"dropout": jax.random.key(0)})
    whole, dropped = stack_input
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], 2 * whole[kept], rtol=1e-5)
    assert 0.4 < kept.mean() < 0.6


def test_layers_draw_different_masks(small):
    """Two layers with the same weights on the same input drop different entries."""
    config = small.config(encoder_layers=0, dropout_rate=0.5)
    params, drawn = small.params(config), []

    def remember(next_function, arguments, keywords, context):
        y = next_function(*arguments, **keywords)
        if type(context.module).__name__ == "Dropout" and context.module.rate:
            drawn.append(np.asarray(y) == 0)
        return y

    with nn.intercept_methods(remember):
        build(config).apply({"params": params}, small.ids(0, (2, 5)), deterministic=False,
                            rngs={"dropout": jax.random.key(0)})
    assert len(drawn) == 5  # the embeddings, and two sub-layers in each of two layers
    agreement = [np.mean(a == b) for i, a in enumerate(drawn) for b in drawn[:i]]
    assert max(agreement) < 0.7
