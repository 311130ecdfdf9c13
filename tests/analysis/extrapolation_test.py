"""The tasks of the extrapolation experiment, and the direction of the paper's claim."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tfm.analysis.extrapolation import (
    NEEDLES,
    VOCABULARY,
    draw_retrieval,
    draw_text,
    retrieval_accuracy,
    text_losses,
    train_scheme,
)


def test_texts_have_one_usual_follower_in_each_dialect():
    text = np.asarray(draw_text(jax.random.key(0), 4, 4000))
    shares = []
    for row in text:
        counts = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(counts, (row[:-1], row[1:]), 1)
        shares.append((counts.max(1) / counts.sum(1)).mean())
    np.testing.assert_allclose(shares, 0.7 + 0.3 / VOCABULARY, atol=0.03)


def test_needles_stand_where_they_are_asked_for_and_are_the_answer():
    tokens = np.asarray(draw_retrieval(jax.random.key(0), 64, 40, 5, 9))
    assert (tokens[:, -2] == VOCABULARY).all()
    needles = tokens[:, :-2] < NEEDLES
    assert (needles.sum(1) == 1).all() and set(needles.argmax(1)) == {5, 6, 7, 8}
    np.testing.assert_array_equal(tokens[np.arange(64), needles.argmax(1)], tokens[:, -1])


@pytest.mark.slow
def test_alibi_reads_longer_texts_than_sinusoids():
    """Press et al. (2022), figure 1."""
    growth = {}
    for scheme in ("sinusoidal", "alibi"):
        params = train_scheme("text", scheme, steps=400)
        short, long = (text_losses(scheme, params, times)["sliding"] for times in (1, 8))
        growth[scheme] = long - short
    assert growth["alibi"] < 0.05 < 0.1 < growth["sinusoidal"]


@pytest.mark.slow
def test_far_needles_are_found_without_positions_and_lost_with_alibi():
    found = {scheme: retrieval_accuracy(scheme, train_scheme("retrieval", scheme, steps=300), 64)
             for scheme in ("none", "alibi")}
    assert found["none"] > found["alibi"] + 0.2
