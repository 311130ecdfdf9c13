"""Low-rank adapters (LoRA): which parameters are trained with them, and how they become part of the weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from tfm.config import ModelConfig, require

ADAPTED = r"(^|/)lora_[ab]$|^classifier/"
"""Paths of the parameters that are trained where a model has adapters."""


def trainable(config: ModelConfig) -> str | None:
    """The pattern of the paths of the parameters that training changes; None: all of them."""
    return ADAPTED if config.lora_rank else None


def split_params(params: Mapping[str, Any], pattern: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters whose path matches a pattern, and the others: two nested dicts without empty ones.

    Example:
        >>> split_params({"query": {"kernel": 1, "lora_a": 2}}, ADAPTED)
        ({'query': {'lora_a': 2}}, {'query': {'kernel': 1}})
    """
    if pattern is None:
        return dict(params), {}
    return _select(params, pattern, True), _select(params, pattern, False)


def join_params(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested dicts as one; the leaves of the second win. The inverse of `split_params`.

    Example:
        >>> join_params({"query": {"lora_a": 2}}, {"query": {"kernel": 1}})
        {'query': {'lora_a': 2, 'kernel': 1}}
    """
    joined = dict(first)
    for name, value in second.items():
        inner = joined.get(name)
        joined[name] = join_params(inner, value) if isinstance(inner, Mapping) else value
    return joined


def merge_adapters(config: ModelConfig, params: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The same model without adapters: each kernel W becomes W + lora_alpha / lora_rank * A B.

    Args:
        config: of a model, with adapters or without.
        params: its parameters, with separate or stacked layers.

    Returns:
        The config with `lora_rank=0`, and the parameters. The sum is taken in float32.

    Raises:
        ValueError: the config has adapters, and the parameters have none.

    Example:
        >>> config = ModelConfig(vocab_size=5, lora_rank=1, lora_alpha=2.0)
        >>> part = {"kernel": jnp.ones((2, 2)), "lora_a": jnp.ones((2, 1)), "lora_b": jnp.array([[0.0, 3.0]])}
        >>> merge_adapters(config, {"query": part})[1]["query"]["kernel"].tolist()
        [[1.0, 7.0], [1.0, 7.0]]

    Reference: Hu et al. (2021), section 4.1.
    """
    if not config.lora_rank:
        return config, dict(params)
    require(bool(split_params(params, r"(^|/)lora_a$")[0]), "model.lora_rank", config.lora_rank,
            "the parameters have no adapters")
    return dataclasses.replace(config, lora_rank=0), _merge(params, config.lora_alpha / config.lora_rank)


def _merge(tree: Mapping[str, Any], scale: float) -> dict[str, Any]:
    merged: dict[str, Any] = {name: _merge(value, scale) if isinstance(value, Mapping) else value
                              for name, value in tree.items()}
    if "lora_a" in merged:
        down, up, kernel = merged.pop("lora_a"), merged.pop("lora_b"), merged["kernel"]
        product = jnp.matmul(down.astype(jnp.float32), up.astype(jnp.float32), precision="highest")
        merged["kernel"] = (kernel.astype(jnp.float32) + scale * product).astype(kernel.dtype)
    return merged


def _select(tree: Mapping[str, Any], pattern: str, wanted: bool, prefix: str = "") -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            if inner := _select(value, pattern, wanted, f"{path}/"):
                chosen[name] = inner
        elif bool(re.search(pattern, path)) == wanted:
            chosen[name] = value
    return chosen
