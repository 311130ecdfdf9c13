"""From hidden vectors to logits: the output matrix, tied or not, its bias and soft cap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import ModelConfig
from tfm.nn.embeddings import Embedding
from tfm.nn.projection import embedding_initializer


class OutputLogits(nn.Module):
    """logits = softcap(h E^T + b): `table` [V, M] where the output is not tied, `bias` [V] where the config asks.

    A decoding may bring E^T [M, V] with it, as `decoding/output/matrix` (see `transposed_output`).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, tied: Embedding | None) -> jax.Array:
        """hidden: [..., M] -> [..., V] float32."""
        config = self.config
        dtype = jnp.dtype(config.param_dtype)
        if self.has_variable("decoding", "matrix"):
            matrix: Any = self.get_variable("decoding", "matrix")
            logits = jnp.einsum("...M,MV->...V", hidden.astype(matrix.dtype), matrix,
                                preferred_element_type=jnp.float32)
        elif tied is not None:
            logits = tied.attend(hidden)
        else:
            table = self.param("table", embedding_initializer(config), (config.vocab_size, config.d_model), dtype)
            wide = jnp.dtype(config.dtype)
            logits = jnp.einsum("...M,VM->...V", hidden.astype(wide), table.astype(wide),
                                preferred_element_type=jnp.float32)
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
    bias = params["output"]["bias"] if config.logit_bias else None
    if config.tie_embeddings in ("none", "inputs"):
        return params["output"]["table"], bias
    if config.is_encoder_decoder and config.tie_embeddings == "decoder":
        return params["target_embedding"]["table"], bias
    return params["token_embedding"]["table"], bias


def transposed_output(config: ModelConfig, params: Any) -> dict[str, Any]:
    """The collection `decoding` for `apply`: the output matrix as [M, V], laid out once for all steps.

    A product of few rows with a matrix [V, M] would rearrange the matrix at every step, up to three times the work.
    """
    matrix = output_matrix(config, params)[0].astype(config.dtype)
    return {"output": {"matrix": jax.lax.optimization_barrier(matrix.T)}}


def check_ids(ids: jax.Array, name: str) -> None:
    """Refuse what is no [B, T] array of integers."""
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}, but it must be [batch, length] "
                         "integer ids")
