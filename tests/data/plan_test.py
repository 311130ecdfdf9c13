"""Plans of epochs: every example exactly once, in the shape of its bucket, another order each time."""

from __future__ import annotations

import numpy as np
import pytest

from tfm.data.batch import BatchShape
from tfm.data.plan import BucketPlan, EpochOrder

SHAPES = [BatchShape(4, 8), BatchShape(3, 16), BatchShape(2, 24)]


@pytest.mark.parametrize("size", [1, 7, 50])
def test_every_example_once_an_epoch(size: int) -> None:
    lengths = np.random.default_rng(size).integers(1, 25, size)
    plan = BucketPlan(lengths, SHAPES, seed=3)
    orders = []
    for epoch in range(3):
        seen = []
        for i in range(len(plan)):
            number, shape, examples = plan[epoch * len(plan) + i]
            assert number == epoch and 1 <= len(examples) <= shape.rows
            assert (lengths[examples] <= shape.length).all() and (lengths[examples] > shape.length - 8).all()
            seen += examples.tolist()
        assert sorted(seen) == list(range(size))
        orders.append(seen)
    assert size == 1 or orders[0] != orders[1] != orders[2]


def test_batches_are_full_but_for_one_of_each_shape() -> None:
    lengths = np.random.default_rng(0).integers(1, 25, 200)
    plan = BucketPlan(lengths, SHAPES, seed=0)
    short = [shape for _, shape, examples in (plan[i] for i in range(len(plan))) if len(examples) < shape.rows]
    assert len(short) <= 3 and len(set(short)) == len(short)
    assert plan.padded_positions == sum(plan[i][1].rows * plan[i][1].length for i in range(len(plan)))


def test_a_batch_does_not_depend_on_those_before_it() -> None:
    lengths = np.random.default_rng(0).integers(1, 25, 60)
    plan, fresh = (BucketPlan(lengths, SHAPES, seed=5) for _ in range(2))
    walked = [plan[i][2].tolist() for i in range(3 * len(plan))]
    assert fresh[len(walked) - 1][2].tolist() == walked[-1]
    assert [BucketPlan(lengths, SHAPES, seed=6)[i][2].tolist() for i in range(len(plan))] != walked[: len(plan)]


def test_without_shuffling_order_is_the_datas() -> None:
    plan = BucketPlan(np.full(9, 5), SHAPES[:1], shuffle=False)
    assert np.concatenate([plan[i][2] for i in range(len(plan))]).tolist() == list(range(9))


def test_epoch_order() -> None:
    order = EpochOrder(11, seed=2)
    first, second = ([order[i] for i in range(start, start + 11)] for start in (0, 11))
    assert [epoch for epoch, _ in first + second] == [0] * 11 + [1] * 11
    assert sorted(e for _, e in first) == sorted(e for _, e in second) == list(range(11))
    assert [e for _, e in first] != [e for _, e in second]
