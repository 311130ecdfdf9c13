"""A stack of layers between embeddings and output: what encoders and decoders have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import AttentionPattern, ModelConfig, require
from tfm.models.scanned import init_stacked, layer_slice, scan_periods
from tfm.nn.cache import Cache, KeyValue, Plan, plan
from tfm.nn.dropout import Dropout
from tfm.nn.embeddings import Embedding, LearnedPositions
from tfm.nn.layers import Layer
from tfm.nn.norms import make_norm
from tfm.nn.positions import default_positions
from tfm.nn.projection import SAVED, embedding_initializer
from tfm.ops.masks import Causal, Matrix, Padding, Prefix, Rule, Segments, Window
from tfm.ops.patterns import bigbird, longformer, sliding_window
from tfm.ops.positions import Alibi, T5Bias, alibi_slopes, sinusoidal

REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.save_only_these_names(SAVED)}


class Stack(nn.Module):
    """Adds positions to embeddings and runs the layers.

    Submodules `layers_0`, ... (with `scan_layers` the parameter tree `layers`, stacked), and as the config asks:
    `positions`, `token_types`, `embedding_norm`, `relative_bias` (the T5 table that all layers share), `final_norm`
    (Pre-LN).
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
        if config.scan_layers:
            self.stacked = self.param("layers", init_stacked, self._detached(0), self.num_layers)
        else:
            self.layers = [Layer(config, config.pattern_of(i), self.causal, self.cross) for i in range(self.num_layers)]
        if config.norm_position == "pre":
            self.final_norm = make_norm(config)
        self.dropout = Dropout(config.dropout_rate)

    def project_memory(self, encoded: jax.Array) -> tuple[KeyValue, ...]:
        """Keys and values of cross-attention for each layer; encoded: [B, S, M]."""
        return tuple(self._layer(i).project_memory(encoded) for i in range(self.num_layers))

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
        self._check(x.shape[1], segments, prefix_length, encoded, encoded_segments, cache)
        if positions is None:
            positions = default_positions(x.shape[1], mask=mask, segments=segments,
                                          past=None if cache is None else cache.lengths)
        slots, plans = ((), ()) if cache is None else self._plan(cache, mask, positions, x.shape[:2])
        if cache is not None and encoded_mask is None:
            encoded_mask = cache.source_mask
        arguments = partial(self._self_arguments, positions=positions, mask=mask, segments=segments,
                            prefix_length=prefix_length, bias=self._bias())
        common = {"cross_arguments": {"mask": _cross_mask(encoded_mask, segments, encoded_segments)},
                  "deterministic": deterministic}
        x = self._embed(x, positions, token_types, deterministic)
        stored: tuple[Any, ...] = ()
        if self.config.scan_layers and cache is None:
            x = self._scan(x, encoded, arguments, common)
        else:
            memory = self._memory(encoded, cache)
            x, stored = self._loop(x, memory, cache, plans, arguments, common)
        if self.config.norm_position == "pre":
            x = self.final_norm(x)
        if cache is None:
            return x, None
        return x, cache.replace(layers=stored, slots=slots, cross=memory, source_mask=encoded_mask,
                                lengths=cache.lengths + _count(mask, x.shape[:2]))

    def _loop(self, x: jax.Array, memory: tuple[KeyValue, ...] | None, cache: Cache | None, plans: tuple[Plan, ...],
              arguments: Callable[..., dict[str, Any]], common: dict[str, Any]) -> tuple[jax.Array, tuple[Any, ...]]:
        """The layers one after the other; also what each stores in the cache."""
        stored = []
        for i in range(self.num_layers):
            layer, layer_cache = self._layer(i, common["deterministic"]), None if cache is None else cache.layers[i]
            where = plans[layer_cache.group] if isinstance(layer_cache, KeyValue) else None
            x, after = self._run(layer, x, None if memory is None else memory[i], stored=layer_cache,
                                 self_arguments=arguments(layer.pattern, where), **common)
            stored.append(after)
        return x, tuple(stored)

    def _scan(self, x: jax.Array, encoded: jax.Array | None, arguments: Callable[..., dict[str, Any]],
              common: dict[str, Any]) -> jax.Array:
        """The layers as one scan over their stacked parameters."""
        key = self._dropout_key(common["deterministic"])

        def run(place: int, params: Any, index: jax.Array, x: jax.Array) -> jax.Array:
            layer = self._bind(place, params, None if key is None else jax.random.fold_in(key, index))
            memory = None if encoded is None else layer.project_memory(encoded)
            return self._run(layer, x, memory, stored=None, self_arguments=arguments(layer.pattern, None), **common)[0]

        return scan_periods(run, self.stacked, x, len(self.config.attention_pattern))

    def _layer(self, index: int, deterministic: bool = True) -> Layer:
        """One layer, with its parameters apart or a slice of the stacked ones."""
        if not self.config.scan_layers:
            return self.layers[index]
        return self._bind(index, layer_slice(self.stacked, index), self._dropout_key(deterministic))

    def _bind(self, index: int, params: Any, key: jax.Array | None) -> Layer:
        return self._detached(index).bind({"params": params}, rngs={} if key is None else {"dropout": key})

    def _detached(self, index: int) -> Layer:
        return Layer(self.config, self.config.pattern_of(index), self.causal, self.cross, parent=None)

    def _dropout_key(self, deterministic: bool) -> jax.Array | None:
        return None if deterministic or not self.has_rng("dropout") else self.make_rng("dropout")

    def _check(self, length: int, segments: jax.Array | None, prefix_length: jax.Array | None,
               encoded: jax.Array | None, encoded_segments: jax.Array | None, cache: Cache | None) -> None:
        """Refuse what would otherwise give wrong numbers."""
        if self.cross and encoded is None and (cache is None or cache.cross is None):
            raise ValueError("the decoder needs `encoded`, or a cache that was made with it (init_cache)")
        if cache is not None and segments is not None:
            raise ValueError("segments do not go together with a cache: a cached row is one sequence")
        if self.cross and (segments is None) != (encoded_segments is None):
            raise ValueError("packed rows need the segments of both sides, source_segments and target_segments")
        kinds = {self.config.pattern_of(i).kind for i in range(self.num_layers)}
        if "linear" in kinds and not (segments is None and prefix_length is None):
            raise ValueError("linear attention has no mask for packed segments or a prefix: use padded batches")
        if "bigbird" in kinds and cache is None and length > self.config.max_positions:
            raise ValueError(f"a sequence of {length} tokens does not fit the bigbird pattern of "
                             f"model.max_positions={self.config.max_positions}: shorten it or raise max_positions")

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
        if cache is not None and cache.cross is not None:
            return cache.cross
        return None if encoded is None else self.project_memory(encoded)

    def _plan(self, cache: Cache, mask: jax.Array | None, positions: Any,
              shape: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[Plan, ...]]:
        valid = jnp.ones(shape, bool) if mask is None else mask
        planned = [plan(slots, jnp.broadcast_to(positions, shape), valid) for slots in cache.slots]
        return tuple(after for after, _ in planned), tuple(where for _, where in planned)

    def _self_arguments(self, pattern: AttentionPattern, where: Plan | None, *, positions: Any,
                        mask: jax.Array | None, segments: jax.Array | None, prefix_length: jax.Array | None,
                        bias: Any) -> dict[str, Any]:
        valid = mask if where is None else where.valid
        rules: list[Rule] = []
        if self.causal:
            rules.append(Causal() if prefix_length is None else Causal() | Prefix(prefix_length))
        if pattern.kind not in ("full", "linear"):
            rules.append(pattern_rule(pattern, self.config, causal=self.causal))
        if valid is not None:
            rules.append(Padding(valid))
        if where is not None and where.paths is not None:
            rules.append(Matrix(where.paths[:, None]))
        if segments is not None:
            rules.append(Segments(segments, segments))
        return {"positions": positions, "key_positions": None if where is None else where.positions,
                "mask": _all_of(rules), "bias": bias, "key_mask": mask, "plan": where}

    def _run(self, layer: Layer, x: jax.Array, memory: KeyValue | None, **arguments: Any) -> tuple[jax.Array, Any]:
        if self.config.remat == "none" or arguments["stored"] is not None or self.is_initializing():
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
