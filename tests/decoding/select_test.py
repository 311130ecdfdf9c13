import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.decoding import select


def rows(kind, size):
    rng = np.random.default_rng(size)
    if kind == "normal":
        return rng.normal(size=(5, size)).astype(np.float32)
    if kind == "ties":
        return rng.integers(0, 4, size=(5, size)).astype(np.float32)
    x = np.full((5, size), -np.inf, np.float32)
    x[:, rng.permutation(size)[:7]] = 1.0
    return x


@pytest.mark.parametrize("kind", ["normal", "ties", "mostly forbidden"])
@pytest.mark.parametrize("size", [11, 512, 1000, 1025])
def test_top_k_is_a_stable_sort(kind, size):
    x = rows(kind, size)
    for k in (1, 5):
        values, ids = jax.jit(select.top_k, static_argnums=1)(x, k)
        expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))
    np.testing.assert_array_equal(select.first_maximum(jnp.array(x)), np.argmax(x, -1))


@pytest.mark.parametrize("size", [3, 300])
def test_draws_have_the_right_distribution(size):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=size).astype(np.float32) * 2
    logits[rng.permutation(size)[: size // 3]] = -np.inf
    n = 40_000
    uniform = jax.random.uniform(jax.random.key(0), (n,))
    drawn = np.asarray(jax.jit(lambda u: select.draw(jnp.broadcast_to(logits, (n, size)), u))(uniform))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    counts = np.bincount(drawn, minlength=size)
    assert counts[p == 0].sum() == 0
    common = p * n >= 5
    chi2 = ((counts - n * p)[common] ** 2 / (n * p)[common]).sum()
    free = common.sum() - 1
    assert chi2 < free + 4 * np.sqrt(2 * free)
    assert abs(counts[~common].sum() - n * p[~common].sum()) < 5 * np.sqrt(n * p[~common].sum() + 1)


def test_the_ends_of_the_interval_draw_possible_tokens():
    x = jnp.array([[-jnp.inf, 0.0, -jnp.inf, 1.0, -jnp.inf]])
    assert select.draw(x, jnp.zeros(1)).tolist() == [1]
    assert select.draw(x, jnp.array([np.nextafter(np.float32(1), np.float32(0))])).tolist() == [3]


@pytest.mark.parametrize("kind", ["normal", "ties", "mostly forbidden"])
@pytest.mark.parametrize("offset", [0.0, -1e4, 1e4])
def test_log_sum_exp_is_float64s(kind, offset):
    x = rows(kind, 1000) + np.float32(offset)
    wide = x.astype(np.float64)
    expected = wide.max(-1) + np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
    np.testing.assert_allclose(jax.jit(select.log_sum_exp)(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shift", [-1e4, -200.0, -80.0, 0.0, 20.0])
def test_log_sum_exp_near_an_entry_is_float64s_however_far_it_is_from_the_largest(shift):
    x = rows("mostly forbidden", 1000) + rows("normal", 1000)
    x[:, 500] = shift
    wide = x.astype(np.float64)
    expected = wide.max(-1) + np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
    found = jax.jit(lambda x: select.log_sum_exp(x, near=x[:, 500]))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)  # float32 holds 80 to 4e-6


def test_log_sum_exp_of_nothing_is_minus_infinity():
    assert np.isneginf(select.log_sum_exp(jnp.full((2, 9), -jnp.inf), near=jnp.full(2, -jnp.inf))).all()
    assert np.isneginf(select.log_sum_exp(jnp.full((2, 9), -jnp.inf))).all()
