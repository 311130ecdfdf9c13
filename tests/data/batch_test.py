"""Bucket lengths against brute force, shapes under the budget, padding that goes by lengths alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfm.data.batch import BatchShape, batch_shapes, choose_lengths, choose_sides, pad_batch


def padded_positions(lengths: np.ndarray, buckets: list[int]) -> int:
    return sum(min(b for b in buckets if b >= length) for length in lengths.tolist())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_bucket_lengths_pad_least(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, rng.integers(20, 60), size=40)
    chosen = choose_lengths(lengths, count, 100)
    edges = range(8, int(-(-lengths.max() // 8) * 8) + 1, 8)
    best = min(
        padded_positions(lengths, [*cut, edges[-1]]) for n in range(count) for cut in itertools.combinations(edges, n)
    )
    assert padded_positions(lengths, chosen) == best
    assert len(chosen) <= count and chosen == sorted(set(chosen)) and chosen[-1] == edges[-1]


def test_no_bucket_is_longer_than_the_limit() -> None:
    assert choose_lengths(np.array([3, 29, 30]), 3, 30) == [8, 30]
    assert choose_lengths(np.array([3, 5]), 3, 5) == [5]
    assert choose_lengths(np.array([], np.int64), 2, 64) == [8]


def test_buckets_of_pairs_hold_every_pair_and_pad_less_than_square_ones() -> None:
    rng = np.random.default_rng(0)
    source = np.clip(rng.lognormal(3, 0.7, 3000).astype(int), 1, 100)
    sides = np.stack([source, np.clip((source * rng.normal(1.2, 0.2, 3000)).astype(int), 1, 120)], axis=1)
    chosen = choose_sides(sides, 6)
    assert len(chosen) <= 6 and chosen[-1] == tuple(sides.max(axis=0))
    assert all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(chosen))
    bucket = [next(s + t for s, t in chosen if s >= a and t >= b) for a, b in sides]
    square = choose_lengths(sides.max(axis=1), 6, 120)
    squares = [2 * next(n for n in square if n >= max(pair)) for pair in sides]
    assert sum(bucket) < 0.96 * sum(squares)


def test_very_long_pairs_have_coarse_buckets() -> None:
    sides = np.array([[100, 7], [50_000, 20_001], [100_003, 40_000]])
    chosen = choose_sides(sides, 3)
    assert chosen[-1] == (100_003, 40_000) and all(any(s >= a and t >= b for s, t in chosen) for a, b in sides)


def test_a_pair_of_buckets_is_the_best_there_is() -> None:
    sides = np.array([[3, 4], [3, 5], [4, 4], [9, 2], [10, 12], [11, 12], [2, 12]])
    best = min(
        sum(s + t if s >= a and t >= b else 11 + 12 for a, b in sides)
        for s, t in itertools.product(range(12), range(13))
    )
    chosen = choose_sides(sides, 2)
    assert sum(next(s + t for s, t in chosen if s >= a and t >= b) for a, b in sides) == best


def test_shapes_keep_the_budget() -> None:
    for shape in batch_shapes([[8], [24], [64]], tokens_per_batch=1000, multiple_of=4):
        assert shape.rows * shape.length <= 1000 < (shape.rows + 4) * shape.length and shape.rows % 4 == 0
    with pytest.raises(ValueError, match=r"data\.tokens_per_batch is 100.*at least 256"):
        batch_shapes([[8], [64]], tokens_per_batch=100, multiple_of=4)


def test_padding_goes_by_lengths_not_ids() -> None:
    examples = [
        {
            "source": np.array([7, 7, 7], np.int32),
            "target": np.array([7], np.int32),
            "labels": np.array([7], np.int32),
            "weights": np.ones(1, np.float32),
            "prefix_length": np.array(2, np.int32),
        }
    ]
    wide = pad_batch(examples, BatchShape(2, 3, 5), pad_id=7)
    assert {name: array.shape for name, array in wide.items() if array.ndim == 2} == {
        "source": (2, 3), "source_mask": (2, 3), "target": (2, 5), "target_mask": (2, 5), "labels": (2, 5),
        "weights": (2, 5)}
    batch = pad_batch(examples, BatchShape(2, 4), pad_id=7)
    assert batch["source"].tolist() == [[7] * 4] * 2
    assert batch["source_mask"].tolist() == [[True, True, True, False], [False] * 4]
    assert batch["target_mask"].tolist() == [[True, False, False, False], [False] * 4]
    assert batch["weights"].tolist() == [[1, 0, 0, 0], [0] * 4] and batch["prefix_length"].tolist() == [2, 0]
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "source": "int32",
        "target": "int32",
        "labels": "int32",
        "weights": "float32",
        "prefix_length": "int32",
        "source_mask": "bool",
        "target_mask": "bool",
    }
