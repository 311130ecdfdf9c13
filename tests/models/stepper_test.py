"""From a model to a step for the decoding loops: prompts of either padding, hypotheses that share a source."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tfm.models import build
from tfm.models.stepper import make_step, own_part, start_generation, start_translation


def test_hypotheses_share_the_keys_of_their_sentence(small):
    """Three hypotheses of each of two sentences against six sentences decoded without a cache."""
    config = small.config(num_kv_heads=2)
    params, source = small.params(config), small.ids(0, (2, 5))
    mask = jnp.asarray([[True] * 5, [True, True, False, False, False]])
    target = small.ids(1, (6, 4))
    shared = start_translation(config, params, source, mask, 4)
    step = make_step(config, params, shared)
    cache = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), own_part(shared))
    rows = []
    for start, end in ((0, 1), (1, 3), (3, 4)):
        logits, cache = step(target[:, start:end], cache)
        rows.append(logits)
    expected = build(config).apply({"params": params}, jnp.repeat(source, 3, 0), target,
                                   source_mask=jnp.repeat(mask, 3, 0))
    np.testing.assert_allclose(np.concatenate(rows, 1), expected, atol=3e-5)


def test_generation_goes_on_from_prompts_of_either_padding(small):
    config = small.config(encoder_layers=0, position="rotary")
    params, row = small.params(config), small.ids(0, (1, 5))
    expected = build(config).apply({"params": params}, row)[0]
    prompts = jnp.concatenate([jnp.pad(row[:, :3], ((0, 0), (0, 1))), jnp.pad(row[:, :3], ((0, 0), (1, 0))),
                               jnp.pad(row[:, :1], ((0, 0), (3, 0)))])
    mask = jnp.asarray([[True, True, True, False], [False, True, True, True], [False, False, False, True]])
    token, cache = start_generation(config, params, prompts, mask, 2)
    np.testing.assert_array_equal(token[:, 0], [row[0, 2], row[0, 2], row[0, 0]])
    step = make_step(config, params)
    logits, cache = step(token, cache)
    np.testing.assert_allclose(logits[:, 0], expected[jnp.array([2, 2, 0])], atol=3e-5)
    logits, _ = step(row[:, jnp.array([3, 3, 1])].T, cache)
    np.testing.assert_allclose(logits[:, 0], expected[jnp.array([3, 3, 1])], atol=3e-5)
