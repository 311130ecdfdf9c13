"""The decoder-only language model (GPT, Llama, ...)."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from tfm.config import ModelConfig
from tfm.models.output import OutputLogits, check_ids
from tfm.models.stack import Stack
from tfm.nn.cache import Cache
from tfm.nn.embeddings import Embedding
from tfm.nn.projection import embedding_initializer


class DecoderLM(nn.Module):
    """A causal stack over token embeddings. Submodules `token_embedding`, `decoder`, `output`."""

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.token_embedding = Embedding(config.vocab_size, config.d_model, embedding_initializer(config),
                                         config.dtype, config.param_dtype)
        self.decoder = Stack(config.for_decoder(), config.decoder_layers, causal=True)
        self.output = OutputLogits(config)

    def __call__(self, tokens: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
                 segments: jax.Array | None = None, prefix_length: jax.Array | None = None,
                 cache: Cache | None = None, deterministic: bool = True) -> Any:
        """Logits of the next token at each place.

        Args:
            tokens: [B, T] int ids; with a cache, those that follow what it holds.
            mask: [B, T] bool, True for real tokens; None: all are.
            positions: [T] or [B, T] int; None counts the real tokens (and restarts in each segment).
            segments: [B, T] int of packed rows; tokens see only those of their own segment.
            prefix_length: [B] int, positions below it are seen by all (prefix LM).
            cache: from `tfm.nn.cache.init_cache`.
            deterministic: no dropout; otherwise `apply` needs `rngs={"dropout": key}`.

        Returns:
            [B, T, V] float32, or (logits, cache) where a cache is given.

        Example:
            >>> import jax.numpy as jnp
            >>> from tfm.config import ModelConfig
            >>> model = DecoderLM(ModelConfig(vocab_size=11, d_model=8, d_ff=16, num_heads=2, encoder_layers=0))
            >>> ids = jnp.ones((2, 3), jnp.int32)
            >>> params = model.init(jax.random.key(0), ids)["params"]
            >>> model.apply({"params": params}, ids).shape
            (2, 3, 11)
        """
        x, cache = self._run(tokens, mask, positions, segments, prefix_length, cache, deterministic)
        logits = self.output(x, None if self.config.tie_embeddings in ("none", "inputs") else self.token_embedding)
        return logits if cache is None else (logits, cache)

    def hidden(self, tokens: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
               segments: jax.Array | None = None, prefix_length: jax.Array | None = None,
               deterministic: bool = True) -> jax.Array:
        """What the output matrix is multiplied with, [B, T, M]; arguments as in `__call__`."""
        return self._run(tokens, mask, positions, segments, prefix_length, None, deterministic)[0]

    def advance(self, tokens: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
                cache: Cache) -> tuple[jax.Array, Cache]:
        """Read tokens [B, T] into the cache without making logits: (hidden [B, T, M], cache)."""
        hidden, after = self._run(tokens, mask, positions, None, None, cache, True)
        assert after is not None
        return hidden, after

    def _run(self, tokens: jax.Array, mask: jax.Array | None, positions: Any, segments: jax.Array | None,
             prefix_length: jax.Array | None, cache: Cache | None,
             deterministic: bool) -> tuple[jax.Array, Cache | None]:
        check_ids(tokens, "tokens")
        x = self.token_embedding(tokens)
        if self.config.scale_embeddings:
            x = x * self.config.d_model**0.5
        x, cache = self.decoder(x, mask=mask, positions=positions, segments=segments, prefix_length=prefix_length,
                                cache=cache, deterministic=deterministic)
        return x * self.config.logit_scale, cache
