"""A params tree whose matrices are stored in bfloat16 or int8: half or a quarter of the memory, and of the reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import jax.numpy as jnp

from tfm.config import ModelConfig, require
from tfm.models.scanned import unstack_layers
from tfm.ops.narrow import quantize

Weights = Literal["bfloat16", "int8"]
TABLES = ("token_embedding", "source_embedding", "target_embedding", "output")


def narrow_weights(config: ModelConfig, params: Mapping[str, Any],
                   weights: Weights) -> tuple[ModelConfig, dict[str, Any]]:
    """The same parameters with the kernels of all projections, the token embeddings and the output matrix narrowed.

    An int8 matrix comes with a float32 `scale` for each output channel of a kernel, for each row of a table; see
    `tfm.ops.narrow.quantize` for the error. Biases, norms and position tables stay as they are. Modules take either
    tree.

    Args:
        config: of the model.
        params: its parameters.
        weights: "bfloat16" or "int8".

    Returns:
        The config, with layers apart where they were stacked, and the narrowed tree.

    Raises:
        ValueError: another type.

    Example:
        >>> tree = {"output": {"table": jnp.ones((5, 2)), "bias": jnp.ones(5)}, "up": {"kernel": jnp.ones((2, 3))}}
        >>> config = ModelConfig(vocab_size=5)
        >>> narrow = {weights: narrow_weights(config, tree, weights)[1] for weights in ("bfloat16", "int8")}
        >>> sorted(narrow["int8"]["up"]), narrow["bfloat16"]["output"]["table"].dtype
        (['kernel', 'scale'], dtype(bfloat16))
    """
    require(weights in get_args(Weights), "weights", weights, f"it must be one of {', '.join(get_args(Weights))}")
    if config.scan_layers:
        params = unstack_layers(params, config)
    return replace(config, scan_layers=False), _narrow(params, weights, "")


def _narrow(tree: Mapping[str, Any], weights: Weights, parent: str) -> dict[str, Any]:
    narrowed: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            narrowed[name] = _narrow(value, weights, name)
        elif name == "kernel" or (name == "table" and parent in TABLES):
            if weights == "bfloat16":
                narrowed[name] = value.astype(jnp.bfloat16)
            else:
                narrowed[name], narrowed["scale"] = quantize(jnp.asarray(value), -2 if name == "kernel" else -1)
        else:
            narrowed[name] = value
    return narrowed
