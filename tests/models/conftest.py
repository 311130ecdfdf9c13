"""What the tests of the models share: small configs, parameters away from their neutral values, ids."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import ModelConfig
from tfm.models import init_params

VOCAB = 13


def make_config(**changes):
    fields = {"vocab_size": VOCAB, "d_model": 16, "d_ff": 24, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
              "t5_buckets": 8, "t5_max_distance": 16, "shaw_distance": 2, "max_positions": 8}
    return ModelConfig(**{**fields, **changes})


def make_params(config, seed=0):
    """Random numbers in the place of every parameter; the scales of norms around 1."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        middle = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(random.normal(middle, 0.3, leaf.shape), leaf.dtype)

    return jax.tree.map_with_path(draw, shapes)


def make_ids(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).integers(1, VOCAB, shape), jnp.int32)


@pytest.fixture(scope="session")
def small():
    """config(**changes), params(config, seed), ids(seed, shape)."""
    return types.SimpleNamespace(config=make_config, params=make_params, ids=make_ids)
