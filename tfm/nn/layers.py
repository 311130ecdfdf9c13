"""Encoder and decoder layers: residuals around attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from tfm.config import AttentionPattern, ModelConfig
from tfm.nn.attention import make_attention
from tfm.nn.cache import KeyValue
from tfm.nn.dropout import Dropout
from tfm.nn.feed_forward import FeedForward
from tfm.nn.norms import Normalize, make_norm
from tfm.nn.projection import kernel_initializer, lora_from
from tfm.parallel.rules import constrain


class Layer(nn.Module):
    """Self-attention, cross-attention where `cross` is set, feed-forward; each with dropout, residual and norm.

    Post-LN: x = norm(x + dropout(f(x))), as in the paper (Vaswani et al., 2017, section 3.1).
    Pre-LN: x = x + dropout(f(norm(x))) (Xiong et al., 2020).
    Parallel: x = x + dropout(attention(norm(x))) + dropout(feed_forward(norm(x))) (Black et al., 2022).
    """

    config: ModelConfig
    pattern: AttentionPattern
    causal: bool = False
    cross: bool = False

    def setup(self) -> None:
        config = self.config
        self.self_attention = make_attention(config, pattern=self.pattern, causal=self.causal)
        self.self_attention_norm = make_norm(config)
        if self.cross:
            self.cross_attention = make_attention(config)
            self.cross_attention_norm = make_norm(config)
        self.feed_forward = FeedForward(
            config.d_ff, config.activation, config.gated, config.feed_forward_bias, config.activation_dropout_rate,
            kernel_initializer(config), config.dtype, config.param_dtype, lora_from(config))
        self.feed_forward_norm = make_norm(config)
        self.dropout = Dropout(config.dropout_rate)

    def project_memory(self, encoded: jax.Array) -> KeyValue:
        """Keys and values of cross-attention, once for all steps of a decoding."""
        return self.cross_attention.project_memory(encoded)

    def touch(self, x: jax.Array) -> jax.Array:
        """Use every parameter once, so that `init` makes them all."""
        return self(x, self.project_memory(x) if self.cross else None, self_arguments={})[0]

    def __call__(self, x: jax.Array, memory: KeyValue | None = None, *, self_arguments: dict[str, Any],
                 cross_arguments: dict[str, Any] | None = None, stored: Any = None,
                 deterministic: bool = True) -> tuple[jax.Array, Any]:
        """x: [B, T, M] -> ([B, T, M], this layer's part of the cache after the call, or None)."""
        x, after = constrain(x, ("B", "T", "M")), stored

        def attend(y: jax.Array) -> jax.Array:
            nonlocal after
            result = self.self_attention(y, stored=stored, deterministic=deterministic, **self_arguments)
            y, after = (result, None) if stored is None else result
            return y

        def attend_memory(y: jax.Array) -> jax.Array:
            return self.cross_attention(y, memory, deterministic=deterministic, **(cross_arguments or {}))

        def transform(y: jax.Array) -> jax.Array:
            return self.feed_forward(y, deterministic=deterministic)

        if self.config.parallel_residual:
            attended = self._dropout(attend(self.self_attention_norm(x)), deterministic)
            x = x + attended + self._dropout(transform(self.feed_forward_norm(x)), deterministic)
            return constrain(x, ("B", "T", "M")), after
        x = self._residual(x, attend, self.self_attention_norm, deterministic)
        if self.cross:
            x = self._residual(x, attend_memory, self.cross_attention_norm, deterministic)
        x = self._residual(x, transform, self.feed_forward_norm, deterministic)
        return constrain(x, ("B", "T", "M")), after

    def _residual(self, x: jax.Array, sublayer: Callable[[jax.Array], jax.Array], norm: Normalize,
                  deterministic: bool) -> jax.Array:
        if self.config.norm_position == "post":
            return norm(x + self._dropout(sublayer(x), deterministic))
        return x + self._dropout(sublayer(norm(x)), deterministic)

    def _dropout(self, x: jax.Array, deterministic: bool) -> jax.Array:
        return self.dropout(x, deterministic=deterministic)
