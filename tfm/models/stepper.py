"""From a model to what the decoding loops call: a filled cache and `step(tokens, cache) -> (logits, cache)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from tfm.config import ModelConfig, require
from tfm.models.build import build
from tfm.models.output import stored_output
from tfm.models.scanned import unstack_layers
from tfm.nn.cache import Cache, KeyValue, Slots, empty_cache
from tfm.ops.attention import attention_weights
from tfm.ops.narrow import is_narrowed

Step = Callable[[jax.Array, Cache], tuple[Any, ...]]


class Prepared(struct.PyTreeNode):
    """Parameters laid out for decoding: those of the model, and the collection `decoding` with what steps multiply by.

    Make it once and pass it in place of `params`; what takes parameters below prepares plain ones at every call.
    """

    params: Any
    decoding: Any


@partial(jax.jit, static_argnames=("config",))
def prepare(config: ModelConfig, params: Any) -> Prepared:
    """Lay parameters out for decoding.

    A product of few rows with an output table [V, M] would rearrange the table at every step, so it is transposed once;
    and query, key and value come from one product instead of three.

    Args:
        config: of a model with a decoder.
        params: its parameters, narrowed (`tfm.models.narrow`) or not.

    Raises:
        ValueError: the model has no decoder.
    """
    require(not config.is_encoder_only, "model.decoder_layers", 0, "generation needs a decoder")
    if config.scan_layers:
        params = unstack_layers(params, config)
    table, scale = stored_output(config, params)
    if not is_narrowed(table, config.param_dtype):
        table = table.astype(config.dtype)
    matrix = {"matrix": jax.lax.optimization_barrier(table.T), **({} if scale is None else {"scale": scale})}
    layers = {name: layer["self_attention"] for name, layer in params["decoder"].items() if "self_attention" in layer}
    fused = {name: {"self_attention": {"fused": _fused(attention)}} for name, attention in layers.items()
             if not any("lora_a" in attention[part] for part in ("query", "key", "value"))}
    return Prepared(params, {"output": matrix, "decoder": fused})


def _fused(attention: Any) -> Any:
    """Kernel, bias and scale of one product that gives query, key and value."""
    parts = [attention[name] for name in ("query", "key", "value")]
    return jax.lax.optimization_barrier({leaf: jnp.concatenate([x[leaf] for x in parts], axis=-1) for leaf in parts[0]})


def prepared(config: ModelConfig, params: Any) -> tuple[ModelConfig, Prepared]:
    """Parameters laid out for decoding, and the config of the model that takes them."""
    ready = params if isinstance(params, Prepared) else prepare(config, params)
    return replace(config, scan_layers=False), ready


def make_step(config: ModelConfig, params: Any, shared: Cache | None = None, *, attention: bool = False) -> Step:
    """The step of a model with a decoder: tokens [N, T] int and a cache in, float32 logits [N, T, V] and the cache out.

    Args:
        config: of the model.
        params: its parameters, `Prepared` or plain.
        shared: for an encoder-decoder, the cache of `start_translation` for B sentences; the step reads the source's
            keys and values there, so that the loop's own cache, `own_part(cache)`, holds only what differs between
            the N = B * n hypotheses.
        attention: of an encoder-decoder, return also the weights [N, S] that the last token gives the source, the mean
            over the heads of the layer `alignment_layer(config)`.
    """
    config, ready = prepared(config, params)
    module: Any = build(config)
    variables = {"params": ready.params, "decoding": ready.decoding}

    def apply(tokens: jax.Array, cache: Cache, positions: Any) -> tuple[jax.Array, Cache]:
        if not config.is_encoder_decoder:
            return module.apply(variables, tokens, cache=cache, positions=positions)
        assert shared is not None
        whole = cache.replace(cross=shared.cross, source_mask=shared.source_mask)
        logits, cache = module.apply(variables, tokens, None, cache=whole, target_positions=positions, method="decode")
        return logits, own_part(cache)

    def attend(tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache, jax.Array]:
        found: list[jax.Array] = []
        with nn.intercept_methods(partial(record_cross_attention, found, alignment_layer(config))):
            logits, after = step(tokens, cache)
        weights = found[0].mean(axis=1)  # [B, n * T, S]
        return logits, after, weights.reshape(*tokens.shape, -1)[:, -1]

    def step(tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        if not cache.slots or cache.slots[0].paths is None:
            return apply(tokens, cache, None)
        beams = tokens.reshape(len(cache.lengths), -1)  # [B * n, 1] -> [B, n], all at the same position
        logits, after = apply(beams, cache, jnp.broadcast_to(cache.lengths[:, None], beams.shape))
        return logits.reshape(-1, 1, logits.shape[-1]), after.replace(lengths=cache.lengths + 1)

    return attend if attention else step


def alignment_layer(config: ModelConfig) -> int:
    """The decoder's layer whose attention to the source says most about which word translates which: the last but one.

    Reference: Garg et al. (2019), "Jointly Learning to Align and Translate with Transformer Models", section 3.1.
    """
    return max(config.decoder_layers - 2, 0)


def record_cross_attention(found: list[jax.Array], layer: int, next_method: Any, args: Any, kwargs: Any,
                           context: nn.module.InterceptorContext) -> Any:
    """For `nn.intercept_methods`: append the weights [B, H, T, S] that one layer's module gives the source."""
    module, path = context.module, context.module.path[-2:]
    if path == (f"layers_{layer}", "cross_attention") and context.method_name in ("attend", "attend_stored"):
        query, key = args[0], args[1].by_token()[0] if isinstance(args[1], KeyValue) else args[1]
        found.append(attention_weights(query, key, mask=kwargs["mask"], scale=module.scale, soft_cap=module.softcap))
    return next_method(*args, **kwargs)


MOST_BRANCHES = 8
"""Up to so many beams, computing the scores of each other's keys costs less than moving caches."""


def branches(config: ModelConfig, beams: int) -> bool:
    """Whether the beams of a row can share one cache: `branch` and `follow` are then its `spread` and `reorder`."""
    return attends_fully(config) and 1 < beams <= MOST_BRANCHES


def attends_fully(config: ModelConfig) -> bool:
    """Whether every layer of the decoder keeps all keys in the order they came."""
    config = config.for_decoder()
    return all(config.pattern_of(i).kind == "full" for i in range(config.decoder_layers))


def branch(cache: Cache, beams: int) -> Cache:
    """The cache of B rows as one that `beams` hypotheses of each row share, with room for all their tokens.

    Each step writes the keys of all hypotheses of a row side by side, and a hypothesis sees the slots on its own path.
    Reordering then moves that path, a bit for each slot, in place of keys and values.
    """

    def share(slots: Slots) -> Slots:
        batch, size = slots.valid.shape
        written = jnp.arange(size) < slots.used[:, None, None]
        return slots.replace(paths=jnp.broadcast_to(written, (batch, beams, size)))

    return cache.replace(slots=tuple(map(share, cache.slots)))


def follow(cache: Cache, parents: jax.Array) -> Cache:
    """Let hypothesis k of row b go on from hypothesis parents[b, k]."""

    def move(slots: Slots) -> Slots:
        assert slots.paths is not None
        return slots.replace(paths=jnp.take_along_axis(slots.paths, parents[..., None], axis=1))

    return cache.replace(slots=tuple(map(move, cache.slots)))


def own_part(cache: Cache) -> Cache:
    """The cache without the source's keys and values, which all hypotheses of a sentence share."""
    return cache.replace(cross=None, source_mask=None)


def start_translation(config: ModelConfig, params: Any, source: jax.Array, source_mask: jax.Array, max_length: int, *,
                      dtype: Any = None) -> Cache:
    """Encode source [B, S] and make the cache for `max_length` target tokens, BOS included."""
    config, ready = prepared(config, params)
    module, variables = cast(Any, build(config)), {"params": ready.params}
    encoded = module.apply(variables, source, source_mask=source_mask, method="encode")
    return module.apply(variables, encoded, max_length, source_mask=source_mask, dtype=dtype,
                        method="init_cache")


def start_generation(config: ModelConfig, params: Any, prompt: jax.Array, prompt_mask: jax.Array, max_length: int, *,
                     dtype: Any = None) -> tuple[jax.Array, Cache]:
    """Read all but the last real token of each prompt into a cache.

    Args:
        config: of a decoder-only model.
        params: its parameters.
        prompt: [B, P] int ids, padded on either side.
        prompt_mask: [B, P] bool with at least one real token in each row.
        max_length: most new tokens.
        dtype: of the stored keys and values.

    Returns:
        [B, 1] last token of each prompt, which the first step takes, and the cache.
    """
    batch, length = prompt.shape
    index = jnp.arange(length)
    last = jnp.max(jnp.where(prompt_mask, index, -1), axis=1, keepdims=True)
    cache = empty_cache(config, batch, length + max_length, dtype=dtype)
    config, ready = prepared(config, params)
    module: Any = build(config)
    variables = {"params": ready.params, "decoding": ready.decoding}
    _, cache = module.apply(variables, prompt, mask=prompt_mask & (index < last), cache=cache, method="advance")
    return jnp.take_along_axis(prompt, last, axis=1), cache
