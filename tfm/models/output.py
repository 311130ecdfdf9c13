"""From hidden vectors to logits: the output matrix, tied or not, its bias and soft cap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import ModelConfig
from tfm.nn.embeddings import Embedding
from tfm.nn.projection import embedding_initializer, scale_of
from tfm.ops.narrow import is_narrowed, narrow_projection
from tfm.ops.products import times_matrix


class OutputLogits(nn.Module):
    """logits = softcap(h E^T + b): `table` [V, M] where the output is not tied, `bias` [V] where the config asks.

    A decoding brings E^T [M, V] with it, as `decoding/output/matrix` (see `tfm.models.stepper.prepare`).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, tied: Embedding | None) -> jax.Array:
        """hidden: [..., M] -> [..., V] float32."""
        config = self.config
        dtype = jnp.dtype(config.param_dtype)
        if self.has_variable("decoding", "matrix"):
            matrix: Any = self.get_variable("decoding", "matrix")
            logits = _product(hidden, matrix, self.get_variable("decoding", "scale"))
        elif tied is not None:
            logits = tied.attend(hidden)
        else:
            table = self.param("table", embedding_initializer(config), (config.vocab_size, config.d_model), dtype)
            matrix = table if is_narrowed(table, dtype) else table.astype(config.dtype)
            logits = _product(hidden, matrix.T, scale_of(self))
        if config.logit_bias:
            logits = logits + self.param("bias", nn.initializers.zeros, (config.vocab_size,), dtype)
        if config.logit_softcap is not None:
            logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        return logits


def output_matrix(config: ModelConfig, params: Any) -> tuple[jax.Array, jax.Array | None]:
    """The matrix [V, M] and bias [V] (or None) that turn `hidden` into logits, out of a params tree.

    `fused_cross_entropy(hidden, matrix, targets, bias=bias)` is then the loss without logits in memory.

    Example:
        >>> from tfm.config import ModelConfig
        >>> config = ModelConfig(vocab_size=5, d_model=8)
        >>> matrix, bias = output_matrix(config, {"token_embedding": {"table": jnp.ones((5, 8))}})
        >>> matrix.shape, bias
        ((5, 8), None)
    """
    table, scale = stored_output(config, params)
    if scale is not None:
        table = table * scale[:, None]
    return table, params["output"]["bias"] if config.logit_bias else None


def stored_output(config: ModelConfig, params: Any) -> tuple[jax.Array, jax.Array | None]:
    """The output matrix [V, M] as it is stored, and the scales [V] of an int8 one."""
    name = "output"
    if config.tie_embeddings in ("all", "decoder"):
        own = config.is_encoder_decoder and config.tie_embeddings == "decoder"
        name = "target_embedding" if own else "token_embedding"
    return params[name]["table"], params[name].get("scale")


def _product(hidden: jax.Array, matrix: jax.Array, scale: jax.Array | None) -> jax.Array:
    """hidden [..., M] times the matrix [M, V]; float32."""
    if matrix.dtype in (jnp.bfloat16, jnp.int8):
        return narrow_projection(hidden, matrix, scale=scale)
    return times_matrix(hidden.astype(matrix.dtype), matrix).astype(jnp.float32)


def check_ids(ids: jax.Array, name: str) -> None:
    """Refuse what is no [B, T] array of integers."""
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}, but it must be [batch, length] "
                         "integer ids")
