"""Tables of tensors, read both ways: which foreign tensor holds which of our parameters, and in what layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # np.ndarray, or a jax.Array on the way out


@dataclass(frozen=True)
class Layout:
    """How one foreign tensor holds one or more parameters: `split` takes it apart, `join` is its inverse."""

    split: Callable[[Array], Sequence[Array]]
    join: Callable[[Sequence[Array]], Array]


@dataclass(frozen=True)
class Entry:
    """A foreign tensor and the parameters in it, by their paths such as `encoder/layers_0/feed_forward/up/kernel`."""

    name: str
    paths: tuple[str, ...]
    layout: Layout


def _only_row(x: Array) -> list[Array]:
    if x.ndim != 2 or len(x) != 1:
        raise ValueError(f"it has shape {tuple(x.shape)}, but one row is needed")
    return [x[0]]


SAME = Layout(lambda x: [x], lambda parts: parts[0])
TRANSPOSED = Layout(lambda x: [x.T], lambda parts: parts[0].T)
ROW = Layout(_only_row, lambda parts: parts[0][None])


def columns(*widths: int) -> Layout:
    """Several parameters side by side along the last axis (GPT-2's queries, keys and values)."""
    ends = np.cumsum(widths)

    def split(x: Array) -> list[Array]:
        if x.shape[-1] != ends[-1]:
            raise ValueError(f"it has shape {tuple(x.shape)}, but {ends[-1]} columns are needed")
        return [x[..., end - width:end] for width, end in zip(widths, ends, strict=True)]

    return Layout(split, lambda parts: np.concatenate([np.asarray(part) for part in parts], axis=-1))


def heads_of_three(num_heads: int) -> Layout:
    """Rows [H, 3, D] of queries, keys and values, interleaved by head (GPT-NeoX), as three parameters [in, H * D]."""

    def split(x: Array) -> list[Array]:
        by_head = x.reshape(num_heads, 3, -1, *x.shape[1:])
        return [by_head[:, i].reshape(-1, *x.shape[1:]).T for i in range(3)]

    def join(parts: Sequence[Array]) -> Array:
        rows = [np.asarray(part).T for part in parts]
        by_head = np.stack([row.reshape(num_heads, -1, *row.shape[1:]) for row in rows], axis=1)
        return by_head.reshape(-1, *by_head.shape[3:])

    return Layout(split, join)


def dense(name: str, path: str, *, bias: bool = True, layout: Layout = TRANSPOSED) -> list[Entry]:
    """A linear layer: `name.weight` [out, in] and `name.bias`."""
    entries = [Entry(f"{name}.weight", (f"{path}/kernel",), layout)]
    return [*entries, Entry(f"{name}.bias", (f"{path}/bias",), SAME)] if bias else entries


def norm(name: str, path: str, *, bias: bool = True) -> list[Entry]:
    """A norm: `name.weight` and, for a LayerNorm, `name.bias`."""
    entries = [Entry(f"{name}.weight", (f"{path}/scale",), SAME)]
    return [*entries, Entry(f"{name}.bias", (f"{path}/bias",), SAME)] if bias else entries


def embedding(name: str, path: str) -> list[Entry]:
    """An embedding: `name.weight` [rows, width]."""
    return [Entry(f"{name}.weight", (f"{path}/table",), SAME)]
