"""The dense layer, and the initialisers that a config chooses from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from tfm.config import ModelConfig
from tfm.ops.narrow import is_narrowed, narrow_projection
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


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: a projection whose path matches one of `targets` computes x W + alpha / rank * (x A) B.

    Reference: Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def adapts(self, path: Sequence[str]) -> bool:
        """Whether the projection with this module path has an adapter; its last two names decide."""
        return any(re.search(target, "/".join(path[-2:])) for target in self.targets)


def lora_from(config: ModelConfig) -> Lora | None:
    """The adapters that a config asks for."""
    return Lora(config.lora_rank, config.lora_alpha, config.lora_targets) if config.lora_rank else None


def scale_of(module: nn.Module) -> Any:
    """The scales of a module's int8 matrix (`tfm.models.narrow`), None where it has none."""
    return module.get_variable("params", "scale")


class Projection(nn.Module):
    """y = x W + b over the last axis: parameters `kernel` [in, features] and, if asked for, `bias` [features].

    With an adapter also `lora_a` [in, rank], random at first, and `lora_b` [rank, features], zero at first.
    """

    features: int
    use_bias: bool = False
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    dtype: str = "float32"
    param_dtype: str = "float32"
    lora: Lora | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, stored = jnp.dtype(self.dtype), jnp.dtype(self.param_dtype)
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), stored)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), stored) if self.use_bias else None
        if is_narrowed(kernel, stored):
            y = narrow_projection(x, kernel, bias, scale=scale_of(self), dtype=dtype)
        else:
            y = projection(x, kernel, bias, dtype=dtype)
        if self.lora is not None and self.lora.adapts(self.path):
            rank, init = self.lora.rank, nn.initializers.lecun_normal()
            down = self.param("lora_a", init, (x.shape[-1], rank), stored)
            up = self.param("lora_b", nn.initializers.zeros, (rank, self.features), stored)
            y = y + self.lora.alpha / rank * projection(projection(x, down, dtype=dtype), up, dtype=dtype)
        return checkpoint_name(y, SAVED)  # a policy sees names, but no products behind a custom backward pass
