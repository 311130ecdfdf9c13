"""Alignments against the attention maps of single pairs, and the weights that a decoding step gives the source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.alignment import align, cross_weights, words
from tfm.analysis.attention_maps import attention_maps
from tfm.config import ModelConfig
from tfm.inference import Search, generate
from tfm.models import init_params
from tfm.models.stepper import make_step, own_part, start_translation

CONFIG = ModelConfig(vocab_size=31, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=2)
SOURCES = [[5, 6, 7, 2], [8, 9, 4, 11, 12, 2]]
TARGETS = [[4, 9, 2], [7, 7, 3, 5, 2]]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 2.5 * x, init_params(CONFIG, jax.random.key(1)))


@pytest.fixture(scope="module")
def expected(params):
    """Of each pair alone, unpadded: the mean over heads of the last layer but one."""
    maps = [attention_maps(CONFIG, params, source, [1, *target[:-1]], part="cross", layer=0)
            for source, target in zip(SOURCES, TARGETS, strict=True)]
    return [found.cross[0].mean(0) for found in maps]


def test_batches_give_the_maps_of_single_pairs(params, expected):
    found = cross_weights(CONFIG, params, SOURCES, TARGETS, start_id=1)
    for weights, alone in zip(found, expected, strict=True):
        np.testing.assert_allclose(weights, alone, atol=1e-5)
    assert cross_weights(CONFIG, params, SOURCES, [[], TARGETS[1]], start_id=1)[0].shape == (0, 4)


def test_steps_give_the_weights_of_the_whole_pass(params, expected):
    source = jnp.zeros((2, 6), jnp.int32).at[0, :4].set(jnp.array(SOURCES[0])).at[1].set(jnp.array(SOURCES[1]))
    mask = jnp.arange(6) < jnp.array([[4], [6]])
    shared = start_translation(CONFIG, params, source, mask, 6)
    step = jax.jit(make_step(CONFIG, params, shared, attention=True))
    cache = own_part(shared)
    inputs = np.array([[1, *TARGETS[0][:-1]], [1, *TARGETS[1][:2]]])
    for t in range(3):
        _, cache, weights = step(jnp.asarray(inputs[:, t : t + 1]), cache)
        for row, length in enumerate((4, 6)):
            np.testing.assert_allclose(weights[row, :length], expected[row][t], atol=1e-5)
            np.testing.assert_allclose(weights[row, length:], 0)


def test_the_coverage_penalty_is_that_of_the_attention(params):
    """score = log p / length_penalty + beta * sum_i log(min(sum_t a_ti, 1)) of the hypothesis's own pass."""
    beta = 0.7
    eos = generate(CONFIG, params, SOURCES[:1], Search(), limits=[3], start_id=1)[0][0].ids[-1]  # it will come
    search = Search(beam_size=4, n_best=4, coverage=beta, alpha=0.6, eos_ids=(eos,))
    found = generate(CONFIG, params, SOURCES, search, limits=[8, 8], start_id=1)
    whole = [(source, h) for source, row in zip(SOURCES, found, strict=True) for h in row if h.finished]
    assert whole
    for source, hypothesis in whole:
        target = [*hypothesis.ids, eos]
        (weights,) = cross_weights(CONFIG, params, [source], [target], start_id=1)
        covered = np.log(np.minimum(weights.sum(0), 1)).sum()
        length = ((5 + len(target)) / 6) ** 0.6
        assert hypothesis.score == pytest.approx(sum(hypothesis.log_probs) / length + beta * covered, abs=2e-4)


def test_a_word_is_paired_with_the_word_that_its_pieces_attend_to():
    source, target = ["▁a", "b", "▁c"], ["▁x", "y", "▁z"]
    weights = np.array([[0.3, 0.3, 0.2, 0.2], [0.1, 0.1, 0.7, 0.1], [0.4, 0.2, 0.3, 0.1]])
    pairs, sure = align(weights, source, target)
    assert words(source) == [0, 0, 1] and words(target) == [0, 0, 1]
    by_word = np.array([[0.6 + 0.2, 0.2 + 0.7], [2 * 0.6, 2 * 0.3]]) / 2
    assert pairs == [(int(row.argmax()), j) for j, row in enumerate(by_word)]
    assert sure == pytest.approx(by_word.max(1).mean(), abs=1e-4)
    assert align(np.zeros((0, 4)), source, []) == ([], 0.0)
