"""A model small enough for tests of the training loop: one matrix that predicts classes from features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

FEATURES, CLASSES = 4, 3
WHOLE = ((".*", ()),)
"""Sharding rules: nothing is split."""


def init(key):
    return {"layer": {"kernel": jax.random.normal(key, (FEATURES, CLASSES)), "bias": jnp.zeros((CLASSES,))}}


def loss(params, batch, key):
    """Summed cross-entropy with dropout on the features where a key is given."""
    x = batch["features"]
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)
    logits = x @ params["layer"]["kernel"] + params["layer"]["bias"]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1)[..., 0]
    return {"loss": jnp.sum(losses * batch["weights"]), "weight": jnp.sum(batch["weights"])}


def batch(seed, rows=8, length=5):
    """[rows, length] tokens, of which each row has a random number."""
    random = np.random.default_rng(seed)
    weights = np.arange(length)[None] < random.integers(1, length + 1, (rows, 1))
    return {"features": random.normal(size=(rows, length, FEATURES)).astype(np.float32),
            "labels": random.integers(0, CLASSES, (rows, length)).astype(np.int32),
            "weights": weights.astype(np.float32)}


class Batches:
    """An endless iterator of batches whose position can be saved; the shape changes between two lengths."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return batch(self.position, length=5 + self.position % 2)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]
