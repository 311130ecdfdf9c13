"""The dropout module: off by default, one key one mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.nn import Dropout

X = jnp.ones((30, 100))


def drop(rate, key, deterministic=False):
    rngs = None if key is None else {"dropout": jax.random.key(key)}
    return np.asarray(Dropout(rate).apply({}, X, deterministic=deterministic, rngs=rngs))


def test_rate_and_scale():
    y = drop(0.25, 0)
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / y.size)


def test_the_key_decides():
    np.testing.assert_array_equal(drop(0.5, 1), drop(0.5, 1))
    assert (drop(0.5, 1) != drop(0.5, 2)).mean() > 0.4


def test_deterministic_calls_and_a_rate_of_zero_need_no_key():
    np.testing.assert_array_equal(drop(0.5, None, deterministic=True), X)
    np.testing.assert_array_equal(drop(0.0, None), X)
    with pytest.raises(Exception, match="dropout"):
        drop(0.5, None)
