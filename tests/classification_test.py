"""F1 against numbers worked out by hand (scikit-learn's `f1_score` gives the same)."""

import numpy as np

from tfm.classification import f1_scores


def test_f1_by_hand():
    truth = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 0])
    found = np.array([0, 1, 0, 1, 2, 2, 2, 0, 2, 0])
    # class 0: precision 3/4, recall 3/4; class 1: 1/2, 1/2; class 2: 3/4, 3/4
    np.testing.assert_allclose(f1_scores(truth, found, 3), [0.75, 0.5, 0.75])


def test_classes_that_never_occur_do_not_count():
    scores = f1_scores(np.array([0, 0, 3]), np.array([0, 3, 3]), 5)
    np.testing.assert_allclose(scores, [2 / 3, np.nan, np.nan, 2 / 3, np.nan])


def test_a_class_that_is_always_missed_counts_as_0():
    np.testing.assert_allclose(f1_scores(np.array([0, 1]), np.array([0, 0]), 2), [2 / 3, 0.0])
