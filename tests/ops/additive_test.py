"""Additive attention against a loop in torch's float64."""

import jax
import numpy as np
import pytest
import torch

from tfm.masks import Padding
from tfm.ops import additive_attention

SHAPES = (2, 3, 4), (2, 5, 6), (2, 5, 7), (4, 8), (6, 8), (8,)


def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape) for shape in SHAPES]


def test_is_the_formula():
    inputs = [x.astype(np.float32) for x in arrays()]
    valid = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    got = np.asarray(additive_attention(*inputs, mask=Padding(valid)))
    query, key, value, w, u, v = (torch.from_numpy(x.astype(np.float64)) for x in inputs)
    for i in range(3):
        scores = torch.stack([v @ torch.tanh(query[0, i] @ w + key[0, j] @ u) for j in range(3)])
        np.testing.assert_allclose(got[0, i], (torch.softmax(scores, 0) @ value[0, :3]).numpy(), atol=2e-6)
    assert not got[1].any()


def test_double_precision():
    query, key, value, w, u, v = arrays()
    scores = np.exp(np.tanh((query @ w)[:, :, None] + (key @ u)[:, None]) @ v)
    want = (scores / scores.sum(-1, keepdims=True)) @ value
    with jax.enable_x64(True):
        np.testing.assert_allclose(additive_attention(query, key, value, w, u, v), want, atol=1e-14)


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "query has shape"), (2, "lengths of key and value"), (3, "query_kernel"), (5, "vector")],
)
def test_mistakes_are_named(number, words):
    inputs = arrays()
    inputs[number] = inputs[number][:1]
    inputs[number] = inputs[number][0] if number == 0 else inputs[number]
    with pytest.raises(ValueError, match=words):
        additive_attention(*inputs)
