"""The corruptions by hand, and the directions of the papers' claims."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tfm.analysis.corruption import (
    LENGTH,
    MASK,
    SPAN,
    draw_masked,
    draw_spans,
    learn_masked,
    learn_spans,
    steps_of_equal_compute,
)


def test_shares_of_80_10_10():
    batch = {name: np.asarray(x) for name, x in draw_masked("80/10/10", jax.random.key(0), 2000).items()}
    chosen, tokens, text = batch["chosen"], batch["tokens"], batch["text"]
    assert abs(chosen.mean() - 0.15) < 0.01 and (tokens == text)[~chosen].all()
    assert abs((tokens[chosen] == MASK).mean() - 0.8) < 0.02
    assert abs((tokens[chosen] == text[chosen]).mean() - (0.1 + 0.1 / 16)) < 0.02


def test_spans_put_back_give_the_text():
    short, whole = ({name: np.asarray(x) for name, x in draw_spans(objective, jax.random.key(1), 50).items()}
                    for objective in ("T5", "BART"))
    np.testing.assert_array_equal(short["source"], whole["source"])
    for source, span, text, inside in zip(short["source"], short["labels"], whole["labels"], whole["span"],
                                          strict=True):
        place = int(np.flatnonzero(source == MASK)[0])
        np.testing.assert_array_equal([*source[:place], *span, *source[place + 1 :]], text)
        np.testing.assert_array_equal(np.flatnonzero(inside), place + np.arange(SPAN))
    assert short["target"].shape[1] == SPAN and whole["target"].shape[1] == LENGTH


def test_short_targets_allow_more_updates():
    steps = steps_of_equal_compute(100)
    assert steps["BART"] == 100 and 120 < steps["T5"] < 300


@pytest.mark.slow
def test_mask_only_trusts_what_it_sees():
    """Devlin et al. (2019), section 3.1."""
    mixed, masked = (learn_masked(recipe, steps=600) for recipe in ("80/10/10", "mask only"))
    assert mixed["noticed"] > masked["noticed"] + 0.15
    assert abs(mixed["masked"] - masked["masked"]) < 0.3


@pytest.mark.slow
def test_short_targets_win_at_equal_compute():
    """Raffel et al. (2020), section 3.3.4: not worse, and cheaper; here the same compute gives a lower loss."""
    losses = {name: learn_spans(name, steps=steps) for name, steps in steps_of_equal_compute(600).items()}
    assert losses["T5"] < losses["BART"] - 0.1
