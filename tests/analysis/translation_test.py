"""The toy pair's data, and the direction of what label smoothing does."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tfm.analysis.translation import (
    BASE,
    BOS,
    EOS,
    FIRST,
    RICH,
    WORDS,
    draw_pairs,
    smoothing_gradient_error,
    token_figures,
    train_pairs,
    unseen_rows,
)


def test_targets_are_reversed_sources_in_one_of_two_dialects():
    batch = {name: np.asarray(x) for name, x in draw_pairs(jax.random.key(3), 400).items()}
    rich, choices = [], []
    for source, labels, target, weights in zip(*(batch[n] for n in ("source", "labels", "target", "weights")),
                                               strict=True):
        length = int(np.argmax(source == EOS))
        assert 3 <= length <= 8 and weights.sum() == length + 1 and labels[length] == EOS
        dialect, words = np.divmod(labels[:length] - FIRST, WORDS)
        np.testing.assert_array_equal(words, source[:length][::-1] - FIRST)
        assert (dialect == 0).all() or (dialect > 0).all()
        rich.append(dialect[0] > 0)
        choices += dialect[dialect > 0].tolist()
        assert target[0] == BOS and (target[1 : length + 1] == labels[:length]).all()
    assert abs(np.mean(rich) - RICH) < 0.07
    assert set(choices) == {1, 2} and abs(np.mean(choices) - 1.5) < 0.05


def test_rows_for_decoding_have_no_padding():
    sources, references = unseen_rows(20)
    assert all(source[-1] == EOS and len(source) == len(reference) + 1
               for source, reference in zip(sources, references, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_gradient_is_p_minus_q(smoothing):
    assert smoothing_gradient_error(smoothing) < 1e-6


@pytest.mark.slow
def test_smoothing_makes_models_unsure_and_averages_help():
    """Vaswani et al. (2017), section 5.4: worse perplexity; section 6.1: averages."""
    plain, smoothed = (train_pairs(BASE, smoothing=epsilon, steps=400) for epsilon in (0.0, 0.3))
    sharp, soft = token_figures(BASE, plain[0]), token_figures(BASE, smoothed[0])
    assert soft["perplexity"] > sharp["perplexity"] + 0.05 and soft["confidence"] < sharp["confidence"] - 0.05
    assert sharp["accuracy"] > 0.6
    assert token_figures(BASE, plain[1])["perplexity"] < sharp["perplexity"] + 0.01
