"""Embedding tables: rows, ids outside the table, logits, learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.nn import Embedding, LearnedPositions

TABLE = jnp.arange(12.0).reshape(4, 3)
EMBEDDING = Embedding(4, 3)


def embed(ids):
    return EMBEDDING.apply({"params": {"table": TABLE}}, jnp.asarray(ids))


def test_an_id_takes_its_row():
    np.testing.assert_array_equal(embed([[3, 0]]), [[[9, 10, 11], [0, 1, 2]]])


@pytest.mark.parametrize("bad", [4, 100, -5])
def test_an_id_outside_the_table_gives_nan_and_not_a_neighbour(bad):
    vectors = np.asarray(embed([[1, bad]]))
    assert np.isnan(vectors[0, 1]).all() and not np.isnan(vectors[0, 0]).any()


def test_a_table_narrowed_to_bfloat16_is_read_without_a_wide_copy():
    table = np.random.default_rng(0).normal(size=(1000, 64)).astype(jnp.bfloat16)

    def narrow(table, ids):
        return Embedding(1000, 64).apply({"params": {"table": table}}, ids)

    vectors = np.asarray(narrow(jnp.asarray(table), jnp.array([3, 1000, -1, 999])))
    np.testing.assert_array_equal(vectors[[0, 2, 3]], np.asarray(table, np.float32)[[3, 999, 999]])
    assert np.isnan(vectors[1]).all() and vectors.dtype == np.float32
    program = jax.jit(narrow).lower(jnp.asarray(table), jnp.array([3])).compile()
    assert program.memory_analysis().temp_size_in_bytes < table.size * 2
    assert "bf16[1000,64]" in program.as_text() and "f32[1000,64]" not in program.as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_add_up_over_repeated_ids(dtype):
    def total(table):
        inside = jnp.arange(4)[:, None] < 3  # the last id is outside the table
        return EMBEDDING.apply({"params": {"table": table}}, jnp.array([2, 2, 1, 4])).sum(where=inside)

    gradient = jax.jit(jax.grad(total))(TABLE.astype(dtype))
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient.astype(np.float32), np.array([0, 1, 2, 0])[:, None] * np.ones((4, 3)))


def test_attend_is_the_product_with_each_row_in_float32():
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    logits = EMBEDDING.apply({"params": {"table": TABLE}}, jnp.asarray(x), method="attend")
    np.testing.assert_allclose(logits, x.astype(np.float64) @ np.asarray(TABLE, np.float64).T, rtol=1e-5, atol=1e-5)
    narrow = Embedding(4, 3, dtype="bfloat16").apply({"params": {"table": TABLE}}, jnp.asarray(x), method="attend")
    assert narrow.dtype == jnp.float32


def learned(positions, offset=0, rows=5):
    table = jnp.arange(float(rows + offset))[:, None] * jnp.ones(2)
    return LearnedPositions(rows, 2, offset).apply({"params": {"table": table}}, positions)


@pytest.mark.parametrize("offset", [0, 2])
def test_a_learned_position_takes_its_row_after_the_offset(offset):
    np.testing.assert_array_equal(learned(np.array([0, 4]), offset)[:, 0], [offset, 4 + offset])
    parameters = LearnedPositions(5, 2, offset).init(jax.random.key(0), np.arange(3))["params"]
    assert parameters["table"].shape == (5 + offset, 2)


def test_positions_past_the_table_are_refused_by_name():
    with pytest.raises(ValueError, match=r"6 positions.*model.max_positions=5"):
        learned(np.arange(6))
    with pytest.raises(ValueError, match=r"model.max_positions=5"):
        jax.jit(lambda x: learned(np.arange(6)) + x)(1.0)
    traced = jax.jit(learned)(jnp.array([4, 5]))
    assert np.isfinite(np.asarray(traced[0])).all() and np.isnan(np.asarray(traced[1])).all()
