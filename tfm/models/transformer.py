"""The encoder-decoder (Vaswani et al., 2017, figure 1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import ModelConfig
from tfm.models.output import OutputLogits, check_ids
from tfm.models.stack import Stack
from tfm.nn.cache import Cache, empty_cache
from tfm.nn.embeddings import Embedding
from tfm.nn.projection import embedding_initializer


class Transformer(nn.Module):
    """Encoder, decoder, and their embeddings.

    Submodules `encoder`, `decoder` (stacks), `output`, and the tables that `config.tie_embeddings` asks for:
    `token_embedding` where source and target share one, else `source_embedding` and `target_embedding`.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        if config.tie_embeddings in ("all", "inputs"):
            self.token_embedding = self._table(config.vocab_size)
        else:
            self.source_embedding = self._table(config.source_vocab_size or config.vocab_size)
            self.target_embedding = self._table(config.vocab_size)
        self.encoder = Stack(config, config.encoder_layers)
        self.decoder = Stack(config.for_decoder(), config.decoder_layers, causal=True, cross=True)
        self.output = OutputLogits(config)

    def __call__(self, source: jax.Array, target: jax.Array, *, source_mask: jax.Array | None = None,
                 target_mask: jax.Array | None = None, source_positions: Any = None, target_positions: Any = None,
                 source_segments: jax.Array | None = None, target_segments: jax.Array | None = None,
                 deterministic: bool = True) -> jax.Array:
        """Logits of the next target token at each place.

        Args:
            source: [B, S] int ids.
            target: [B, T] int ids of the decoder's input, already shifted right.
            source_mask: [B, S] bool, True for real tokens; None: all are.
            target_mask: [B, T] bool.
            source_positions: [S] or [B, S] int; None counts the real tokens (and restarts in each segment).
            target_positions: [T] or [B, T] int.
            source_segments: [B, S] int; tokens see only those of their own segment.
            target_segments: [B, T] int.
            deterministic: no dropout; otherwise `apply` needs `rngs={"dropout": key}`.

        Returns:
            [B, T, V] float32.

        Example:
            >>> from tfm.config import ModelConfig
            >>> model = Transformer(ModelConfig(vocab_size=11, d_model=8, d_ff=16, num_heads=2))
            >>> ids = jnp.ones((2, 3), jnp.int32)
            >>> params = model.init(jax.random.key(0), ids, ids)["params"]
            >>> model.apply({"params": params}, ids, ids).shape
            (2, 3, 11)

        Reference: Vaswani et al. (2017), section 3.
        """
        hidden = self.hidden(source, target, source_mask=source_mask, target_mask=target_mask,
                             source_positions=source_positions, target_positions=target_positions,
                             source_segments=source_segments, target_segments=target_segments,
                             deterministic=deterministic)
        return self._logits(hidden)

    def hidden(self, source: jax.Array, target: jax.Array, *, source_mask: jax.Array | None = None,
               target_mask: jax.Array | None = None, source_positions: Any = None, target_positions: Any = None,
               source_segments: jax.Array | None = None, target_segments: jax.Array | None = None,
               deterministic: bool = True) -> jax.Array:
        """What the output matrix is multiplied with, [B, T, M]; arguments as in `__call__`."""
        encoded = self.encode(source, source_mask=source_mask, source_positions=source_positions,
                              source_segments=source_segments, deterministic=deterministic)
        x, _ = self._decode(target, encoded, source_mask=source_mask, target_mask=target_mask,
                            target_positions=target_positions, source_segments=source_segments,
                            target_segments=target_segments, cache=None, deterministic=deterministic)
        return x * self.config.logit_scale

    def encode(self, source: jax.Array, *, source_mask: jax.Array | None = None, source_positions: Any = None,
               source_segments: jax.Array | None = None, deterministic: bool = True) -> jax.Array:
        """The encoder's output [B, S, M]; arguments as in `__call__`."""
        table = self.token_embedding if self.config.tie_embeddings in ("all", "inputs") else self.source_embedding
        x, _ = self.encoder(self._embed(table, source, "source"), mask=source_mask, positions=source_positions,
                            segments=source_segments, deterministic=deterministic)
        return x

    def decode(self, target: jax.Array, encoded: jax.Array | None, *, source_mask: jax.Array | None = None,
               target_mask: jax.Array | None = None, target_positions: Any = None,
               source_segments: jax.Array | None = None, target_segments: jax.Array | None = None,
               cache: Cache | None = None, deterministic: bool = True) -> Any:
        """Logits of the next target token, with or without a cache; any number of new tokens T >= 1 at a time.

        Args:
            target: [B, T] int ids; with a cache, those that follow what it holds.
            encoded: [B, S, M] from `encode`; may be None where the cache holds its projections.
            source_mask: [B, S] bool; None takes the cache's.
            target_mask: [B, T] bool.
            target_positions: [T] or [B, T] int; None goes on counting.
            source_segments: [B, S] int.
            target_segments: [B, T] int.
            cache: from `init_cache`.
            deterministic: no dropout.

        Returns:
            [B, T, V] float32 logits, or (logits, cache) where a cache is given.
        """
        x, cache = self._decode(target, encoded, source_mask=source_mask, target_mask=target_mask,
                                target_positions=target_positions, source_segments=source_segments,
                                target_segments=target_segments, cache=cache, deterministic=deterministic)
        logits = self._logits(x * self.config.logit_scale)
        return logits if cache is None else (logits, cache)

    def init_cache(self, encoded: jax.Array, max_length: int, *, source_mask: jax.Array | None = None,
                   dtype: Any = None) -> Cache:
        """An empty cache for `max_length` target tokens, with cross-attention's keys and values projected.

        Args:
            encoded: [B, S, M] from `encode`.
            max_length: most target tokens, BOS included.
            source_mask: [B, S] bool.
            dtype: of the stored self-attention keys and values (see `tfm.nn.cache.init_cache`).
        """
        if source_mask is None:
            source_mask = jnp.ones(encoded.shape[:2], bool)
        cache = empty_cache(self.config, encoded.shape[0], max_length, dtype=dtype)
        return cache.replace(cross=self.decoder.project_memory(encoded), source_mask=source_mask)

    def _decode(self, target: jax.Array, encoded: jax.Array | None, *, source_mask: jax.Array | None,
                target_mask: jax.Array | None, target_positions: Any, source_segments: jax.Array | None,
                target_segments: jax.Array | None, cache: Cache | None,
                deterministic: bool) -> tuple[jax.Array, Cache | None]:
        x = self._embed(self._target_table(), target, "target")
        return self.decoder(x, mask=target_mask, positions=target_positions, segments=target_segments,
                            encoded=encoded, encoded_mask=source_mask, encoded_segments=source_segments, cache=cache,
                            deterministic=deterministic)

    def _table(self, rows: int) -> Embedding:
        config = self.config
        return Embedding(rows, config.d_model, embedding_initializer(config), config.dtype, config.param_dtype)

    def _target_table(self) -> Embedding:
        return self.token_embedding if self.config.tie_embeddings in ("all", "inputs") else self.target_embedding

    def _embed(self, table: Embedding, ids: jax.Array, name: str) -> jax.Array:
        check_ids(ids, name)
        x = table(ids)
        return x * self.config.d_model**0.5 if self.config.scale_embeddings else x

    def _logits(self, hidden: jax.Array) -> jax.Array:
        tied = self.config.tie_embeddings in ("all", "decoder")
        return self.output(hidden, self._target_table() if tied else None)
