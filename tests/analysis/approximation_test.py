"""Exact and approximate attention: equality, cost, and what a window cannot see."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tfm.analysis.approximation import (
    PATTERNS,
    blockwise_difference,
    draw_echo,
    forward_cost,
    learn_echo,
    pattern_config,
)
from tfm.models import count_params


def test_patterns_have_equal_parameters():
    assert len({count_params(pattern_config(name)) for name in PATTERNS}) == 1


def test_echoes_repeat_what_was_before():
    tokens = np.asarray(draw_echo(40, jax.random.key(0)))
    np.testing.assert_array_equal(tokens[:, 40:], tokens[:, : tokens.shape[1] - 40])
    assert (tokens[:, 1:40] != tokens[:, :39]).mean() > 0.8


@pytest.mark.parametrize("name", ["full", "bigbird"])
def test_blockwise_is_exact(name):
    assert blockwise_difference(name, 96) < 1e-5


def test_memory_of_blocks_grows_with_the_length_and_of_dense_with_its_square():
    growth = {name: forward_cost(name, 2048, repeats=0)["megabytes"] / forward_cost(name, 512, repeats=0)["megabytes"]
              for name in ("dense", "window")}
    assert growth["dense"] > 10 and growth["window"] < 6


@pytest.mark.slow
def test_a_window_cannot_see_far():
    """Two layers of a window of 16 reach 31 places back, not 40; full attention sees all."""
    far = {name: learn_echo(name, 40, steps=600) for name in ("full", "window")}
    assert far["full"] < 1.0 and far["window"] > 2.0
