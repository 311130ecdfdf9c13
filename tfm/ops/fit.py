"""Whether the arrays of masks, biases and relative vectors have the shapes that an attention asks of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.dense import Scoring
from tfm.ops.order import parts
from tfm.ops.positions import MatrixBias


def check_fit(scoring: Scoring, query: jax.Array, key_length: int, value_width: int) -> None:
    """Refuses arrays that do not fit: blocks of them could be taken all the same, but wrong ones.

    Args:
      query: [B, T, H, D].

    Raises:
      ValueError: naming the array, its shape and what would fit.
    """
    sizes = dict(zip("BTHDSE", (*query.shape, key_length, value_width), strict=True))
    if scoring.relative is not None:
        sizes["R"] = len(scoring.relative.key_table)
        if sizes["R"] % 2 == 0:
            raise ValueError(f"Shaw.key_table has {sizes['R']} rows; they must be an odd number, 2R + 1")
    if isinstance(scoring.bias, MatrixBias) and jnp.issubdtype(jnp.result_type(scoring.bias.bias), jnp.bool_):
        raise ValueError("bias has dtype bool; it must be float (who may attend is said by `mask`)")
    for part in (*parts(scoring.rule), scoring.bias, scoring.relative):
        for field, axes in ({} if part is None else part.axes).items():
            _check_shape(f"{type(part).__name__}.{field}", getattr(part, field), axes, sizes)


def _check_shape(name: str, x: Any, axes: str, sizes: dict[str, int]) -> None:
    if isinstance(x, list):
        raise ValueError(f"{name} is a list; it must be an array")
    shape = () if x is None else np.shape(x)
    letters = axes[max(len(axes) - len(shape), 0) :]
    fits = (n in (1, sizes.get(letter, n)) for n, letter in zip(shape, letters, strict=False))
    if len(shape) > len(axes) or not all(fits):
        wanted = ", ".join(f"{letter} = {sizes[letter]}" if letter in sizes else letter for letter in axes)
        raise ValueError(f"{name} has shape {shape}; it must be broadcastable to [{wanted}]")
