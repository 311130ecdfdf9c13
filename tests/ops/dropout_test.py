"""The counter hash as a random generator, and dropout as a function: statistics, gradients, blocks, meshes."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tfm.ops.dropout import dropout, hash_bits, keep_mask

ROWS, COLUMNS = 1000, 1024
LIMIT = 4.5  # standard deviations: the draws are fixed, and 1 in 150,000 lies outside


@jax.jit
def _bits(key: jax.Array, row_start: int = 0) -> jax.Array:
    return hash_bits(key, row_start + jnp.arange(ROWS)[:, None], jnp.arange(COLUMNS))


def _key(seed: int) -> jax.Array:
    return jax.random.key(seed)


def _deviations(share: float, expected: float, count: int) -> float:
    """How many standard deviations of a binomial a share lies from its expectation."""
    return abs(share - expected) / np.sqrt(expected * (1 - expected) / count)


def _p_value(counts: np.ndarray) -> float:
    """Of Pearson's chi-square test that all values are equally likely."""
    return stats.chisquare(counts).pvalue


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, in units of its standard deviation for independent entries."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_rate(rate: float, seed: int) -> None:
    kept = np.asarray(keep_mask(_key(seed), rate, np.arange(ROWS)[:, None], np.arange(COLUMNS)))
    assert _deviations(kept.mean(), 1 - rate, kept.size) < LIMIT
    # No row and no column is favoured: their counts vary as a binomial's do.
    for axis, count in ((0, ROWS), (1, COLUMNS)):
        spread = kept.mean(axis).var() / (rate * (1 - rate) / count)
        freedom = kept.shape[1 - axis] - 1
        assert abs(spread - 1) < LIMIT * np.sqrt(2 / freedom)


@pytest.mark.parametrize("seed", [0, 7])
def test_every_byte_and_every_run_of_bits_is_uniform(seed: int) -> None:
    bits = np.asarray(_bits(_key(seed)))
    for shift in (0, 8, 16, 24):
        assert 1e-4 < _p_value(np.bincount((bits >> shift & 255).ravel(), minlength=256)) < 1 - 1e-4
    for along in (bits, bits.T):
        kept = (along >> 31).reshape(-1, 8)
        assert 1e-4 < _p_value(np.bincount(np.packbits(kept.astype(bool), axis=1).ravel(), minlength=256)) < 1 - 1e-4


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_are_independent(rate: float) -> None:
    kept = np.asarray(_bits(_key(3))) < (1 - rate) * 2**32
    for lag in [*range(1, 9), 64, 128, 256, 512, 768]:
        assert abs(_correlation(kept[:, lag:], kept[:, :-lag])) < LIMIT
        assert abs(_correlation(kept[lag:], kept[:-lag])) < LIMIT
    assert abs(_correlation(kept[1:, 1:], kept[:-1, :-1])) < LIMIT
    assert abs(_correlation(kept[1:, :-1], kept[:-1, 1:])) < LIMIT


def test_keys_rows_and_shards_are_independent() -> None:
    """Seeds next to each other, folded numbers (layer, step, device), halves of a split, and shifted rows."""
    base = _key(0)
    keys = [base, _key(1), _key(2**31), *(jax.random.fold_in(base, n) for n in range(4)), *jax.random.split(_key(1))]
    draws = [np.asarray(_bits(key)) for key in keys] + [np.asarray(_bits(base, ROWS))]
    for bit in (31, 30, 0):
        planes = np.stack([(draw >> bit & 1).ravel() for draw in draws]).astype(np.float32)
        deviations = np.corrcoef(planes) * np.sqrt(planes.shape[1])
        np.fill_diagonal(deviations, 0.0)
        assert np.abs(deviations).max() < LIMIT
    # Nor is one draw another one moved along: the counters of two keys do not follow each other.
    first, second = (draw.ravel() for draw in draws[:2])
    assert np.intersect1d(first, second).size < 1.2 * first.size**2 / 2**32


def test_each_bit_of_a_coordinate_changes_half_of_the_bits() -> None:
    coordinates = np.random.default_rng(0).integers(0, 2**16, (4, 20000), dtype=np.uint32)
    before = np.asarray(hash_bits(_key(0), *coordinates))
    for axis in range(4):
        for bit in range(12):
            moved = coordinates.copy()
            moved[axis] ^= np.uint32(1 << bit)
            changed = before ^ np.asarray(hash_bits(_key(0), *moved))
            shares = np.unpackbits(changed.view(np.uint8)).reshape(-1, 32).mean(0)
            assert np.abs(shares - 0.5).max() < 0.03


def test_a_block_has_the_bits_of_the_whole() -> None:
    axes = [np.arange(n).reshape([-1 if a == i else 1 for a in range(4)]) for i, n in enumerate((2, 3, 16, 24))]
    whole = np.asarray(hash_bits(_key(5), *axes))
    block = hash_bits(_key(5), axes[0][1:], axes[1], axes[2][:, :, 4:9], axes[3][..., 8:])
    np.testing.assert_array_equal(block, whole[1:, :, 4:9, 8:])
    assert np.unique(whole).size == whole.size


def test_dropout_scales_and_its_gradient_has_the_same_mask() -> None:
    x = jnp.linspace(1.0, 2.0, 4 * 5 * 6).reshape(4, 5, 6)
    y, pull = jax.vjp(lambda x: dropout(x, 0.25, _key(0)), x)
    kept = np.asarray(y) != 0
    assert 0.6 < kept.mean() < 0.9
    np.testing.assert_allclose(y, np.where(kept, np.asarray(x) / 0.75, 0.0), rtol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], kept / 0.75, rtol=1e-6)


def test_longer_padding_and_bigger_batches_keep_the_mask() -> None:
    small, large = (dropout(jnp.ones(shape), 0.5, _key(1)) for shape in ((2, 5, 8), (3, 9, 8)))
    np.testing.assert_array_equal(large[:2, :5], small)


def test_threefry_is_jax_random_itself() -> None:
    y = dropout(jnp.ones((50, 40)), 0.3, _key(2), bits="threefry")
    np.testing.assert_array_equal(np.asarray(y) != 0, jax.random.bernoulli(_key(2), 0.7, (50, 40)))


def test_old_keys_types_and_edges() -> None:
    x = jnp.ones((64, 64), jnp.bfloat16)
    typed, old = dropout(x, 0.5, _key(4)), dropout(x, 0.5, jax.random.PRNGKey(4))
    assert typed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(typed, old)
    assert dropout(x, 0.0, None) is x
    assert float(dropout(jnp.float32(1.0), 0.5, _key(0))) in (0.0, 2.0)
    assert bool(keep_mask(_key(0), 0.0, jnp.arange(10**5)).all())


@pytest.mark.parametrize(
    "arguments, message",
    [((1.0, None), "rate must be in"), ((-0.1, None), "rate must be in"), ((0.5, None), "needs a key")],
)
def test_wrong_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dropout(jnp.ones(3), *arguments)


def test_unknown_bits_and_no_coordinates() -> None:
    with pytest.raises(ValueError, match="bits must be"):
        dropout(jnp.ones(3), 0.5, _key(0), bits="philox")
    with pytest.raises(ValueError, match="one coordinate"):
        hash_bits(_key(0))


ON_MESHES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from tfm.ops.dropout import dropout
x = jnp.ones((8, 16, 64))
run = jax.jit(lambda x: dropout(x, 0.3, jax.random.key(9)))
alone = np.asarray(run(x))
assert len(jax.devices()) == 8 and 0 < (alone == 0).mean() < 1
for shape, spec in (((8,), P("a")), ((2, 4), P("a", "b")), ((4, 2), P(None, "a", "b")), ((2, 2, 2), P("a", "b", "c"))):
    mesh = jax.make_mesh(shape, ("a", "b", "c")[: len(shape)])
    out = run(jax.device_put(x, NamedSharding(mesh, spec)))
    assert len(out.sharding.device_set) == 8
    np.testing.assert_array_equal(np.asarray(out), alone)
print("same")
"""


def test_the_mask_is_the_same_on_any_mesh() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", ON_MESHES], env=os.environ | flags, capture_output=True, text=True)
    assert run.stdout.strip() == "same", run.stderr


@pytest.mark.slow
def test_a_hundred_million_draws() -> None:
    """Chi-square of 16-bit words at both ends, the rate, and serial correlation, over 1e8 draws of one key."""
    rows, columns, parts = 4096, 1024, 24
    draw = jax.jit(lambda part: hash_bits(_key(11), part, jnp.arange(rows)[:, None], jnp.arange(columns)))
    high, low, kept, products, total = np.zeros(2**16), np.zeros(2**16), 0, np.zeros(65), 0
    for part in range(parts):
        bits = np.asarray(draw(part)).ravel()
        high += np.bincount(bits >> 16, minlength=2**16)
        low += np.bincount(bits & 0xFFFF, minlength=2**16)
        kept += int((bits < 0.9 * 2**32).sum())
        centred = bits.astype(np.float32) / 2**32 - 0.5
        products[1:] += [centred[lag:] @ centred[:-lag] for lag in range(1, 65)]
        total += bits.size
    assert total > 1e8
    assert 1e-4 < _p_value(high) < 1 - 1e-4
    assert 1e-4 < _p_value(low) < 1 - 1e-4
    assert _deviations(kept / total, 0.9, total) < LIMIT
    assert np.abs(products[1:] * 12 / np.sqrt(total)).max() < LIMIT
