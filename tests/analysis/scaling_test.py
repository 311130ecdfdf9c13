"""The factor 1/sqrt(d_k): closed forms, and the direction of the paper's claim."""

from __future__ import annotations

import pytest

from tfm.analysis.scaling import attention_seconds, learn_lookup, softmax_saturation


@pytest.mark.parametrize("d_k", [4, 256])
def test_variance_of_the_scores_is_d_k_or_1(d_k):
    """Vaswani et al. (2017), footnote 4."""
    assert softmax_saturation(d_k, scaled=False)["variance"] == pytest.approx(d_k, rel=0.1)
    assert softmax_saturation(d_k, scaled=True)["variance"] == pytest.approx(1.0, rel=0.1)


def test_without_the_factor_the_gradient_vanishes():
    narrow, wide = (softmax_saturation(d_k, scaled=False) for d_k in (4, 1024))
    assert wide["gradient"] < 0.5 * narrow["gradient"] and wide["greatest weight"] > 0.9
    kept = softmax_saturation(1024, scaled=True)
    assert kept["gradient"] > 2 * wide["gradient"] and kept["entropy"] > 3.5


@pytest.mark.slow
def test_unscaled_heads_learn_last():
    """Section 3.2.1: additive attention is better than unscaled products at large d_k; scaled products are too."""
    late = {kind: sum(learn_lookup(kind, 512, steps=100)[-20:]) / 20 for kind in ("scaled dot", "dot", "additive")}
    assert late["scaled dot"] < 0.3 and late["additive"] < 0.5 and late["dot"] > 1.0


@pytest.mark.slow
def test_additive_attention_is_slower():
    """It computes T S tanh of width d_k, where products are one matrix product: a factor of 10 and more here."""
    assert attention_seconds("additive", length=256, d_k=64) > 2 * attention_seconds("scaled dot", length=256, d_k=64)
