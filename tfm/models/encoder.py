"""The encoder alone (BERT and its kin)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import ModelConfig
from tfm.models.output import OutputLogits, check_ids
from tfm.models.stack import Stack
from tfm.nn.dropout import Dropout
from tfm.nn.embeddings import Embedding
from tfm.nn.feed_forward import ACTIVATIONS
from tfm.nn.norms import make_norm
from tfm.nn.projection import Projection, embedding_initializer, kernel_initializer


class Encoder(nn.Module):
    """A bidirectional stack over token embeddings.

    Submodules `token_embedding`, `encoder`, `output` (token logits), and as the config asks `token_head` with
    `token_head_norm` (BERT's transform before the output matrix), `pooler`, and `classifier`.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.token_embedding = Embedding(config.vocab_size, config.d_model, embedding_initializer(config),
                                         config.dtype, config.param_dtype)
        self.encoder = Stack(config, config.encoder_layers)
        self.output = OutputLogits(config)
        if config.token_head:
            self.token_head = self._dense()
            self.token_head_norm = make_norm(config)
        if config.pooler:
            self.pooler = self._dense()
        if config.num_classes:
            self.classifier = Projection(config.num_classes, True, kernel_initializer(config), "float32",
                                         config.param_dtype)
            self.dropout = Dropout(config.dropout_rate)

    def __call__(self, tokens: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
                 segments: jax.Array | None = None, token_types: jax.Array | None = None,
                 deterministic: bool = True) -> jax.Array:
        """The last hidden vectors.

        Args:
            tokens: [B, T] int ids.
            mask: [B, T] bool, True for real tokens; None: all are.
            positions: [T] or [B, T] int; None counts the real tokens (and restarts in each segment).
            segments: [B, T] int of packed rows; tokens see only those of their own segment.
            token_types: [B, T] int; None: all 0.
            deterministic: no dropout; otherwise `apply` needs `rngs={"dropout": key}`.

        Returns:
            [B, T, M].

        Example:
            >>> from tfm.config import ModelConfig
            >>> model = Encoder(ModelConfig(vocab_size=11, d_model=8, d_ff=16, num_heads=2, decoder_layers=0))
            >>> ids = jnp.ones((2, 3), jnp.int32)
            >>> params = model.init(jax.random.key(0), ids, method="token_logits")["params"]
            >>> model.apply({"params": params}, ids).shape
            (2, 3, 8)

        Reference: Devlin et al. (2019), section 3.
        """
        check_ids(tokens, "tokens")
        x = self.token_embedding(tokens)
        if self.config.scale_embeddings:
            x = x * self.config.d_model**0.5
        x, _ = self.encoder(x, mask=mask, positions=positions, segments=segments, token_types=token_types,
                            deterministic=deterministic)
        return x

    def hidden(self, tokens: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
               segments: jax.Array | None = None, token_types: jax.Array | None = None,
               deterministic: bool = True) -> jax.Array:
        """What the output matrix is multiplied with, [B, T, M]; arguments as in `__call__`."""
        x = self(tokens, mask=mask, positions=positions, segments=segments, token_types=token_types,
                 deterministic=deterministic)
        if self.config.token_head:
            x = self.token_head_norm(ACTIVATIONS[self.config.activation](self.token_head(x)))
        return x * self.config.logit_scale

    def token_logits(self, tokens: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
                     segments: jax.Array | None = None, token_types: jax.Array | None = None,
                     deterministic: bool = True) -> jax.Array:
        """Logits of the token at each place (masked language model), [B, T, V]; arguments as in `__call__`."""
        x = self.hidden(tokens, mask=mask, positions=positions, segments=segments, token_types=token_types,
                        deterministic=deterministic)
        if self.config.pooler and self.is_initializing():
            self.pool(x)
        return self.output(x, None if self.config.tie_embeddings in ("none", "inputs") else self.token_embedding)

    def pool(self, hidden: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """BERT's summary of a sequence: tanh(W h_0 + b), h_0 of the first real token.

        Args:
            hidden: [B, T, M].
            mask: [B, T] bool, True for real tokens; None: all are.

        Returns:
            [B, M].
        """
        return jnp.tanh(self.pooler(first_of_real(hidden, mask)))

    def class_logits(self, tokens: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
                     segments: jax.Array | None = None, token_types: jax.Array | None = None,
                     deterministic: bool = True) -> jax.Array:
        """Logits of the classes of a sequence, [B, num_classes] float32; arguments as in `__call__`.

        logits = dropout(v) W + b, where v is the hidden vector of the first real token (through the pooler where there
        is one) or the mean over real tokens, as `config.class_pooling` says.

        Reference: Devlin et al. (2019), section 4.1; Reimers and Gurevych (2019), section 3 (mean).
        """
        x = self(tokens, mask=mask, positions=positions, segments=segments, token_types=token_types,
                 deterministic=deterministic)
        if self.config.class_pooling == "mean":
            x = mean_of_real(x, mask)
        else:
            x = self.pool(x, mask) if self.config.pooler else first_of_real(x, mask)
        return self.classifier(self.dropout(x.astype(jnp.float32), deterministic=deterministic))

    def _dense(self) -> Projection:
        config = self.config
        return Projection(config.d_model, True, kernel_initializer(config), config.dtype, config.param_dtype)


def first_of_real(hidden: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The vector of the first real token, wherever padding is: hidden [B, T, M], mask [B, T] bool or None -> [B, M].

    Example:
        >>> first_of_real(jnp.array([[[1.0], [3.0], [9.0]]]), jnp.array([[False, True, True]])).tolist()
        [[3.0]]
    """
    if mask is None:
        return hidden[:, 0]
    return jnp.take_along_axis(hidden, jnp.argmax(mask, axis=1)[:, None, None], axis=1)[:, 0]


def mean_of_real(hidden: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The mean over the real tokens: hidden [B, T, M], mask [B, T] bool or None -> [B, M] float32.

    Example:
        >>> mean_of_real(jnp.array([[[1.0], [3.0], [9.0]]]), jnp.array([[True, True, False]])).tolist()
        [[2.0]]
    """
    weights = jnp.ones(hidden.shape[:2]) if mask is None else mask.astype(jnp.float32)
    total = jnp.einsum("BTM,BT->BM", jnp.where(weights[..., None] > 0, hidden, 0.0).astype(jnp.float32), weights)
    return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
