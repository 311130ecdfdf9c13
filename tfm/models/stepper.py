"""From a model to what the decoding loops call: a filled cache and `step(tokens, cache) -> (logits, cache)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tfm.config import ModelConfig
from tfm.models.build import build
from tfm.models.output import transposed_output
from tfm.nn.cache import Cache, empty_cache

Step = Callable[[jax.Array, Cache], tuple[jax.Array, Cache]]


def make_step(config: ModelConfig, params: Any, shared: Cache | None = None) -> Step:
    """The step of a model with a decoder: tokens [N, T] int and a cache in, float32 logits [N, T, V] and the cache out.

    Args:
        config: of the model.
        params: its parameters.
        shared: for an encoder-decoder, the cache of `start_translation` for B sentences; the step reads the source's
            keys and values there, so that the loop's own cache, `own_part(cache)`, holds only what differs between
            the N = B * n hypotheses.
    """
    module: Any = build(config)
    variables = {"params": params, "decoding": transposed_output(config, params)}

    def translate(tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        assert shared is not None
        whole = cache.replace(cross=shared.cross, source_mask=shared.source_mask)
        logits, cache = module.apply(variables, tokens, None, cache=whole, method="decode")
        return logits, own_part(cache)

    def generate(tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return module.apply(variables, tokens, cache=cache)

    return translate if config.is_encoder_decoder else generate


def own_part(cache: Cache) -> Cache:
    """The cache without the source's keys and values, which all hypotheses of a sentence share."""
    return cache.replace(cross=None, source_mask=None)


def start_translation(config: ModelConfig, params: Any, source: jax.Array, source_mask: jax.Array, max_length: int, *,
                      dtype: Any = None) -> Cache:
    """Encode source [B, S] and make the cache for `max_length` target tokens, BOS included."""
    module: Any = build(config)
    encoded = module.apply({"params": params}, source, source_mask=source_mask, method="encode")
    return module.apply({"params": params}, encoded, max_length, source_mask=source_mask, dtype=dtype,
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
    module: Any = build(config)
    _, cache = module.apply({"params": params}, prompt, mask=prompt_mask & (index < last), cache=cache,
                            method="advance")
    return jnp.take_along_axis(prompt, last, axis=1), cache
