"""A stack of layers between embeddings and output: what encoders and decoders have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import AttentionPattern, ModelConfig, require
from tfm.nn.cache import Cache, KeyValue, Plan, plan
from tfm.nn.dropout import Dropout
from tfm.nn.embeddings import Embedding, LearnedPositions
from tfm.nn.layers import Layer
from tfm.nn.norms import make_norm
from tfm.nn.positions import default_positions
from tfm.nn.projection import embedding_initializer
from tfm.ops.masks import Causal, Padding, Prefix, Rule, Segments, Window
from tfm.ops.patterns import bigbird, longformer, sliding_window
from tfm.ops.positions import Alibi, T5Bias, alibi_slopes, sinusoidal

REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class Stack(nn.Module):
    """Adds positions to embeddings and runs the layers.

    Submodules `layers_0`, ..., and as the config asks: `positions`, `token_types`, `embedding_norm`, `relative_bias`
    (the T5 table that all layers share), `final_norm` (Pre-LN).
    """

    config: ModelConfig
    num_layers: int
    causal: bool = False
    cross: bool = False

    def setup(self) -> None:
        config = self.config
        init = embedding_initializer(config)
        if config.position == "learned":
            self.positions = LearnedPositions(config.max_positions, config.d_model, config.position_offset, init,
                                              config.dtype, config.param_dtype)
        if config.position == "t5":
            self.relative_bias = Embedding(config.t5_buckets, config.num_heads, init, "float32", config.param_dtype)
        if config.token_types and not self.causal:
            self.token_types = Embedding(config.token_types, config.d_model, init, config.dtype, config.param_dtype)
        if config.embedding_norm:
            self.embedding_norm = make_norm(config)
        self.layers = [Layer(config, config.pattern_of(i), self.causal, self.cross) for i in range(self.num_layers)]
        if config.norm_position == "pre":
            self.final_norm = make_norm(config)
        self.dropout = Dropout(config.dropout_rate)

    def project_memory(self, encoded: jax.Array) -> tuple[KeyValue, ...]:
        """Keys and values of cross-attention for each layer; encoded: [B, S, M]."""
        return tuple(layer.project_memory(encoded) for layer in self.layers)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, positions: Any = None,
                 segments: jax.Array | None = None, prefix_length: jax.Array | None = None,
                 token_types: jax.Array | None = None, encoded: jax.Array | None = None,
                 encoded_mask: jax.Array | None = None, encoded_segments: jax.Array | None = None,
                 cache: Cache | None = None, deterministic: bool = True) -> tuple[jax.Array, Cache | None]:
        """Run the stack.

        Args:
            x: [B, T, M] token embeddings.
            mask: [B, T] bool, True for real tokens.
            positions: [T] or [B, T] int; None counts the real tokens.
            segments: [B, T] int of packed rows.
            prefix_length: [B] tokens of a prefix that all may see (prefix LM).
            token_types: [B, T] int.
            encoded: [B, S, M] the encoder's output, for cross-attention without a cache.
            encoded_mask: [B, S] bool.
            encoded_segments: [B, S] int of packed rows.
            cache: what came before.
            deterministic: no dropout.

        Returns:
            [B, T, M], and the cache after the call.
        """
        if positions is None:
            positions = default_positions(x.shape[1], mask=mask, segments=segments,
                                          past=None if cache is None else cache.lengths)
        if cache is None:
            slots, plans = (), ()
        else:
            slots, plans = self._plan(cache, mask, positions, x.shape[:2])
            encoded_mask = cache.source_mask if encoded_mask is None else encoded_mask
        x = self._embed(x, positions, token_types, deterministic)
        bias = self._bias()
        cross_mask = _cross_mask(encoded_mask, segments, encoded_segments)
        memory = self._memory(encoded, cache)
        stored = []
        for i, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[i]
            where = plans[layer_cache.group] if isinstance(layer_cache, KeyValue) else None
            arguments = self._self_arguments(layer.pattern, where, positions, mask, segments, prefix_length, bias)
            x, after = self._run(layer, x, None if memory is None else memory[i], self_arguments=arguments,
                                 cross_arguments={"mask": cross_mask}, deterministic=deterministic,
                                 stored=layer_cache)
            stored.append(after)
        if self.config.norm_position == "pre":
            x = self.final_norm(x)
        if cache is None:
            return x, None
        return x, cache.replace(layers=tuple(stored), slots=slots, cross=memory,
                                lengths=cache.lengths + _count(mask, x.shape[:2]), source_mask=encoded_mask)

    def _embed(self, x: jax.Array, positions: Any, token_types: jax.Array | None, deterministic: bool) -> jax.Array:
        config = self.config
        if config.position == "sinusoidal":
            x = x + sinusoidal(positions, config.d_model, base=config.position_base,
                               layout=config.sinusoidal_layout).astype(x.dtype)
        elif config.position == "learned":
            x = x + self.positions(positions)
        if config.token_types and not self.causal:
            x = x + self.token_types(jnp.zeros(x.shape[:2], jnp.int32) if token_types is None else token_types)
        if config.embedding_norm:
            x = self.embedding_norm(x)
        return self.dropout(x, deterministic=deterministic)

    def _bias(self) -> Any:
        config = self.config
        if config.position == "alibi":
            return Alibi(alibi_slopes(config.num_heads))
        if config.position == "t5":
            return T5Bias(self.relative_bias.table, bidirectional=not self.causal, max_distance=config.t5_max_distance)
        return None

    def _memory(self, encoded: jax.Array | None, cache: Cache | None) -> tuple[KeyValue, ...] | None:
        if not self.cross:
            return None
        if cache is not None and cache.cross is not None:
            return cache.cross
        if encoded is None:
            raise ValueError("the decoder needs `encoded`, or a cache that was made with it (init_cache)")
        return self.project_memory(encoded)

    def _plan(self, cache: Cache, mask: jax.Array | None, positions: Any,
              shape: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[Plan, ...]]:
        valid = jnp.ones(shape, bool) if mask is None else mask
        planned = [plan(slots, jnp.broadcast_to(positions, shape), valid) for slots in cache.slots]
        return tuple(after for after, _ in planned), tuple(where for _, where in planned)

    def _self_arguments(self, pattern: AttentionPattern, where: Plan | None, positions: Any, mask: jax.Array | None,
                        segments: jax.Array | None, prefix_length: jax.Array | None, bias: Any) -> dict[str, Any]:
        valid = mask if where is None else where.valid
        rules: list[Rule] = []
        if self.causal:
            rules.append(Causal() if prefix_length is None else Causal() | Prefix(prefix_length))
        if pattern.kind not in ("full", "linear"):
            rules.append(pattern_rule(pattern, self.config, causal=self.causal))
        if valid is not None:
            rules.append(Padding(valid))
        if segments is not None:
            rules.append(Segments(segments, segments))
        return {"positions": positions, "key_positions": None if where is None else where.positions,
                "mask": _all_of(rules), "bias": bias, "key_mask": mask, "plan": where}

    def _run(self, layer: Layer, x: jax.Array, memory: KeyValue | None, **arguments: Any) -> tuple[jax.Array, Any]:
        if self.config.remat == "none" or arguments["stored"] is not None:
            return layer(x, memory, **arguments)

        def run(layer: Layer, x: jax.Array, memory: KeyValue | None) -> tuple[jax.Array, Any]:
            return layer(x, memory, **arguments)

        return nn.remat(run, policy=REMAT_POLICIES[self.config.remat])(layer, x, memory)


def pattern_rule(pattern: AttentionPattern, config: ModelConfig, *, causal: bool) -> Rule:
    """The mask rule of an attention pattern, without the causal rule."""
    if pattern.kind == "window":
        return sliding_window(pattern.window) if causal else Window(pattern.window // 2, pattern.window // 2)
    if pattern.kind == "longformer":
        return longformer(pattern.window, tokens=pattern.global_tokens, dilation=pattern.dilation)
    require(pattern.kind == "bigbird", "attention_pattern.kind", pattern.kind, "it is no pattern of scores")
    return bigbird(config.max_positions, block_size=pattern.block_size, num_random_blocks=pattern.random_blocks,
                   seed=pattern.seed)


def _all_of(rules: Sequence[Rule]) -> Rule | None:
    combined: Rule | None = None
    for rule in rules:
        combined = rule if combined is None else combined & rule
    return combined


def _cross_mask(mask: jax.Array | None, segments: jax.Array | None, encoded_segments: jax.Array | None) -> Rule | None:
    rules: list[Rule] = [] if mask is None else [Padding(mask)]
    if segments is not None and encoded_segments is not None:
        rules.append(Segments(segments, encoded_segments))
    return _all_of(rules)


def _count(mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Real tokens of each row: [B] int32."""
    return jnp.full(shape[:1], shape[1], jnp.int32) if mask is None else mask.sum(axis=1, dtype=jnp.int32)
