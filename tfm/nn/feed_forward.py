"""The position-wise feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import linen as nn

from tfm.config import Activation
from tfm.nn.dropout import Dropout
from tfm.nn.projection import Initializer, Lora, Projection

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    """f(x W_up + b) W_down + b, or gated: (f(x W_gate) * (x W_up)) W_down.

    Reference: Vaswani et al. (2017), equation 2; gated forms: Shazeer (2020), "GLU Variants Improve Transformer",
    equation 6.
    """

    d_ff: int
    activation: Activation = "relu"
    gated: bool = False
    use_bias: bool = True
    dropout_rate: float = 0.0
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    dtype: str = "float32"
    param_dtype: str = "float32"
    lora: Lora | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """x: [B, T, M] -> [B, T, M]."""
        dense = partial(Projection, use_bias=self.use_bias, kernel_init=self.kernel_init, dtype=self.dtype,
                        param_dtype=self.param_dtype, lora=self.lora)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}, but it must be one of {', '.join(ACTIVATIONS)}")
        activation = ACTIVATIONS[self.activation]
        up = dense(self.d_ff, name="up")(x)
        inner = activation(dense(self.d_ff, name="gate")(x)) * up if self.gated else activation(up)
        inner = Dropout(self.dropout_rate)(inner, deterministic=deterministic)
        return dense(x.shape[-1], name="down")(inner)
