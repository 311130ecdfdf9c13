"""Batches side by side: into how many a batch is cut, the order of results, and where work stops."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tfm import batching
from tfm.batching import batches_at_once, side_by_side

SMALL = {"kernel": jnp.zeros((4, 4))}


@pytest.mark.parametrize(("cores", "batch_size", "cached", "count"), [
    (2, 16, 64, 2),
    (64, 500, 64, 2),
    (1, 16, 64, 1),
    (None, 16, 64, 1),
    (2, 15, 64, 1),
    (2, 16, 63, 1),
])
def test_only_large_batches_of_small_models_are_cut(monkeypatch, cores, batch_size, cached, count):
    monkeypatch.setattr(batching.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(batching, "CACHED", cached)
    assert batches_at_once(SMALL, batch_size) == count


def test_without_arrays_of_a_device_nothing_is_cut():
    assert batches_at_once({"kernel": np.zeros(4)}, 32) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_order_and_so_many_items_are_worked_on_at_once(count):
    together = threading.Barrier(count)

    def square(x, stopped):
        together.wait(timeout=60)  # breaks unless `count` calls meet
        return x * x

    assert list(side_by_side(square, range(6), count)) == [0, 1, 4, 9, 16, 25]


def test_a_failure_is_raised_and_what_has_not_begun_is_left_out():
    begun, go_on = [], threading.Event()

    def fail(x, stopped):
        begun.append(x)
        if x == 0:
            raise ValueError("row 0")
        go_on.wait(timeout=60)

    results = side_by_side(fail, range(100), 2)
    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(ValueError, match="row 0"):
        next(results)
    assert len(begun) < 100


def test_when_the_caller_stops_what_has_begun_is_told():
    told = []

    def work(x, stopped):
        end = time.monotonic() + 20
        while x > 0 and not stopped() and time.monotonic() < end:
            time.sleep(0.001)
        told.append(stopped())

    results = side_by_side(work, [0, 1, 2, 3], 2)
    next(results)
    results.close()  # as an interrupt does
    assert told[0] is False and 1 <= sum(told) <= 2
