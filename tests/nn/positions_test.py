"""Default positions, and RoPE as a config asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import ModelConfig
from tfm.nn import Rotary
from tfm.nn.positions import default_positions, rotary_from


def test_positions_count_from_zero():
    np.testing.assert_array_equal(default_positions(4), [0, 1, 2, 3])
    np.testing.assert_array_equal(default_positions(2, past=jnp.array([0, 5])), [[0, 1], [5, 6]])


def test_padding_is_not_counted_on_either_side():
    mask = np.array([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]], bool)
    positions = np.asarray(default_positions(4, mask=jnp.asarray(mask)))
    for row, valid in zip(positions, mask, strict=True):
        np.testing.assert_array_equal(row[valid], np.arange(valid.sum()))
    after = np.asarray(default_positions(4, mask=jnp.asarray(mask), past=jnp.array([1, 2, 3])))
    np.testing.assert_array_equal(after[1][mask[1]], [2, 3])


def test_positions_start_anew_in_each_segment():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2]])
    np.testing.assert_array_equal(default_positions(8, segments=segments),
                                  [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotated_products_depend_on_the_distance_alone(layout):
    rotate = Rotary(base=100.0, layout=layout, dim=4)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 6))
    def product(i, j):
        return float(jnp.sum(rotate(q, np.array([i])) * rotate(k, np.array([j]))))
    assert product(2, 5) == pytest.approx(product(12, 15), abs=1e-5)
    assert abs(product(2, 5) - product(2, 6)) > 1e-3
    np.testing.assert_array_equal(rotate(q, np.array([7]))[..., 4:], q[..., 4:])


def test_a_config_without_rotary_positions_has_no_rotation():
    assert rotary_from(ModelConfig(vocab_size=8)) is None
    config = ModelConfig(vocab_size=8, position="rotary", position_base=5.0, rotary_layout="interleaved", rotary_dim=8)
    assert rotary_from(config) == Rotary(5.0, "interleaved", 8, None)
