"""What the ops make of lists and NumPy arrays, of integers, and of arrays that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.ops import (
    additive_attention,
    attention,
    dropout,
    fused_cross_entropy,
    fused_cross_entropy_sum,
    keep_mask,
    label_smoothed_cross_entropy,
    linear_attention,
    projection,
)
from tfm.ops.norms import layer_norm, rms_norm
from tfm.positions import rotary

random = np.random.default_rng(0)
X, KERNEL, TABLE = random.normal(size=(2, 3, 4)), random.normal(size=(4, 5)), random.normal(size=(7, 4))
TARGETS, HEADS = random.integers(0, 7, (2, 3)), random.normal(size=(2, 3, 2, 4))
INTEGERS, KEY = np.arange(24).reshape(2, 3, 4), jax.random.key(0)


def cross_entropy(logits, targets):
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def rotated(x):
    """Pairs (i, i + 2) of four dimensions as complex numbers, turned by p and p / 100."""
    angles = np.arange(3)[:, None, None] * np.array([1.0, 0.01])
    turned = (x[..., :2] + 1j * x[..., 2:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def linear(x):
    features = np.where(x > 0, x + 1, np.exp(x))
    weights = np.einsum("bthd,bshd->bhts", features, features)
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), x)


CASES = {
    "layer_norm": (layer_norm, (X, KERNEL[:, 0]), (X - X.mean(-1, keepdims=True)) / X.std(-1, keepdims=True) *
                   KERNEL[:, 0]),
    "rms_norm": (rms_norm, (X, KERNEL[:, 0]), X / np.sqrt((X**2).mean(-1, keepdims=True)) * KERNEL[:, 0]),
    "projection": (projection, (X, KERNEL, KERNEL[0]), X @ KERNEL + KERNEL[0]),
    "rotary": (rotary, (HEADS, np.arange(3)), rotated(HEADS)),
    "cross-entropy": (label_smoothed_cross_entropy, (X @ TABLE.T, TARGETS), cross_entropy(X @ TABLE.T, TARGETS)),
    "fused": (fused_cross_entropy, (X, TABLE, TARGETS), cross_entropy(X @ TABLE.T, TARGETS)),
    "fused sum": (fused_cross_entropy_sum, (X, TABLE, TARGETS), cross_entropy(X @ TABLE.T, TARGETS).sum()),
    "linear_attention": (linear_attention, (HEADS, HEADS, HEADS), linear(HEADS)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", [np.asarray, np.ndarray.tolist])
@pytest.mark.parametrize("name", CASES)
def test_lists_and_arrays_of_numpy(name, form):
    function, arguments, expected = CASES[name]
    np.testing.assert_allclose(function(*map(form, arguments)), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("call", [
    lambda: layer_norm(INTEGERS, np.ones(4)),
    lambda: rms_norm(INTEGERS, np.ones(4)),
    lambda: projection(INTEGERS, KERNEL),
    lambda: projection(X, INTEGERS[0].T),
    lambda: rotary(INTEGERS[..., None, :], np.arange(3)),
    lambda: dropout(INTEGERS, 0.1, KEY),
    lambda: fused_cross_entropy(INTEGERS, TABLE, TARGETS),
    lambda: fused_cross_entropy_sum(X, INTEGERS[0], TARGETS),
    lambda: additive_attention(INTEGERS, X, X, KERNEL, KERNEL, KERNEL[0]),
])
def test_integers_are_refused_where_fractions_would_be_cut_off(call):
    with pytest.raises(ValueError, match=r"has dtype int.*; it must be float"):
        call()


@pytest.mark.parametrize(("call", "words"), [
    (lambda: layer_norm(X, np.ones(1)), r"scale has shape \(1,\); it must be \(4,\)"),
    (lambda: layer_norm(X, np.ones(4), np.ones((3, 4))), r"bias has shape \(3, 4\); it must be \(4,\)"),
    (lambda: rms_norm(X, np.ones((3, 4))), r"scale has shape \(3, 4\)"),
    (lambda: rotary(HEADS, np.arange(4)), r"positions have shape \(4,\); they must be \(3,\) or \(2, 3\)"),
    (lambda: rotary(HEADS[:1], np.zeros((2, 3), int)), r"positions have shape \(2, 3\)"),
    (lambda: fused_cross_entropy(X, TABLE, X[..., 0]), "targets has dtype float32; it must be int"),
    (lambda: dropout(X, 0.1, 0), "the random key is 0; it must be one key"),
    (lambda: keep_mask(jax.random.split(KEY, 3), 0.1, np.arange(3)), r"the random key is of shape \(3,\)"),
    (lambda: attention(HEADS, HEADS, HEADS, dropout_rate=0.1, dropout_key=7), "the random key is 7"),
    (lambda: attention(HEADS, HEADS, HEADS, dropout_rate=0.1, dropout_key=7, implementation="blockwise"),
     "the random key is of shape"),
    (lambda: additive_attention(X, X, X, KERNEL, KERNEL, KERNEL[0], mask=np.ones((1, 2, 3, 3), bool)),
     r"mask has shape \(1, 2, 3, 3\); it must be broadcastable to \(2, 1, 3, 3\)"),
])
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_one_position_serves_all_tokens():
    np.testing.assert_allclose(rotary(jnp.asarray(HEADS), 0), HEADS, rtol=1e-6)
