"""Searches where JAX's double precision is on: results and their types are those of single precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.decoding import (
    ModelDraft,
    PromptLookup,
    beam_search,
    diverse_beam_search,
    greedy,
    lexical_beam_search,
    sample,
    speculate,
)

EOS, VOCAB = 0, 7
TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
PROMPT = np.array([[1, 2], [3, 4], [5, 5]], np.int32)
LIMITS = dict(max_length=6, eos_id=EOS)


def step(tokens, place):
    return jnp.asarray(TABLE)[tokens], place + tokens.shape[1]


def place():
    return jnp.zeros(3, jnp.int32)


def rewind(place, n):
    return place - n


def speculated(draft, **options):
    return lambda prompt: speculate(step, place(), prompt, draft=draft(), rewind=rewind, **options, **LIMITS)[0]


def draft_model():
    def mirrored(tokens, cache):
        logits, cache = step(tokens, cache)
        return logits[..., ::-1], cache

    return ModelDraft(mirrored, place(), rewind)


KEY = np.array([0, 3], np.uint32)
SEARCHES = {
    "greedy": lambda prompt: greedy(step, place(), prompt, **LIMITS),
    "sample": lambda prompt: sample(step, place(), prompt, key=jnp.asarray(KEY), top_p=0.9, min_p=0.01, **LIMITS),
    "beam": lambda prompt: beam_search(step, place(), prompt, n_best=2, **LIMITS),
    "diverse": lambda prompt: diverse_beam_search(step, place(), prompt, **LIMITS),
    "lexical": lambda prompt: lexical_beam_search(step, place(), prompt, phrases=np.full((3, 1, 1), 4), **LIMITS),
    "lookup": speculated(PromptLookup),
    "model": speculated(draft_model),
    "sampled": speculated(draft_model, key=jnp.asarray(KEY), temperature=1.0),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_tokens_and_types_are_those_of_single_precision(name):
    single = SEARCHES[name](PROMPT)
    with jax.enable_x64(True):
        double = SEARCHES[name](PROMPT)
    assert [x.dtype.name for x in jax.tree.leaves(double)] == ["int32", "float32", "bool", "int32", "float32"]
    np.testing.assert_array_equal(double.ids, single.ids)
    np.testing.assert_allclose(double.scores, single.scores, rtol=1e-6)


def test_greedy_tokens_are_the_table_s():
    with jax.enable_x64(True):
        ids = np.asarray(SEARCHES["greedy"](PROMPT).ids)
    for last, row in zip(PROMPT[:, -1], ids, strict=True):
        for token in row:
            assert token == TABLE[last].argmax()
            last = token
            if token == EOS:
                break
