"""Attention as kernel regression and as a Hopfield network, against the formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tfm.analysis.hopfield import hopfield_energy, hopfield_step, kernel_regression, retrieved_share


def test_kernel_regression_is_nadaraya_watson():
    random = np.random.default_rng(0)
    queries, points, values = (random.normal(size=shape).astype(np.float32) for shape in ((5, 3), (7, 3), (7, 2)))
    distances = ((queries[:, None] - points) ** 2).sum(-1)
    kernel = np.exp(-distances / (2 * 0.6**2))
    expected = (kernel / kernel.sum(1, keepdims=True)) @ values
    np.testing.assert_allclose(kernel_regression(queries, points, values, bandwidth=0.6), expected, rtol=1e-4)


def test_steps_and_energy_by_their_equations():
    random = np.random.default_rng(1)
    states, patterns = (random.normal(size=shape).astype(np.float32) for shape in ((4, 6), (9, 6)))
    beta = 0.7
    weights = np.exp(beta * states @ patterns.T)
    weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(hopfield_step(states, patterns, beta=beta), weights @ patterns, rtol=1e-5)
    energy = (-np.log(np.exp(beta * states @ patterns.T).sum(1)) / beta + (states**2).sum(1) / 2
              + np.log(9) / beta + (patterns**2).sum(1).max() / 2)
    np.testing.assert_allclose(hopfield_energy(states, patterns, beta=beta), energy, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_energy_never_rises(beta):
    """Ramsauer et al. (2020), theorem 1."""
    random = np.random.default_rng(2)
    states, patterns = (random.normal(size=shape).astype(np.float32) for shape in ((8, 6), (9, 6)))
    energies = [hopfield_energy(states, patterns, beta=beta)]
    for _ in range(4):
        states = hopfield_step(states, patterns, beta=beta)
        energies.append(hopfield_energy(states, patterns, beta=beta))
    assert (np.diff(np.stack(energies), axis=0) <= 1e-4).all()
    assert (energies[0] - energies[-1]).min() > 0.01


def test_wider_patterns_are_brought_back():
    """Theorem 3: what can be stored grows exponentially with the width."""
    assert retrieved_share(256, 8, noise=0.3) < 0.2 < 0.9 < retrieved_share(256, 64, noise=0.3)
