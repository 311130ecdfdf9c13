"""The decoder's cache: an explicit pytree, batch first, that goes into `decode` and comes back from it.

A cache has three parts. `layers` holds the keys and values (or the state of linear attention) of each layer; `slots`
says, for each kind of layer, which position every stored key has and which are real; `cross` holds the projected keys
and values of the encoder's output. All layers of one kind share one `Slots`, and all rows of a batch write the same
slot, so that a write is one slice update; raggedness lives in the validity of the slots. A sliding-window layer keeps a
ring of as many slots as its window.

The steps of one call: `Slots.plan` says where new tokens go, `store` writes one layer's keys and values by that plan,
and returns what the new queries attend to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from tfm.config import ModelConfig, require
from tfm.ops.linear import LinearState, init_linear_state


class KeyValue(struct.PyTreeNode):
    """Keys [B, K, S, D] and values [B, K, S, Dv]; int8 ones come with a float32 scale for each vector [B, K, S, 1].

    Heads come before places so that a query reads each head's keys in one run: in the other order, which the attention
    functions take, every step of a decoding would first transpose the whole cache.
    """

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    group: int = struct.field(pytree_node=False, default=0)
    """Index into `Cache.slots`."""


class Slots(struct.PyTreeNode):
    """Position [B, S] and reality [B, S] of the stored keys, and the number of slots written so far [B]."""

    positions: jax.Array
    valid: jax.Array
    used: jax.Array
    ring: bool = struct.field(pytree_node=False, default=False)


class Plan(struct.PyTreeNode):
    """Where the new keys of one call go, and what its queries see."""

    positions: jax.Array
    """[B, S'] position of each key attended to."""
    valid: jax.Array
    """[B, S'] whether it is real."""
    start: jax.Array | None
    """First slot written (one slice for all rows), or [B] one slot for each row of a ring."""
    gather: jax.Array | None
    """Ring and several tokens: [B, S] which of (old keys, new keys) stay."""
    keep: jax.Array | None
    """Ring and one token: [B] rows that write."""


class Cache(struct.PyTreeNode):
    """State of a decoder between calls; every leaf has the batch first."""

    layers: tuple[KeyValue | LinearState, ...]
    slots: tuple[Slots, ...]
    lengths: jax.Array
    """[B] real tokens so far: the position of the next one."""
    cross: tuple[KeyValue, ...] | None = None
    source_mask: jax.Array | None = None


def _layer_slots(config: ModelConfig, layer: int, max_length: int) -> int:
    """Slots that a decoder's self-attention layer needs: its window, or the whole length (0: linear, no slots)."""
    pattern = config.pattern_of(layer)
    if pattern.kind == "linear":
        return 0
    return min(pattern.window, max_length) if pattern.kind == "window" else max_length


def _empty_key_value(config: ModelConfig, batch: int, size: int, dtype: Any, group: int) -> KeyValue:
    """Zeros for one layer; int8 with scales."""
    heads = config.num_kv_heads or config.num_heads
    scale = jnp.zeros((batch, heads, size, 1), jnp.float32) if dtype == jnp.int8 else None
    return KeyValue(jnp.zeros((batch, heads, size, config.resolved_head_dim), dtype),
                    jnp.zeros((batch, heads, size, config.resolved_value_dim), dtype), scale, scale, group)


def _empty_linear_state(config: ModelConfig, batch: int) -> LinearState:
    heads, width = config.num_kv_heads or config.num_heads, config.resolved_head_dim
    return init_linear_state(batch, heads, width, config.resolved_value_dim)


def init_cache(config: ModelConfig, batch_size: int, max_length: int, *, dtype: Any = None) -> Cache:
    """An empty cache for `max_length` tokens of each row (prompt included).

    Args:
        config: of a model with a decoder.
        batch_size: rows B.
        max_length: most tokens of a row, padding of the prompt included.
        dtype: of stored keys and values: None takes `config.dtype`; int8 stores one scale for each vector.

    Raises:
        ValueError: the learned position table or the bigbird pattern is shorter than max_length.

    Example:
        >>> from tfm.config import ModelConfig
        >>> config = ModelConfig(vocab_size=8, d_model=4, num_heads=2, encoder_layers=0, decoder_layers=1)
        >>> init_cache(config, batch_size=3, max_length=5).layers[0].key.shape
        (3, 2, 5, 2)
    """
    require(config.position != "learned" or max_length <= config.max_positions, "max_length", max_length,
            f"the learned position table has model.max_positions={config.max_positions} rows")
    bigbird = any(pattern.kind == "bigbird" for pattern in config.attention_pattern)
    require(not bigbird or max_length <= config.max_positions, "max_length", max_length,
            f"the bigbird pattern has model.max_positions={config.max_positions} positions")
    return empty_cache(config, batch_size, max_length, dtype=dtype)


def empty_cache(config: ModelConfig, batch_size: int, slots: int, *, dtype: Any = None) -> Cache:
    """`init_cache` for a caller who knows that padding, which takes slots, makes the rows longer than their tokens."""
    config = config.for_decoder()
    dtype = jnp.dtype(dtype or config.dtype)
    layers: list[KeyValue | LinearState] = []
    groups: list[tuple[int, bool]] = []
    for layer in range(config.decoder_layers):
        size = _layer_slots(config, layer, slots)
        if not size:
            layers.append(_empty_linear_state(config, batch_size))
            continue
        kind = (size, size < slots)
        if kind not in groups:
            groups.append(kind)
        layers.append(_empty_key_value(config, batch_size, size, dtype, groups.index(kind)))
    kinds = tuple(_empty_slots(batch_size, size, ring) for size, ring in groups)
    return Cache(tuple(layers), kinds, jnp.zeros((batch_size,), jnp.int32))


def _empty_slots(batch: int, size: int, ring: bool) -> Slots:
    return Slots(jnp.zeros((batch, size), jnp.int32), jnp.zeros((batch, size), bool), jnp.zeros((batch,), jnp.int32),
                 ring)


def cache_bytes(config: ModelConfig, batch_size: int, max_length: int, *, dtype: Any = None) -> int:
    """Size of `init_cache` with the same arguments, in bytes, without making it (cross-attention not counted)."""
    shapes = jax.eval_shape(lambda: init_cache(config, batch_size, max_length, dtype=dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def plan(slots: Slots, positions: jax.Array, valid: jax.Array) -> tuple[Slots, Plan]:
    """Place T new tokens of each row.

    Args:
        slots: before the call.
        positions: [B, T] int positions of the new tokens.
        valid: [B, T] bool, False for padding.

    Returns:
        The slots after the call, and the plan for `store`.
    """
    if not slots.ring:
        start = slots.used[0]
        after = Slots(_write(slots.positions, positions, start), _write(slots.valid, valid, start),
                      slots.used + positions.shape[1], ring=False)
        return after, Plan(after.positions, after.valid, start, None, None)
    if positions.shape[1] == 1:
        return _plan_ring_step(slots, positions, valid)
    return _plan_ring_chunk(slots, positions, valid)


def rewind(cache: Cache, tokens: jax.Array) -> Cache:
    """The cache as it was before its last `tokens` tokens (int scalar), all of them real: for speculative decoding.

    Raises:
        ValueError: a layer keeps a ring or a sum of the past, where what was overwritten cannot come back.
    """
    if any(slots.ring for slots in cache.slots) or any(isinstance(layer, LinearState) for layer in cache.layers):
        raise ValueError("speculative decoding needs layers of full attention: a window or linear attention cannot "
                         "take tokens back")

    def back(slots: Slots) -> Slots:
        used = slots.used - tokens
        return slots.replace(used=used, valid=slots.valid & (jnp.arange(slots.valid.shape[1]) < used[:, None]))

    return cache.replace(slots=tuple(map(back, cache.slots)), lengths=cache.lengths - tokens)


def _write(stored: jax.Array, new: jax.Array, start: jax.Array, axis: int = 1) -> jax.Array:
    """stored [B, S, ...] with new [B, T, ...] at slots start, start + 1, ...; or with the slots on another axis."""
    return jax.lax.dynamic_update_slice_in_dim(stored, new.astype(stored.dtype), start, axis=axis)


def _plan_ring_step(slots: Slots, positions: jax.Array, valid: jax.Array) -> tuple[Slots, Plan]:
    """One token overwrites the oldest of its row, which has just left the window; padding overwrites nothing."""
    size = slots.valid.shape[1]
    start, keep = slots.used % size, valid[:, 0]
    after = Slots(_write_rows(slots.positions, positions, start, keep), _write_rows(slots.valid, valid, start, keep),
                  slots.used + keep, ring=True)
    return after, Plan(after.positions, after.valid, start, None, keep)


def _write_rows(stored: jax.Array, new: jax.Array, start: jax.Array, keep: jax.Array, axis: int = 1) -> jax.Array:
    """stored [B, S, ...] with new [B, 1, ...] at slot start[b] of the rows that keep[b] marks; axis as in `_write`."""
    rows = jnp.arange(stored.shape[0])
    slot = jnp.where(keep, start, stored.shape[axis])
    place = (rows, slot) if axis == 1 else (rows, slice(None), slot)
    return stored.at[place].set(new.take(0, axis=axis).astype(stored.dtype), mode="drop")


def _plan_ring_chunk(slots: Slots, positions: jax.Array, valid: jax.Array) -> tuple[Slots, Plan]:
    """Several tokens see the old keys and each other; the newest real ones stay, oldest first."""
    size = slots.valid.shape[1]
    all_positions = jnp.concatenate([slots.positions, positions], axis=1)
    all_valid = jnp.concatenate([slots.valid, valid], axis=1)
    order = jnp.argsort(jnp.where(all_valid, all_positions, -1), axis=1, stable=True)[:, -size:]
    after = Slots(jnp.take_along_axis(all_positions, order, 1), jnp.take_along_axis(all_valid, order, 1),
                  jnp.zeros_like(slots.used), ring=True)
    return after, Plan(all_positions, all_valid, None, order, None)


def store(layer: KeyValue, key: jax.Array, value: jax.Array, plan: Plan) -> tuple[KeyValue, jax.Array, jax.Array]:
    """Write one layer's new keys and values, and give back those that the new queries attend to.

    Args:
        layer: the layer's stored keys and values.
        key: [B, T, K, D], already rotated.
        value: [B, T, K, Dv].
        plan: from `plan`.

    Returns:
        The layer after the call, keys [B, S', K, D] and values [B, S', K, Dv] in the type of `key`.
    """
    dtype, key, value = key.dtype, key.swapaxes(1, 2), value.swapaxes(1, 2)
    new = quantize(key, value) if layer.key.dtype == jnp.int8 else KeyValue(key, value)
    new = new.replace(group=layer.group)
    start, gather = plan.start, plan.gather
    if gather is not None:
        seen = jax.tree.map(lambda old, add: jnp.concatenate([old, add.astype(old.dtype)], axis=2), layer, new)
        after = jax.tree.map(lambda x: jnp.take_along_axis(x, gather[:, None, :, None], axis=2), seen)
    else:
        assert start is not None
        keep = plan.keep
        if keep is not None:
            after = jax.tree.map(lambda old, add: _write_rows(old, add, start, keep, axis=2), layer, new)
        else:
            after = jax.tree.map(lambda old, add: _write(old, add, start, axis=2), layer, new)
        seen = after
    key, value = dequantize(seen, dtype)
    return after, key.swapaxes(1, 2), value.swapaxes(1, 2)


def quantize(key: jax.Array, value: jax.Array) -> KeyValue:
    """int8 with one scale for each vector, symmetric: x ~ scale * round(x / scale), scale = max |x| / 127."""

    def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True) / 127.0
        return jnp.round(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8), scale

    (key, key_scale), (value, value_scale) = one(key), one(value)
    return KeyValue(key, value, key_scale, value_scale)


def dequantize(stored: KeyValue, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values in the type asked for."""
    if stored.key_scale is None or stored.value_scale is None:
        return stored.key.astype(dtype), stored.value.astype(dtype)
    return (stored.key * stored.key_scale).astype(dtype), (stored.value * stored.value_scale).astype(dtype)
