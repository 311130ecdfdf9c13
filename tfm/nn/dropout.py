"""Dropout as a module without parameters: it only fetches the random key."""

from __future__ import annotations

import jax
from flax import linen as nn

from tfm.ops.dropout import dropout


class Dropout(nn.Module):
    """Zero entries with probability `rate` and divide the others by 1 - rate (Srivastava et al., 2014, section 4).

    Needs `rngs={"dropout": key}` in `apply` where `deterministic` is False and the rate is above 0.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        if deterministic or self.rate == 0.0:
            return x
        return dropout(x, self.rate, self.make_rng("dropout"))
