"""Bucket lengths against brute force, shapes under the budget, padding that goes by lengths alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfm.data.batch import BatchShape, batch_shapes, choose_lengths, pad_batch


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


def test_shapes_keep_the_budget() -> None:
    for shape in batch_shapes([8, 24, 64], tokens_per_batch=1000, multiple_of=4):
        assert shape.rows * shape.length <= 1000 < (shape.rows + 4) * shape.length and shape.rows % 4 == 0
    with pytest.raises(ValueError, match=r"data\.tokens_per_batch is 100.*at least 256"):
        batch_shapes([8, 64], tokens_per_batch=100, multiple_of=4)


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
