"""From a model to a step for the decoding loops: prompts of either padding, hypotheses that share a source."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import AttentionPattern
from tfm.decoding import beam_search
from tfm.models import build
from tfm.models.stepper import (
    branch,
    branches,
    follow,
    make_step,
    own_part,
    start_generation,
    start_translation,
)


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


@pytest.mark.parametrize(("config", "limit"), [
    ({"position": "sinusoidal", "num_kv_heads": 2}, 5), ({"position": "t5", "encoder_layers": 0}, 4),
    ({"position": "rotary", "encoder_layers": 0, "num_kv_heads": 1}, 4)], ids=["translation", "t5", "rotary"])
def test_beams_that_share_a_cache_are_those_that_move_it(small, config, limit):
    """A path through one cache per row against copying keys and values, after a ragged prompt."""
    config = small.config(**config)
    params, ids = small.params(config), small.ids(0, (3, 4))
    mask = jnp.asarray([[True] * 4, [True, True, False, False], [False, True, True, True]])

    @partial(jax.jit, static_argnames="shared")
    def run(shared):
        slots = 1 + limit * (3 if shared else 1)
        moves = {"spread": branch, "reorder": follow} if shared else {}
        if config.is_encoder_decoder:
            whole = start_translation(config, params, ids, mask, slots)
            step, cache, prompt = make_step(config, params, whole), own_part(whole), jnp.ones((3, 1), jnp.int32)
        else:
            prompt, cache = start_generation(config, params, ids, mask, slots)
            step = make_step(config, params)
        return beam_search(step, cache, prompt, beam_size=3, n_best=3, max_length=limit, eos_id=2, **moves)

    one, other = run(True), run(False)
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.scores, other.scores, atol=2e-5)
    assert len({tuple(row) for row in np.asarray(one.ids[0]).tolist()}) == 3


def test_beams_share_a_cache_where_every_layer_keeps_all_keys(small):
    window = (AttentionPattern("window", window=2), AttentionPattern())
    assert branches(small.config(), 4)
    assert not branches(small.config(), 1) and not branches(small.config(), 100)
    assert not branches(small.config(attention_pattern=window), 4)
