"""The layers of a stack as one `lax.scan` over stacked parameters: compile time that does not grow with the depth.

With `config.scan_layers` a stack keeps the parameters of all its layers under `layers`, with the layer as first axis,
in place of `layers_0`, `layers_1`, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tfm.config import ModelConfig
from tfm.nn.layers import Layer

RunLayer = Callable[[int, Any, jax.Array, jax.Array], jax.Array]


def init_stacked(key: jax.Array, layer: Layer, num_layers: int) -> Any:
    """Parameters of `num_layers` layers, each with random numbers of its own, stacked along a new first axis."""
    x = jnp.zeros((1, 1, layer.config.d_model), jnp.dtype(layer.config.dtype))

    def init(key: jax.Array) -> Any:
        return layer.init(key, x, method="touch")["params"]

    return jax.vmap(init)(jax.random.split(key, num_layers))


def scan_periods(run: RunLayer, stacked: Any, x: jax.Array, period: int) -> jax.Array:
    """Take x through all layers, `period` layers in each turn of one scan, and those that are left after it.

    Args:
        run: (place in the period, parameters of one layer, index of the layer, x) -> x.
        stacked: parameters with the layer as first axis.
        x: [B, T, M].
        period: number of layers after which their attention patterns repeat.

    Returns:
        [B, T, M].
    """
    depth = jax.tree.leaves(stacked)[0].shape[0]
    turns = depth // period
    groups = jax.tree.map(lambda a: a[:turns * period].reshape(turns, period, *a.shape[1:]), stacked)

    def turn(x: jax.Array, group: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        params, first = group
        for place in range(period):
            x = run(place, layer_slice(params, place), first + place, x)
        return x, None

    if turns:
        x, _ = jax.lax.scan(turn, x, (groups, jnp.arange(turns) * period))
    for i in range(turns * period, depth):
        x = run(i % period, layer_slice(stacked, i), jnp.asarray(i), x)
    return x


def layer_slice(stacked: Any, index: int) -> Any:
    """Parameters of one layer out of stacked ones."""
    return jax.tree.map(lambda a: a[index], stacked)


def stack_layers(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Turn the parameters of separate layers into those of `scan_layers=True`; the numbers stay the same.

    Args:
        params: of a model with `scan_layers=False`: `encoder/layers_0/...`, `encoder/layers_1/...`.
        config: of the model.

    Returns:
        The same tree with `encoder/layers/...` in their place, the layer as first axis; likewise `decoder`.

    Raises:
        ValueError: a layer is missing.

    Example:
        >>> config = ModelConfig(vocab_size=5, encoder_layers=0, decoder_layers=2)
        >>> params = {"decoder": {"layers_0": {"w": jnp.zeros(3)}, "layers_1": {"w": jnp.ones(3)}}}
        >>> stack_layers(params, config)["decoder"]["layers"]["w"].shape
        (2, 3)
    """
    return _convert(params, config, _stack)


def unstack_layers(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The inverse of `stack_layers`: one entry `layers_0`, `layers_1`, ... for each layer.

    Raises:
        ValueError: there are no stacked layers.

    Example:
        >>> config = ModelConfig(vocab_size=5, encoder_layers=0, decoder_layers=2)
        >>> sorted(unstack_layers({"decoder": {"layers": {"w": jnp.zeros((2, 3))}}}, config)["decoder"])
        ['layers_0', 'layers_1']
    """
    return _convert(params, config, _unstack)


def _convert(params: Mapping[str, Any], config: ModelConfig, convert: Callable[..., Any]) -> dict[str, Any]:
    depths = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    return {name: convert(part, name, depths[name]) if depths.get(name) else part for name, part in params.items()}


def _stack(part: Mapping[str, Any], name: str, depth: int) -> dict[str, Any]:
    layers = [f"layers_{i}" for i in range(depth)]
    missing = [layer for layer in layers if layer not in part]
    if missing:
        raise ValueError(f"params have no {name}/{missing[0]}, but the config has {depth} {name} layers")
    rest = {key: value for key, value in part.items() if key not in layers}
    return {**rest, "layers": jax.tree.map(lambda *x: jnp.stack(x), *(part[layer] for layer in layers))}


def _unstack(part: Mapping[str, Any], name: str, depth: int) -> dict[str, Any]:
    if "layers" not in part:
        raise ValueError(f"params have no {name}/layers: they are not those of scan_layers=True")
    found = jax.tree.leaves(part["layers"])[0].shape[0]
    if found != depth:
        raise ValueError(f"params have {found} {name} layers, but the config has {depth}")
    rest = {key: value for key, value in part.items() if key != "layers"}
    return {**rest, **{f"layers_{i}": layer_slice(part["layers"], i) for i in range(depth)}}
