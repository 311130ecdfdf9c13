"""The dense layer, and the initialisers that a config chooses from."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from tfm.config import ModelConfig
from tfm.ops.projection import projection

Initializer = Callable[..., jax.Array]
SAVED = "projection"
"""Name of a projection's result, for `jax.checkpoint_policies.save_only_these_names`."""


def kernel_initializer(config: ModelConfig) -> Initializer:
    """Xavier-uniform (Glorot and Bengio, 2010, equation 16), or a normal of the config's width."""
    if config.kernel_init == "xavier":
        return nn.initializers.xavier_uniform()
    return nn.initializers.normal(config.init_std)


def embedding_initializer(config: ModelConfig) -> Initializer:
    """N(0, 1/d_model), so that sqrt(d_model) times an embedding has unit variance; or N(0, init_std^2)."""
    return nn.initializers.normal(config.d_model**-0.5 if config.embedding_init == "scaled" else config.init_std)


class Projection(nn.Module):
    """y = x W + b over the last axis: parameters `kernel` [in, features] and, if asked for, `bias` [features]."""

    features: int
    use_bias: bool = False
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    dtype: str = "float32"
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.dtype(self.param_dtype))
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.dtype(self.param_dtype))
        y = projection(x, kernel, bias, dtype=jnp.dtype(self.dtype))
        return checkpoint_name(y, SAVED)  # a policy sees names, but no products behind a custom backward pass
