"""With a cache, in chunks of any size, a decoder gives the logits that it gives without one."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import AttentionPattern
from tfm.models import build
from tfm.nn.cache import init_cache

LENGTH = 6
POSITIONS = ("sinusoidal", "learned", "shaw", "t5", "rotary", "alibi", "none")
PATTERNS = {
    "full": (AttentionPattern(),),
    "window shorter": (AttentionPattern("window", window=3),),
    "window of one": (AttentionPattern("window", window=1),),
    "window equal": (AttentionPattern("window", window=LENGTH),),
    "window longer": (AttentionPattern("window", window=9),),
    "alternating": (AttentionPattern("window", window=2), AttentionPattern()),
    "longformer": (AttentionPattern("longformer", window=2, global_tokens=(1,)),),
    "bigbird": (AttentionPattern("bigbird", block_size=2, random_blocks=1),),
    "linear": (AttentionPattern("linear"),),
    "linear and window": (AttentionPattern("linear"), AttentionPattern("window", window=3)),
}
SPLITS = ((6,), (1, 1, 1, 1, 1, 1), (2, 3, 1), (1, 4, 1), (5, 1))
MASKS = {
    "none": np.ones((2, LENGTH), bool),
    "right": np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], bool),
    "left": np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool),
}
BIASED = ("shaw", "t5", "alibi")


def decoder_config(small, **changes):
    return small.config(**{"encoder_layers": 0, **changes})


def in_chunks(step, cache, tokens, mask, split):
    outputs, start = [], 0
    for size in split:
        logits, cache = step(tokens[:, start:start + size], mask[:, start:start + size], cache)
        outputs.append(logits)
        start += size
    return np.concatenate(outputs, axis=1), cache


def assert_close_where(mask, actual, expected, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(actual)[mask], np.asarray(expected)[mask], atol=tolerance, rtol=tolerance)


def check_decoder(small, config, mask, split, tolerance=2e-5, dtype=None):
    module, params = build(config), small.params(config)
    tokens, variables = small.ids(3, mask.shape), {"params": params}

    def step(tokens, mask, cache):
        return module.apply(variables, tokens, mask=jnp.asarray(mask), cache=cache)

    expected = module.apply(variables, tokens, mask=jnp.asarray(mask))
    actual, cache = in_chunks(step, init_cache(config, 2, LENGTH, dtype=dtype), tokens, mask, split)
    np.testing.assert_array_equal(cache.lengths, mask.sum(1))
    assert_close_where(mask, actual, expected, tolerance)
    return np.abs(np.asarray(actual) - np.asarray(expected))[mask].max()


def check_transformer(small, config, mask, split):
    module, params = build(config), small.params(config)
    source, source_mask = small.ids(4, (2, 5)), jnp.asarray([[True] * 5, [True] * 3 + [False] * 2])
    target, variables = small.ids(3, mask.shape), {"params": params}
    expected = module.apply(variables, source, target, source_mask=source_mask, target_mask=jnp.asarray(mask))
    encoded = module.apply(variables, source, source_mask=source_mask, method="encode")
    cache = module.apply(variables, encoded, LENGTH, source_mask=source_mask, method="init_cache")

    def step(tokens, mask, cache):
        return module.apply(variables, tokens, None, target_mask=jnp.asarray(mask), cache=cache, method="decode")

    actual, _ = in_chunks(step, cache, target, mask, split)
    assert_close_where(mask, actual, expected)


@hypothesis.settings(max_examples=10)
@hypothesis.given(position=st.sampled_from(POSITIONS), pattern=st.sampled_from(sorted(PATTERNS)),
                  kv_heads=st.sampled_from([4, 2, 1]), padding=st.sampled_from(sorted(MASKS)),
                  split=st.sampled_from(SPLITS), norm_position=st.sampled_from(["pre", "post"]),
                  cross=st.booleans())
def test_cached_logits_equal_uncached_ones(small, position, pattern, kv_heads, padding, split, norm_position, cross):
    hypothesis.assume(not (position in BIASED and "linear" in pattern))
    config = decoder_config(small, position=position, attention_pattern=PATTERNS[pattern], num_kv_heads=kv_heads,
                          norm_position=norm_position, encoder_layers=1 if cross else 0)
    (check_transformer if cross else check_decoder)(small, config, MASKS[padding], split)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_scheme_with_every_pattern(small, position, pattern):
    if position in BIASED and "linear" in pattern:
        pytest.skip("refused by the config")
    for kv_heads, padding, split in ((4, "none", SPLITS[2]), (2, "right", SPLITS[1]), (1, "left", SPLITS[3])):
        config = decoder_config(small, position=position, attention_pattern=PATTERNS[pattern], num_kv_heads=kv_heads)
        check_decoder(small, config, MASKS[padding], split)


def test_prompts_of_either_padding_then_one_token_at_a_time(small):
    """What generation does: ragged prompts in one chunk, then steps of one token for every row."""
    config = decoder_config(small, position="rotary", norm_position="pre",
                          attention_pattern=(AttentionPattern("window", window=3), AttentionPattern()))
    module, params = build(config), small.params(config)
    row = small.ids(5, (1, 6))
    alone = module.apply({"params": params}, row)
    for mask in ([[True, True, True, False]], [[False, True, True, True]]):
        mask = jnp.asarray(mask)
        prompt = jnp.zeros((1, 4), jnp.int32).at[mask].set(row[0, :3])
        cache = init_cache(config, 1, 7)
        _, cache = module.apply({"params": params}, prompt, mask=mask, cache=cache)
        for i in range(3, 6):
            logits, cache = module.apply({"params": params}, row[:, i:i + 1], cache=cache)
            np.testing.assert_allclose(logits[0, 0], alone[0, i], atol=2e-5)


def test_a_chunk_of_a_prefix_model_sees_the_whole_prefix(small):
    config = decoder_config(small, position="t5")
    module, params = build(config), small.params(config)
    tokens, prefix = small.ids(6, (2, LENGTH)), jnp.asarray([3, 1])
    expected = module.apply({"params": params}, tokens, prefix_length=prefix)
    causal = module.apply({"params": params}, tokens)
    first, cache = module.apply({"params": params}, tokens[:, :4], prefix_length=prefix,
                                cache=init_cache(config, 2, LENGTH))
    second, _ = module.apply({"params": params}, tokens[:, 4:], prefix_length=prefix, cache=cache)
    np.testing.assert_allclose(np.concatenate([first, second], 1), expected, atol=2e-5)
    assert np.abs(np.asarray(causal - expected)[0, 0]).max() > 1e-3
    np.testing.assert_allclose(causal[1, 0], expected[1, 0], atol=1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 0.1), ("int8", 0.1)])
def test_narrow_caches_change_the_logits_little(small, dtype, bound):
    config = decoder_config(small, position="rotary", num_kv_heads=2, norm_position="pre",
                          attention_pattern=(AttentionPattern("window", window=3), AttentionPattern()))
    error = check_decoder(small, config, MASKS["none"], (2, 3, 1), bound, jnp.dtype(dtype))
    assert dtype == "float32" or error > 1e-5, "the cache was not narrow"


def test_a_model_in_bfloat16_has_a_cache_in_bfloat16(small):
    config = decoder_config(small, position="rotary", dtype="bfloat16")
    cache = init_cache(config, 2, LENGTH)
    assert {x.dtype for x in jax.tree.leaves(cache.layers)} == {jnp.dtype("bfloat16")}
    check_decoder(small, config, MASKS["none"], (2, 3, 1), 0.1)


def test_scanned_layers_decode_with_a_cache(small):
    config = decoder_config(small, position="rotary", scan_layers=True, decoder_layers=3,
                          attention_pattern=PATTERNS["alternating"])
    check_decoder(small, config, MASKS["right"], (2, 3, 1))


def test_calls_that_a_cache_cannot_serve_are_refused(small):
    config = decoder_config(small)
    module, params = build(config), small.params(config)
    cache = init_cache(config, 2, LENGTH)
    with pytest.raises(ValueError, match="segments"):
        module.apply({"params": params}, small.ids(0, (2, 2)), segments=jnp.ones((2, 2), jnp.int32), cache=cache)
    with pytest.raises(ValueError, match="max_positions"):
        init_cache(dataclasses.replace(config, position="learned"), 2, 9)
    translator = build(small.config(encoder_layers=1))
    params = small.params(translator.config)
    with pytest.raises(ValueError, match="encoded"):
        translator.apply({"params": params}, small.ids(0, (2, 2)), None, cache=cache, method="decode")
