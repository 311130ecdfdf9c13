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

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from tfm.config import ModelConfig, require
from tfm.ops.linear import LinearState, init_linear_state


class KeyValue(struct.PyTreeNode):
    """Keys [B, K, D, S] and values [B, K, S, Dv]; int8 ones have float32 scales for each vector, [B, K, 1, S] and
    [B, K, S, 1].

    So stored, both products of a step (query with keys, weights with values) read the cache as it lies: in the order of
    the attention functions, [B, S, K, D], every step would first transpose all of it.
    """

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    group: int = struct.field(pytree_node=False, default=0)
    """Index into `Cache.slots`."""

    def by_token(self) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, K, D] and values [B, S, K, Dv], as the attention functions take them."""
        return self.key.transpose(0, 3, 1, 2), self.value.swapaxes(1, 2)


def by_head(key: jax.Array, value: jax.Array) -> KeyValue:
    """Keys [B, S, K, D] and values [B, S, K, Dv] as they are stored."""
    return KeyValue(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2))


class Slots(struct.PyTreeNode):
    """Position [B, S] and reality [B, S] of the stored keys, and the number of slots written so far [B].

    Where a row holds n hypotheses, each call brings the next token of each, and `paths` [B, n, S] says which slots
    belong to which hypothesis.
    """

    positions: jax.Array
    valid: jax.Array
    used: jax.Array
    ring: bool = struct.field(pytree_node=False, default=False)
    paths: jax.Array | None = None


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
    paths: jax.Array | None = None
    """[B, T, S'] slots of the hypothesis that each query goes on with."""


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
    narrow = dtype == jnp.int8
    return KeyValue(jnp.zeros((batch, heads, config.resolved_head_dim, size), dtype),
                    jnp.zeros((batch, heads, size, config.resolved_value_dim), dtype),
                    jnp.zeros((batch, heads, 1, size), jnp.float32) if narrow else None,
                    jnp.zeros((batch, heads, size, 1), jnp.float32) if narrow else None, group)


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
        >>> init_cache(config, batch_size=3, max_length=5).layers[0].value.shape
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
    """Place T new tokens of each row, which where there are `paths` are the next ones of its T hypotheses.

    Args:
        slots: before the call.
        positions: [B, T] int positions of the new tokens.
        valid: [B, T] bool, False for padding.

    Returns:
        The slots after the call, and the plan for `store`.
    """
    if not slots.ring:
        start, tokens = slots.used[0], positions.shape[1]
        paths = slots.paths
        if paths is not None:
            paths = paths | (jnp.arange(paths.shape[2]) == start + jnp.arange(tokens)[:, None])
        after = Slots(_write(slots.positions, positions, start), _write(slots.valid, valid, start),
                      slots.used + tokens, ring=False, paths=paths)
        return after, Plan(after.positions, after.valid, start, None, None, paths)
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


def alone(cache: Cache) -> Cache:
    """The cache of one row with keys and values that leave the batch axis off, for a loop that moves no rows.

    XLA drops an axis of size 1 from a product, and keeps a second copy of what it writes in the other shape.
    """
    if len(cache.lengths) > 1 or any(slots.ring for slots in cache.slots):
        return cache
    layers = tuple(jax.tree.map(lambda x: x[0], x) if isinstance(x, KeyValue) else x for x in cache.layers)
    return cache.replace(layers=layers)


def widen(cache: Cache, slots: int) -> Cache:
    """The cache with so many more empty slots at the end of each layer that has slots, none of them a ring."""

    def pad(axis: int, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, slots if i == axis % x.ndim else 0) for i in range(x.ndim)])

    layers = tuple(_along_slots(pad, x) if isinstance(x, KeyValue) else x for x in cache.layers)
    return cache.replace(layers=layers, slots=tuple(
        x.replace(positions=pad(1, x.positions), valid=pad(1, x.valid), paths=None if x.paths is None else
                  pad(2, x.paths)) for x in cache.slots))


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
    by_slot = jnp.moveaxis(stored, axis, 1).at[rows, slot].set(new.take(0, axis=axis).astype(stored.dtype), mode="drop")
    return jnp.moveaxis(by_slot, 1, axis)


def _plan_ring_chunk(slots: Slots, positions: jax.Array, valid: jax.Array) -> tuple[Slots, Plan]:
    """Several tokens see the old keys and each other; the newest real ones stay, oldest first."""
    size = slots.valid.shape[1]
    all_positions = jnp.concatenate([slots.positions, positions], axis=1)
    all_valid = jnp.concatenate([slots.valid, valid], axis=1)
    order = jnp.argsort(jnp.where(all_valid, all_positions, -1), axis=1, stable=True)[:, -size:]
    after = Slots(jnp.take_along_axis(all_positions, order, 1), jnp.take_along_axis(all_valid, order, 1),
                  jnp.zeros_like(slots.used), ring=True)
    return after, Plan(all_positions, all_valid, None, order, None)


def store(layer: KeyValue, key: jax.Array, value: jax.Array, plan: Plan) -> tuple[KeyValue, KeyValue]:
    """Write one layer's new keys and values, and give back those that the new queries attend to.

    Args:
        layer: the layer's stored keys and values; those of a single row may come without the batch axis.
        key: [B, T, K, D], already rotated.
        value: [B, T, K, Dv].
        plan: from `plan`.

    Returns:
        The layer after the call, and keys and values in the type of `key` for `Plan.positions`.
    """
    new = by_head(key, value)
    new = (quantize(new) if layer.key.dtype == jnp.int8 else new).replace(group=layer.group)
    unbatched = layer.key.ndim == 3
    if unbatched:
        new = jax.tree.map(lambda x: x[0], new)
    start, gather, keep = plan.start, plan.gather, plan.keep
    if gather is not None:
        seen = _along_slots(lambda axis, old, add: jnp.concatenate([old, add.astype(old.dtype)], axis), layer, new)
        after = _along_slots(lambda axis, x: _pick(x, gather, axis), seen)
    else:
        assert start is not None
        if keep is not None:
            after = _along_slots(lambda axis, old, add: _write_rows(old, add, start, keep, axis), layer, new)
        else:
            after = _along_slots(lambda axis, old, add: _write(old, add, start, axis), layer, new)
        seen = after
    return after, dequantize(jax.tree.map(lambda x: x[None], seen) if unbatched else seen, key.dtype)


def _along_slots(change: Callable[..., jax.Array], *layers: KeyValue) -> KeyValue:
    """change(axis of the slots, leaf of each layer) for every leaf."""

    def one(axis: int, *leaves: jax.Array | None) -> Any:
        return None if leaves[0] is None else change(axis, *leaves)

    return KeyValue(one(-1, *(x.key for x in layers)), one(-2, *(x.value for x in layers)),
                    one(-1, *(x.key_scale for x in layers)), one(-2, *(x.value_scale for x in layers)), layers[0].group)


def _pick(x: jax.Array, slots: jax.Array, axis: int) -> jax.Array:
    """x with the slots [B, S] of each row."""
    return jnp.take_along_axis(x, slots[:, None, None] if axis == -1 else slots[:, None, :, None], axis)


def quantize(stored: KeyValue) -> KeyValue:
    """int8 with one scale for each vector, symmetric: x ~ scale * round(x / scale), scale = max |x| / 127."""

    def one(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis, keepdims=True) / 127.0
        return jnp.round(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8), scale

    (key, key_scale), (value, value_scale) = one(stored.key, 2), one(stored.value, 3)
    return KeyValue(key, value, key_scale, value_scale, stored.group)


def dequantize(stored: KeyValue, dtype: Any) -> KeyValue:
    """Keys and values in the type asked for."""
    key, value = stored.key, stored.value
    if stored.key_scale is not None and stored.value_scale is not None:
        key, value = key * stored.key_scale, value * stored.value_scale
    return KeyValue(key.astype(dtype), value.astype(dtype), group=stored.group)
