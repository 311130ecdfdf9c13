"""Additive attention against a loop in torch's float64."""

import numpy as np
import torch

from tfm.masks import Padding
from tfm.ops import additive_attention


def test_is_the_formula():
    random = np.random.default_rng(0)
    shapes = (2, 3, 4), (2, 5, 6), (2, 5, 7), (4, 8), (6, 8), (8,)
    inputs = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    valid = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    got = np.asarray(additive_attention(*inputs, mask=Padding(valid)))
    query, key, value, w, u, v = (torch.from_numpy(x.astype(np.float64)) for x in inputs)
    for i in range(3):
        scores = torch.stack([v @ torch.tanh(query[0, i] @ w + key[0, j] @ u) for j in range(3)])
        np.testing.assert_allclose(got[0, i], (torch.softmax(scores, 0) @ value[0, :3]).numpy(), atol=2e-6)
    assert not got[1].any()
