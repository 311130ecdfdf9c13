"""Position schemes as a config names them: vectors on the embeddings, rotations of heads, biases on scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from tfm.config import ModelConfig, RotaryScaling
from tfm.ops.positions import rotary
from tfm.ops.tokens import count_up


@dataclass(frozen=True)
class Rotary:
    """RoPE with a config's settings: a function of (heads [B, T, H, D], positions [T] or [B, T])."""

    base: float = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    dim: int | None = None
    scaling: RotaryScaling | None = None

    def __call__(self, x: jax.Array, positions: Any) -> jax.Array:
        if positions is None:
            positions = count_up(x.shape[1])
        return rotary(x, positions, base=self.base, layout=self.layout, scaling=cast(Any, self.scaling),
                      rotary_dim=self.dim)


def rotary_from(config: ModelConfig) -> Rotary | None:
    """The rotation that a config asks for, None where it asks for none."""
    if config.position != "rotary":
        return None
    return Rotary(config.position_base, config.rotary_layout, config.rotary_dim, config.rotary_scaling)


def default_positions(length: int, *, mask: jax.Array | None = None, segments: jax.Array | None = None,
                      past: jax.Array | None = None) -> Any:
    """Positions of a call that gives none.

    They count real tokens, so that padding on either side changes nothing, and start anew in each segment.

    Args:
        length: T.
        mask: [B, T] bool, True for real tokens.
        segments: [B, T] int of packed rows.
        past: [B] number of real tokens in the cache.

    Returns:
        [T] NumPy array, or [B, T] int32.

    Example:
        >>> default_positions(3, mask=jnp.array([[False, True, True]])).tolist()
        [[0, 0, 1]]
        >>> default_positions(4, segments=jnp.array([[1, 1, 2, 2]])).tolist()
        [[0, 1, 0, 1]]
    """
    index = count_up(length)
    if segments is not None:
        starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
        return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    if mask is None:
        return index if past is None else past[:, None] + index
    counted = jnp.maximum(jnp.cumsum(mask.astype(jnp.int32), axis=1) - 1, 0)
    return counted if past is None else past[:, None] + counted
