"""What a run's steps cost."""

import time

import numpy as np

from tfm.training.meter import Meter


def test_positions_and_waiting_are_summed():
    meter = Meter()
    for shape in ((4, 7), (4, 7), (2, 9)):
        meter.count({"tokens": np.zeros(shape, np.int32), "mask": np.ones(shape, bool)})
    meter.count({"source": np.zeros((3, 5)), "target": np.zeros((3, 6))})
    assert meter.steps == 4
    assert meter.positions == 2 * 28 + 18 + 33
    with meter.waiting():
        time.sleep(0.02)
    assert 0.02 <= meter.waited < 0.5
