"""Norm modules around `ops.norms`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import ModelConfig, Norm
from tfm.ops.norms import layer_norm, rms_norm


class Normalize(nn.Module):
    """LayerNorm or RMSNorm over the last axis: parameters `scale` [M] and, for LayerNorm with a bias, `bias` [M]."""

    kind: Norm = "layer"
    epsilon: float = 1e-6
    use_bias: bool = True
    param_dtype: str = "float32"
    unit_offset: bool = False
    """Multiply by 1 + scale, and begin with a scale of 0."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.kind not in ("layer", "rms"):
            raise ValueError(f"kind is {self.kind!r}, but it must be 'layer' or 'rms'")
        dtype = jnp.dtype(self.param_dtype)
        init = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],), dtype)
        if self.unit_offset:
            scale = 1.0 + scale.astype(jnp.float32)
        if self.kind == "rms":
            return rms_norm(x, scale, epsilon=self.epsilon)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), dtype) if self.use_bias else None
        return layer_norm(x, scale, bias, epsilon=self.epsilon)


def make_norm(config: ModelConfig, name: str | None = None) -> Normalize:
    """The norm that a config asks for."""
    return Normalize(config.norm, config.norm_epsilon, config.norm_bias, config.param_dtype,
                     config.norm_unit_offset, name=name)
