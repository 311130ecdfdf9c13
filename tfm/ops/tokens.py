"""Tokens of one side of the score matrix, alone and in blocks: what mask and bias rules are functions of."""

import dataclasses
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # a NumPy or a JAX array


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One side of a block: the tokens' positions, and where they stand in the arrays of the whole.

    Args:
      positions: [B|1, n] int32.
      index: [n] int32, places along the side; None for all in order.
      batch: [b] int32, rows of the batch; None for all.
      heads: [h] int32, query heads; None for all.
      run: positions are known to come in runs of this many consecutive ones, the same for all rows of the batch.
    """

    positions: Array
    index: Array | None = None
    batch: Array | None = None
    heads: Array | None = None
    run: int | None = None

    def along(self, x: Array, axis: int) -> Array:
        """The entries of these tokens along an axis; an axis of length 1 serves all."""
        return _pick(x, self.index, axis)

    def rows(self, x: Array, axis: int = 0) -> Array:
        """The entries of these rows of the batch."""
        return _pick(x, self.batch, axis)

    def per_head(self, x: Array, axis: int) -> Array:
        """The entries of these heads."""
        return _pick(x, self.heads, axis)


def _pick(x: Array, index: Array | None, axis: int) -> Array:
    if index is None or x.shape[axis] == 1:
        return x
    return jnp.take(x, index, axis=axis, mode="clip")


@dataclasses.dataclass(frozen=True)
class Spans:
    """One side cut into blocks: the tokens' positions [B|1, n, size] and places [n * size] (None: in order).

    The last block is filled with the last token.
    """

    positions: Array
    index: Array | None = None

    @property
    def size(self) -> int:
        return self.positions.shape[-1]

    @cached_property
    def low(self) -> Array:
        return self.positions.min(-1)

    @cached_property
    def high(self) -> Array:
        return self.positions.max(-1)

    def reduce(self, x: Array, axis: int, how: str) -> Array:
        """Minimum or maximum of x over each block of an axis of the whole side."""
        if x.shape[axis] == 1:
            return x
        if self.index is not None:
            xp = array_module(x, self.index)
            x = xp.take(x, xp.clip(self.index, 0, x.shape[axis] - 1), axis=axis)
        blocked = _cut(x, axis, self.size)
        return getattr(blocked, how)(axis + 1)


def _cut(x: Array, axis: int, size: int) -> Array:
    """Cuts an axis into (blocks, size), repeating the last entry to fill the last block."""
    length = x.shape[axis]
    short = -length % size
    if short:
        pad = [(0, short if i == axis else 0) for i in range(x.ndim)]
        x = array_module(x).pad(x, pad, mode="edge")
    return x.reshape(*x.shape[:axis], (length + short) // size, size, *x.shape[axis + 1 :])


def array_module(*arrays: Array) -> Any:
    """NumPy where all arrays are NumPy's, so that the result is known while tracing; else jax.numpy."""
    return np if all(isinstance(x, (np.ndarray, np.generic, int, bool)) for x in arrays) else jnp


def count_up(length: int) -> Array:
    """0 .. length - 1 as int32: known while tracing, unless the length is symbolic, as `jax.export` may have it."""
    return (np if isinstance(length, int) else jnp).arange(length, dtype=np.int32)


def known(x: Array) -> np.ndarray | None:
    """The values of an array that is not traced, else None."""
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def as_batch(positions: Array, name: str) -> Array:
    """Positions as [B|1, length], in a type that holds their differences too."""
    positions = positions if hasattr(positions, "ndim") else np.asarray(positions)
    if positions.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {positions.shape}; it must be [length] or [batch, length]")
    positions = positions.astype(np.int32) if jnp.issubdtype(positions.dtype, jnp.unsignedinteger) else positions
    return positions[None] if positions.ndim == 1 else positions


def spans(tokens: Tokens, size: int) -> Spans:
    """Cuts the tokens of one side into blocks of `size`."""
    index = None if tokens.index is None else _cut(tokens.index, 0, size).reshape(-1)
    return Spans(_cut(tokens.positions, 1, size), index)


Class = TypeVar("Class", bound=type)


def register_rule(cls: Class) -> Class:
    """Makes the dataclass of a rule or a bias a pytree; fields with metadata {"static": True} are fixed under `jit`.

    Example:
        >>> @register_rule
        ... @dataclasses.dataclass(frozen=True)
        ... class Every:
        ...     step: int = dataclasses.field(metadata={"static": True})
        >>> jax.tree.map(lambda x: x, Every(3))
        Every(step=3)
    """
    fields = dataclasses.fields(cls)
    static = [f.name for f in fields if f.metadata.get("static")]
    jax.tree_util.register_dataclass(cls, [f.name for f in fields if f.name not in static], static)
    return cls


def check_registered(rule: Any, kind: type) -> None:
    """Refuses a rule or a bias (the `kind`) that is no pytree, or has such a part: `jit` could not look into it."""
    for part in jax.tree.leaves(rule):
        if isinstance(part, kind):
            raise ValueError(f"{type(part).__name__} is no pytree: decorate its dataclass with tfm.masks.register_rule")


def pair_up(query: Array, key: Array) -> tuple[Array, Array]:
    """[B, n] and [B, m] as [B, 1, n, 1] and [B, 1, 1, m]."""
    return query[:, None, :, None], key[:, None, None, :]


def vary_alike(tree: Any, *others: Any) -> Any:
    """Inside `shard_map`: marks arrays as varying over every mesh axis that one of them, or of the others, varies over.

    Loops want it of what they carry; outside `shard_map` nothing changes.
    """
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves((tree, others))))

    def vary(x: Array) -> Array:
        new = tuple(axes - varying_axes(x))
        return jax.lax.pcast(x, new, to="varying") if new else x

    return jax.tree.map(vary, tree)


def varying_axes(x: Array) -> frozenset:
    """Axes of the mesh over which an array varies; none outside `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying
