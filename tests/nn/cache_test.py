"""Slots, rings, quantisation and the size of the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import AttentionPattern, ModelConfig
from tfm.models.presets import mistral, transformer_base
from tfm.nn.cache import KeyValue, Slots, by_head, cache_bytes, init_cache, plan, quantize, store
from tfm.ops.linear import LinearState


def empty(size, ring, rows=2):
    slots = Slots(jnp.zeros((rows, size), jnp.int32), jnp.zeros((rows, size), bool), jnp.zeros(rows, jnp.int32), ring)
    return slots, KeyValue(jnp.zeros((rows, 1, 1, size)), jnp.zeros((rows, 1, size, 1)))


def run(size, ring, masks):
    """Write tokens whose keys are their positions; what each row holds after every call, sorted."""
    slots, layer = empty(size, ring)
    past, held = np.zeros(2, int), []
    for mask in masks:
        mask = np.asarray(mask, bool)
        positions = past[:, None] + np.maximum(np.cumsum(mask, 1) - 1, 0)
        past = past + mask.sum(1)
        slots, where = plan(slots, jnp.asarray(positions, jnp.int32), jnp.asarray(mask))
        new = jnp.asarray(positions, jnp.float32)[:, :, None, None]
        layer, keys = store(layer, new, 10 * new, where)
        seen = np.asarray(keys.key)[:, 0, 0]
        assert (seen == np.asarray(where.positions))[np.asarray(where.valid)].all(), "keys and positions went apart"
        valid, stored = np.asarray(slots.valid), np.asarray(layer.key)[:, 0, 0]
        assert (stored == np.asarray(slots.positions))[valid].all()
        np.testing.assert_array_equal(layer.value[..., 0], 10 * layer.key[:, :, 0])
        held.append([sorted(int(x) for x in row[ok]) for row, ok in zip(stored, valid, strict=True)])
    return held


ONE, NONE = [[1], [1]], [[1], [0]]


def test_a_ring_keeps_the_newest_real_tokens():
    held = run(3, True, [ONE, ONE, NONE, ONE, ONE])
    assert held == [[[0], [0]], [[0, 1], [0, 1]], [[0, 1, 2], [0, 1]], [[1, 2, 3], [0, 1, 2]], [[2, 3, 4], [1, 2, 3]]]


def test_a_ring_takes_chunks_longer_and_shorter_than_itself_between_single_tokens():
    held = run(3, True, [[[1, 1, 1, 1, 0], [0, 0, 0, 1, 1]], ONE, [[1, 1], [0, 1]], ONE])
    assert held == [[[1, 2, 3], [0, 1]], [[2, 3, 4], [0, 1, 2]], [[4, 5, 6], [1, 2, 3]], [[5, 6, 7], [2, 3, 4]]]


def test_a_whole_cache_keeps_all_real_tokens():
    held = run(6, False, [[[1, 1, 0], [0, 1, 1]], ONE, NONE])
    assert held[-1] == [[0, 1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_int8_is_within_half_a_step_of_each_vector(scale):
    x = jnp.asarray(scale * np.random.default_rng(0).normal(size=(2, 5, 3, 16)), jnp.float32)
    stored = quantize(by_head(x, x))
    assert stored.key.dtype == jnp.int8 and stored.key_scale.shape == (2, 3, 1, 5)
    error = np.abs(np.asarray(stored.key) * np.asarray(stored.key_scale, np.float64) - by_head(x, x).key)
    assert (error <= np.abs(by_head(x, x).key).max(2, keepdims=True) / 127 / 2 * 1.001).all()
    error = np.abs(np.asarray(stored.value) * np.asarray(stored.value_scale, np.float64) - by_head(x, x).value)
    assert (error <= np.abs(by_head(x, x).value).max(3, keepdims=True) / 127 / 2 * 1.001).all()


def test_int8_of_a_zero_vector_is_zero():
    stored = quantize(by_head(jnp.zeros((1, 1, 1, 4)), jnp.zeros((1, 1, 1, 4))))
    np.testing.assert_array_equal(stored.key * stored.key_scale, np.zeros((1, 1, 4, 1)))


def test_size_of_the_base_models_cache():
    """6 layers x (keys + values) x 512 = 6,144 floats for each token, and little beside."""
    config, length = transformer_base(), 1000
    size = cache_bytes(config, 1, length)
    book_keeping = length * (4 + 1) + 2 * 4  # a position and a flag for each slot; slots used; length
    assert size == 4 * 6144 * length + book_keeping
    assert cache_bytes(config, 3, length) == 3 * size
    assert cache_bytes(config, 1, length, dtype="bfloat16") == 2 * 6144 * length + book_keeping
    scales = 6 * 2 * 8 * 4 * length
    assert cache_bytes(config, 1, length, dtype="int8") == 6144 * length + scales + book_keeping


def test_grouped_heads_windows_and_linear_layers_need_less():
    long, window = 100_000, 4096
    size = cache_bytes(mistral(dtype="bfloat16"), 1, long)
    assert size == 32 * 2 * 8 * 128 * 2 * window + window * 5 + 8
    linear = ModelConfig(vocab_size=8, d_model=32, num_heads=4, encoder_layers=0, decoder_layers=2,
                         attention_pattern=(AttentionPattern("linear"),))
    assert cache_bytes(linear, 1, 10) == cache_bytes(linear, 1, long) == 2 * 4 * (4 * 8 * 8 + 4 * 8) + 4


def test_every_leaf_starts_with_the_batch():
    config = ModelConfig(vocab_size=8, d_model=32, num_heads=4, encoder_layers=0, decoder_layers=4,
                         attention_pattern=(AttentionPattern("linear"), AttentionPattern("window", window=3),
                                            AttentionPattern()))
    cache = init_cache(config, 5, 7, dtype="int8")
    assert {leaf.shape[0] for leaf in jax.tree.leaves(cache)} == {5}
    assert isinstance(cache.layers[0], LinearState) and isinstance(cache.layers[1], KeyValue)
    assert [layer.value.shape[2] for layer in cache.layers[1:3]] == [3, 7]
    assert [slots.ring for slots in cache.slots] == [True, False]
