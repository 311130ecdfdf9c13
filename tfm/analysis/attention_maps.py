"""Attention weights of a whole model as arrays, read out of its own forward pass; rollout and entropy beside them.

Attention weights say where a layer read from, not why the model answered as it did: see Jain and Wallace (2019),
"Attention is not Explanation", and Wiegreffe and Pinter (2019), "Attention is not not Explanation".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tfm.config import ModelConfig, require
from tfm.models import build
from tfm.models.scanned import unstack_layers
from tfm.nn.attention import MultiHeadAttention
from tfm.nn.cache import KeyValue
from tfm.ops.attention import attention_weights
from tfm.ops.positions import Shaw

Part = Literal["encoder", "decoder", "cross"]
PARTS: tuple[Part, ...] = ("encoder", "decoder", "cross")
Place = tuple[Part, int]


@dataclass(frozen=True)
class AttentionMaps:
    """The weights of one text or pair of texts.

    Attributes:
        encoder: for each layer [H, S, S] float32: row i holds the weights of query i over the keys.
        decoder: for each layer [H, T, T] float32.
        cross: for each decoder layer [H, T, S] float32.
        first_layer: number of the first layer in these tuples: 0, or the one layer that was asked for.
        source_tokens: names of the tokens that the encoder (or a model of one stack) reads.
        target_tokens: names of the tokens that the decoder of an encoder-decoder reads.
    """

    encoder: tuple[np.ndarray, ...] = ()
    decoder: tuple[np.ndarray, ...] = ()
    cross: tuple[np.ndarray, ...] = ()
    first_layer: int = 0
    source_tokens: tuple[str, ...] = ()
    target_tokens: tuple[str, ...] = ()

    def with_tokens(self, source_tokens: Sequence[str], target_tokens: Sequence[str] = ()) -> AttentionMaps:
        """The same maps with names of their tokens."""
        return dataclasses.replace(self, source_tokens=tuple(source_tokens), target_tokens=tuple(target_tokens))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that the model has."""
        return tuple(part for part in PARTS if getattr(self, part))

    def layers(self, part: Part) -> tuple[np.ndarray, ...]:
        """The layers of one part."""
        require(part in self.parts, "part", part, f"these maps have {', '.join(self.parts)}")
        return getattr(self, part)

    def tokens(self, part: Part) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the queries and of the keys of one part; numbers where the tokens have no names."""
        _, queries, keys = self.layers(part)[0].shape
        rows, columns = self.source_tokens, self.source_tokens
        if part == "cross":
            rows = self.target_tokens
        elif part == "decoder" and self.cross:
            rows = columns = self.target_tokens
        return rows or _numbers(queries), columns or _numbers(keys)

    def rollout(self, part: Part = "encoder") -> np.ndarray:
        """`attention_rollout` of the layers of self-attention of one part: [T, T]."""
        require(part != "cross", "part", part, "rollout follows self-attention: choose encoder or decoder")
        return attention_rollout(self.layers(part))

    def entropy(self, part: Part) -> np.ndarray:
        """`head_entropy` of each layer and head of one part: [layers, H]."""
        return np.stack([head_entropy(weights) for weights in self.layers(part)])


def attention_maps(config: ModelConfig, params: Any, source_ids: Sequence[int],
                   target_ids: Sequence[int] | None = None, *, part: Part | None = None,
                   layer: int | None = None) -> AttentionMaps:
    """The weights that the model's own forward pass gives, of every layer and head.

        weights = softmax(q k^T * scale + bias) where the mask allows, per head

    Where a part and a layer are named, no other layer's weights are ever in memory.

    Args:
        config: the architecture.
        params: its parameters.
        source_ids: [S] ids of the source, or of the text of a model of one stack.
        target_ids: [T] ids that the decoder of an encoder-decoder reads, BOS first.
        part: "encoder", "decoder" or "cross"; None: all that the model has.
        layer: number of one layer; None: all.

    Returns:
        AttentionMaps without names of tokens.

    Raises:
        ValueError: no ids, ids outside the vocabulary, a part or layer that the model does not have.

    Example:
        >>> from tfm.models import init_params
        >>> config = ModelConfig(vocab_size=9, d_model=8, d_ff=8, num_heads=2, encoder_layers=0, decoder_layers=3)
        >>> maps = attention_maps(config, init_params(config, jax.random.key(0)), [1, 2, 3])
        >>> len(maps.decoder), maps.decoder[0].shape, maps.decoder[0][0, 0].tolist()
        (3, (2, 3, 3), [1.0, 0.0, 0.0])

    Reference: Vaswani et al. (2017), section 3.2.1 and the figures of the appendix.
    """
    places = _places(config, part, layer)
    _check_ids(config, source_ids, target_ids)
    if config.scan_layers:
        params = unstack_layers(params, config)
    config = dataclasses.replace(config, scan_layers=False, remat="none")
    target = None if target_ids is None else jnp.asarray([target_ids], jnp.int32)
    found = _weights(config, tuple(places), params, jnp.asarray([source_ids], jnp.int32), target)
    arrays = [np.asarray(weights, np.float32)[0] for weights in found]
    encoder, decoder, cross = (tuple(array for place, array in zip(places, arrays, strict=True) if place[0] == name)
                               for name in PARTS)
    return AttentionMaps(encoder, decoder, cross, first_layer=layer or 0)


def _places(config: ModelConfig, part: Part | None, layer: int | None) -> list[Place]:
    """The (part, layer) that are asked for."""
    depths: dict[Part, int] = {"encoder": config.encoder_layers, "decoder": config.decoder_layers,
                               "cross": config.decoder_layers if config.is_encoder_decoder else 0}
    chosen = [part] if part is not None else [name for name in PARTS if depths[name]]
    require(bool(depths.get(chosen[0])), "part", part,
            f"this model has {', '.join(name for name in PARTS if depths[name])}")
    if layer is None:
        return [(name, i) for name in chosen for i in range(depths[name])]
    deepest = max(depths[name] for name in chosen)
    require(0 <= layer < deepest, "layer", layer, f"the layers are 0 to {deepest - 1}")
    return [(name, layer) for name in chosen if layer < depths[name]]


def _check_ids(config: ModelConfig, source_ids: Sequence[int], target_ids: Sequence[int] | None) -> None:
    require((target_ids is not None) == config.is_encoder_decoder, "target_ids", target_ids,
            "an encoder-decoder needs it, and no other model takes it")
    rows = [("source_ids", source_ids, config.source_vocab_size or config.vocab_size)]
    if target_ids is not None:
        rows.append(("target_ids", target_ids, config.vocab_size))
    for name, ids, size in rows:
        require(len(ids) > 0, name, list(ids), "it needs at least one id")
        require(min(ids) >= 0 and max(ids) < size, name, [min(ids), max(ids)], f"ids must lie in [0, {size})")
        require(config.position != "learned" or len(ids) <= config.max_positions, f"the length of {name}", len(ids),
                f"the model has {config.max_positions} positions")


@partial(jax.jit, static_argnums=(0, 1))
def _weights(config: ModelConfig, places: tuple[Place, ...], params: Any, source: jax.Array,
             target: jax.Array | None) -> list[jax.Array]:
    """The weights [1, H, T, S] of each place, out of one forward pass."""
    found: dict[Place, jax.Array] = {}

    def record(next_method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, method = context.module, context.method_name
        if isinstance(module, MultiHeadAttention) and method in READ:
            place = _place_of(module.path)
            if place in places:
                found[place] = READ[method](module, *args, **kwargs)
        return next_method(*args, **kwargs)

    ids = (source,) if target is None else (source, target)
    with nn.intercept_methods(record):
        build(config).apply({"params": params}, *ids, method="hidden")
    return [found[place] for place in places]


def _place_of(path: Sequence[str]) -> Place:
    """("decoder", "layers_3", "cross_attention") -> ("cross", 3)."""
    stack, layer, name = path[-3:]
    part: Part = "cross" if name == "cross_attention" else "encoder" if stack == "encoder" else "decoder"
    return part, int(layer.removeprefix("layers_"))


def _scored(module: MultiHeadAttention, query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, bias: Any,
            query_positions: Any, key_positions: Any, deterministic: bool) -> jax.Array:
    """What `MultiHeadAttention.attend` multiplies its values with."""
    relative = None if module.shaw_distance is None else Shaw(module.relative_keys, module.relative_values)
    return attention_weights(query, key, mask=mask, bias=bias, scale=module.scale, soft_cap=module.softcap,
                             relative=relative, query_positions=query_positions, key_positions=key_positions)


def _stored(module: MultiHeadAttention, query: jax.Array, keys: KeyValue, **how: Any) -> jax.Array:
    """What `MultiHeadAttention.attend_stored` multiplies its values with."""
    return _scored(module, query, *keys.by_token(), **how)


def _linear(module: MultiHeadAttention, query: jax.Array, key: jax.Array, value: jax.Array,
            key_mask: jax.Array | None, state: Any) -> jax.Array:
    """phi(q_i) . phi(k_j) / sum_j phi(q_i) . phi(k_j), phi = elu + 1: linear attention's weights, written out.

    Reference: Katharopoulos et al. (2020), equations 4 and 7.
    """
    query, key = (nn.elu(x.astype(jnp.float32)) + 1.0 for x in (query, key))
    batch, length, heads, width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], width)
    products = jnp.einsum("BTKGD,BSKD->BKGTS", grouped, key).reshape(batch, heads, length, key.shape[1])
    if module.causal:
        products = jnp.where(jnp.tri(length, dtype=bool), products, 0.0)
    return products / products.sum(-1, keepdims=True)


READ: dict[str, Callable[..., jax.Array]] = {
    "attend": _scored, "attend_stored": _stored, "attend_linearly": _linear}


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(count))


def attention_rollout(layers: Sequence[np.ndarray]) -> np.ndarray:
    """How much of each input token reaches each output, if attention and residuals were all that moves it.

        A~_l = (mean over heads of A_l + I) / 2,    rollout = A~_L ... A~_2 A~_1

    Args:
        layers: for each layer [H, T, T] weights of self-attention, the first layer first.

    Returns:
        [T, T] float32; a row sums to 1 where every layer's rows do.

    Example:
        >>> attention_rollout([np.array([[[1.0, 0.0], [1.0, 0.0]]])]).tolist()
        [[1.0, 0.0], [0.5, 0.5]]

    Reference: Abnar and Zuidema (2020), "Quantifying Attention Flow in Transformers", section 3, equation 1.
    """
    identity = np.eye(layers[0].shape[-1])
    total = identity
    for weights in layers:
        total = 0.5 * (weights.astype(np.float64).mean(0) + identity) @ total
    return total.astype(np.float32)


def head_entropy(weights: np.ndarray) -> np.ndarray:
    """Entropy in nats of each head's weights, averaged over the queries that see a key.

        H_h = mean_i ( - sum_j w_hij ln w_hij )

    0: each query reads one key; ln S: it reads all S keys alike.

    Args:
        weights: [H, T, S].

    Returns:
        [H] float32.

    Example:
        >>> head_entropy(np.array([[[1.0, 0.0], [0.5, 0.5]]])).round(4).tolist()
        [0.3465...]

    Reference: Clark et al. (2019), "What Does BERT Look at?", section 3.
    """
    weights = weights.astype(np.float64)
    terms = -weights * np.log(np.where(weights > 0, weights, 1.0))
    seen = (weights.sum(-1) > 0).sum(-1)
    return (terms.sum((-1, -2)) / np.maximum(seen, 1)).astype(np.float32)
