"""A sentence gives the same tokens and scores alone, in any batch, order, padding, chunking and allocated length.

The reference is one pass over the whole sequence without a cache: every log-probability must be the one it gives.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.config import AttentionPattern, ModelConfig
from tfm.decoding import beam_search, greedy, token_log_probs
from tfm.models import build, init_params
from tfm.models.stepper import (
    branch,
    branches,
    follow,
    make_step,
    own_part,
    start_generation,
    start_translation,
)
from tfm.nn.cache import empty_cache

V, BOS, EOS, LIMIT, BEAMS = 11, 1, 2, 6, 3
LENGTHS = (5, 2, 7)
PATTERNS = {
    "full": (AttentionPattern(),),
    "window": (AttentionPattern("window", window=3),),
    "mixed": (AttentionPattern("window", window=2), AttentionPattern()),
    "linear": (AttentionPattern("linear"),),
}


def make_config(kind, position, pattern, kv_heads):
    return ModelConfig(
        vocab_size=V,
        d_model=16,
        d_ff=24,
        num_heads=4,
        num_kv_heads=kv_heads,
        encoder_layers=1 if kind == "translation" else 0,
        decoder_layers=2,
        position=position,
        attention_pattern=PATTERNS[pattern],
        t5_buckets=8,
        t5_max_distance=16,
        shaw_distance=2,
        max_positions=32,
    )


def make_params(config):
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree.map_with_path(
        lambda path, x: jnp.asarray(random.normal(path[-1].key == "scale", 0.4, x.shape), x.dtype), shapes
    )


def padded(rows, side, length):
    """ids and mask [B, length]."""
    ids, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[i, place], mask[i, place] = row, True
    return ids, mask


@partial(jax.jit, static_argnames=("config", "spare"))
def search_batch(config, params, ids, mask, limit, spare):
    """Greedy and beam search over padded rows, with `spare` more slots than needed; beams share a cache if they can."""
    moves = {"spread": branch, "reorder": follow} if branches(config, BEAMS) else {}
    slots = 1 + spare + LIMIT * (BEAMS if moves else 1)
    if config.is_encoder_decoder:
        shared = start_translation(config, params, ids, mask, slots)
        step, cache = make_step(config, params, shared), own_part(shared)
        prompt = jnp.full((len(ids), 1), BOS)
    else:
        prompt, cache = start_generation(config, params, ids, mask, slots)
        step = make_step(config, params)
    return both(step, cache, prompt, limit, None, moves)


@partial(jax.jit, static_argnames=("config", "chunk"))
def search_alone(config, params, row, limit, chunk):
    """The same for one unpadded row, a decoder's prompt being read in chunks, and every beam with its own cache."""
    if config.is_encoder_decoder:
        shared = start_translation(config, params, row, jnp.ones(row.shape, bool), LIMIT + 1)
        return both(make_step(config, params, shared), own_part(shared), jnp.full((1, 1), BOS), limit, None, {})
    cache = empty_cache(config, 1, row.shape[1] + LIMIT)
    return both(make_step(config, params), cache, row, limit, chunk, {})


def both(step, cache, prompt, limit, chunk, moves):
    options = {"max_length": limit, "buffer_length": LIMIT, "eos_id": EOS, "prefill_chunk": chunk, "alpha": 0.6}
    one = greedy(step, cache, prompt, **options)
    return one, beam_search(step, cache, prompt, beam_size=BEAMS, n_best=2, **options, **moves)


@partial(jax.jit, static_argnames=("config", "start"))
def whole_pass(config, params, source, target, labels, start):
    """The log-probability of each label, without a cache."""
    inputs = (source, target) if config.is_encoder_decoder else (target,)
    logits = build(config).apply({"params": params}, *inputs)
    return token_log_probs(logits[:, start:], labels)


def check(kind, position, pattern, kv_heads, side, order, spare, chunk, pick):
    config = make_config(kind, position, pattern, kv_heads)
    params = make_params(config)
    random = np.random.default_rng(7)
    rows = [random.integers(3, V, n).astype(np.int32) for n in LENGTHS]
    limits = np.array([LIMIT, 3, LIMIT])
    ids, mask = padded([rows[i] for i in order], side, 8)
    batch = search_batch(config, params, ids, mask, limits[list(order)], spare)
    place, row = order.index(pick), rows[pick]
    alone = search_alone(config, params, row[None], limits[[pick]], chunk)
    for in_batch, by_itself in zip(batch, alone, strict=True):
        np.testing.assert_array_equal(in_batch.ids[place], by_itself.ids[0])
        np.testing.assert_array_equal(in_batch.finished[place], by_itself.finished[0])
        np.testing.assert_allclose(in_batch.scores[place], by_itself.scores[0], atol=1e-4)
    hypotheses = np.concatenate([alone[0].ids, alone[1].ids[0]])
    log_probs = np.concatenate([alone[0].log_probs, alone[1].log_probs[0]])
    real = np.arange(LIMIT) < np.concatenate([alone[0].lengths, alone[1].lengths[0]])[:, None]
    head = np.tile([[BOS]] if kind == "translation" else row[None], (3, 1))
    target = np.concatenate([head, hypotheses[:, :-1]], axis=1)
    expected = whole_pass(config, params, np.tile(row, (3, 1)), target, hypotheses, head.shape[1] - 1)
    np.testing.assert_allclose(log_probs[real], np.asarray(expected)[real], atol=1e-4)


CASES = [
    ("translation", "sinusoidal", "full", 4, "left", (2, 0, 1), 3, None, 1),
    ("generation", "rotary", "mixed", 2, "left", (1, 2, 0), 2, 2, 2),
    ("generation", "none", "linear", 1, "right", (0, 2, 1), 0, 3, 0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:5])))
def test_company_does_not_matter(case):
    check(*case)


@pytest.mark.slow
@settings(max_examples=16)
@given(
    kind=st.sampled_from(["translation", "generation"]),
    position=st.sampled_from(["sinusoidal", "learned", "shaw", "t5", "rotary", "alibi", "none"]),
    pattern=st.sampled_from(sorted(PATTERNS)),
    kv_heads=st.sampled_from([4, 2, 1]),
    side=st.sampled_from(["left", "right"]),
    order=st.permutations(range(3)).map(tuple),
    spare=st.sampled_from([0, 4]),
    chunk=st.sampled_from([None, 1, 2, 3]),
    pick=st.integers(0, 2),
)
def test_company_never_matters(**drawn):
    if drawn["pattern"] == "linear" and drawn["position"] in ("shaw", "t5", "alibi"):
        drawn["position"] = "rotary"  # these act on scores, which linear attention does not have
    check(**drawn)
