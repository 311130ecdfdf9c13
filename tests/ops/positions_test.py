"""Position schemes against their published formulas and, where slow, against the hub library's code."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import positions
from tfm.ops.tokens import Tokens

RANDOM = np.random.default_rng(0)


def scaling(kind: str, **changes: float) -> SimpleNamespace:
    fields = dict(factor=4.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0, beta_fast=32.0)
    return SimpleNamespace(kind=kind, **fields, beta_slow=1.0, attention_factor=None, truncate=True, **changes)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoidal_is_the_formula(layout):
    got = np.asarray(positions.sinusoidal(np.arange(50), 8, layout=layout))
    for p in (0, 1, 17, 49):
        for i in range(4):
            angle = p / 10000 ** (2 * i / 8)
            at = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + 4)
            assert got[p, at[0]] == pytest.approx(math.sin(angle), abs=2e-6)
            assert got[p, at[1]] == pytest.approx(math.cos(angle), abs=2e-6)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotary_is_a_complex_rotation(layout):
    x = RANDOM.standard_normal((2, 6, 3, 8)).astype(np.float32)
    at = np.array([[0, 1, 2, 3, 4, 5], [7, 3, 100, 0, 1, 2]])
    pairs = x.reshape(2, 6, 3, 4, 2) if layout == "interleaved" else np.stack([x[..., :4], x[..., 4:]], -1)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(
        1j * at[:, :, None, None] * 10000.0 ** -(np.arange(0, 8, 2) / 8)
    )
    parts = np.stack([turned.real, turned.imag], -1)
    want = parts.reshape(x.shape) if layout == "interleaved" else np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(positions.rotary(jnp.asarray(x), at, layout=layout), want, atol=2e-5)


def test_rotary_products_depend_on_the_distance_alone():
    q, k = (jnp.asarray(RANDOM.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(i, j):
        return float((positions.rotary(q, np.array([i])) * positions.rotary(k, np.array([j]))).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


def test_rotary_of_a_part_leaves_the_rest():
    x = jnp.asarray(RANDOM.standard_normal((1, 3, 2, 8)), jnp.float32)
    got = positions.rotary(x, np.arange(3), rotary_dim=4)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_allclose(got[..., :4], positions.rotary(x[..., :4], np.arange(3)))


def test_linear_scaling_divides_positions():
    x = jnp.asarray(RANDOM.standard_normal((1, 5, 2, 8)), jnp.float32)
    got = positions.rotary(x, 4 * np.arange(5), scaling=scaling("linear"))
    np.testing.assert_allclose(got, positions.rotary(x, np.arange(5)), atol=1e-5)


def test_dynamic_scaling_begins_beyond_the_original_length():
    x = jnp.asarray(RANDOM.standard_normal((1, 5, 2, 8)), jnp.float32)
    short, long = np.arange(5), np.arange(5) + 100
    np.testing.assert_allclose(
        positions.rotary(x, short, scaling=scaling("dynamic")), positions.rotary(x, short), atol=1e-6
    )
    base = 10000.0 * (4.0 * 105 / 64 - 3) ** (8 / 6)
    np.testing.assert_allclose(
        positions.rotary(x, long, scaling=scaling("dynamic")), positions.rotary(x, long, base=base), atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_rotary_scalings_against_hugging_face(kind):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    length = 200
    parameters = dict(rope_type=kind, rope_theta=10000.0, factor=4.0)
    if kind in ("llama3", "yarn"):
        parameters.update(original_max_position_embeddings=64)
    if kind == "llama3":
        parameters.update(low_freq_factor=1.0, high_freq_factor=4.0)
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=64, rope_parameters=parameters)
    x = RANDOM.standard_normal((1, length, 2, 16)).astype(np.float32)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    want, _ = apply_rotary_pos_emb(torch.from_numpy(x).swapaxes(1, 2), torch.zeros(1, 2, length, 16), cos, sin)
    got = positions.rotary(jnp.asarray(x), np.arange(length), scaling=scaling(kind))
    np.testing.assert_allclose(got, want.swapaxes(1, 2).numpy(), atol=2e-4)


def test_alibi_slopes_are_the_published_ones():
    np.testing.assert_allclose(positions.alibi_slopes(8), [2.0**-n for n in range(1, 9)])
    twelve = [2.0**-n for n in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    np.testing.assert_allclose(positions.alibi_slopes(12), twelve, rtol=1e-6)


def test_a_number_of_heads_may_be_numpys():
    np.testing.assert_array_equal(positions.alibi_slopes(np.int64(8)), 2.0 ** -np.arange(1, 9))


def test_alibi_is_a_penalty_on_the_distance():
    values = positions.Alibi(jnp.array([0.5, 0.25])).values(Tokens(np.array([[3, 4]])), Tokens(np.array([[1, 4, 6]])))
    assert values[0].tolist() == [[[-1, -0.5, -1.5], [-1.5, 0, -1]], [[-0.5, -0.25, -0.75], [-0.75, 0, -0.5]]]


def bucket_by_logarithm(relative: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (num_buckets - exact) + 1e-9), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_t5_bucket_is_the_formula(bidirectional, num_buckets, max_distance):
    relative = np.arange(-1500, 1500)
    got = positions.t5_bucket(relative, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
    want = [bucket_by_logarithm(int(r), bidirectional, num_buckets, max_distance) for r in relative]
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bucket_against_hugging_face(bidirectional):
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = np.arange(-600, 600)
    want = T5Attention._relative_position_bucket(torch.from_numpy(relative), bidirectional, 32, 128)
    np.testing.assert_array_equal(positions.t5_bucket(relative, bidirectional=bidirectional), want.numpy())


def test_t5_bias_takes_its_rows_per_head_and_has_the_gradient_of_a_sum():
    table = jnp.asarray(RANDOM.standard_normal((8, 2)), jnp.float32)
    query, key = Tokens(np.array([[3, 40]])), Tokens(np.array([[1, 3, 9]]))

    def values(table):
        return positions.T5Bias(table, True, 20).values(query, key)

    buckets = positions.t5_bucket(key.positions - query.positions.T, bidirectional=True, num_buckets=8, max_distance=20)
    np.testing.assert_allclose(values(table)[0], np.moveaxis(np.asarray(table)[np.asarray(buckets)], -1, 0))
    gradient = jax.grad(lambda table: values(table).sum())(table)
    np.testing.assert_allclose(gradient[:, 0], np.bincount(np.asarray(buckets).ravel(), minlength=8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: positions.sinusoidal(np.arange(2), 3), "dim is 3"),
        (lambda: positions.sinusoidal(np.arange(2), 4, layout="odd"), "layout is 'odd'"),
        (lambda: positions.rotary(jnp.ones((1, 1, 1, 3)), np.arange(1)), "width is 3"),
        (lambda: positions.rotary(jnp.ones((1, 1, 1, 4)), np.arange(1), scaling=scaling("ntk")), "kind is 'ntk'"),
        (lambda: positions.alibi_slopes(0), "num_heads is 0"),
        (lambda: positions.t5_bucket(np.arange(3), bidirectional=True, num_buckets=3), "has 1 buckets"),
        (lambda: positions.t5_bucket(np.arange(3), bidirectional=False, max_distance=16), "max_distance of 16"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_keeps_the_digits_of_double_precision(layout):
    """At position 0, where nothing turns."""
    x = RANDOM.standard_normal((1, 3, 2, 4))
    with jax.enable_x64(True):
        turned = positions.rotary(x, np.zeros(3, int), layout=layout)
    np.testing.assert_array_equal(turned, x)
