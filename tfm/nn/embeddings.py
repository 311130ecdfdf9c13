"""Embedding tables: tokens, learned positions, token types."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from tfm.nn.projection import Initializer, scale_of
from tfm.ops.narrow import is_narrowed, narrow_projection
from tfm.parallel.rules import constrain

NAN_BITS = 0x7FC0
"""A bfloat16 NaN."""


class Embedding(nn.Module):
    """A table of vectors: parameter `table` [rows, features].

    An id outside the table gives NaN, never a neighbouring row.
    """

    rows: int
    features: int
    table_init: Initializer = nn.initializers.normal(0.02)
    dtype: str = "float32"
    param_dtype: str = "float32"

    def setup(self) -> None:
        self.table = self.param("table", self.table_init, (self.rows, self.features), jnp.dtype(self.param_dtype))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids: [...] int -> [..., features]."""
        table, dtype, scale = constrain(self.table, ("V", "M")), jnp.dtype(self.dtype), scale_of(self)
        if scale is None:
            return _rows(table, ids).astype(dtype)
        scales = jnp.take(scale, ids, axis=0, mode="fill", fill_value=jnp.nan)
        return (jnp.take(table, ids, axis=0, mode="clip") * scales[..., None]).astype(dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits of x against each row in float32: x: [..., features] -> [..., rows]."""
        if is_narrowed(self.table, self.param_dtype):
            return narrow_projection(x, self.table.T, scale=scale_of(self))
        dtype = jnp.dtype(self.dtype)
        return jnp.einsum("...M,VM->...V", x.astype(dtype), self.table.astype(dtype),
                          preferred_element_type=jnp.float32)


def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table [N, M] for ids [...], NaN for an id outside."""
    if table.dtype == jnp.bfloat16:
        return _bfloat16_rows(table, ids)
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)


@jax.custom_jvp
def _bfloat16_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows as bits: XLA's CPU backend would first make a float32 copy of a whole table of bfloat16 numbers."""
    bits = lax.bitcast_convert_type(table, jnp.uint16)
    rows = jnp.take(bits, ids, axis=0, mode="fill", fill_value=NAN_BITS)
    return lax.bitcast_convert_type(rows, jnp.bfloat16)


@_bfloat16_rows.defjvp
def _bfloat16_rows_jvp(primals: tuple[jax.Array, jax.Array], tangents: tuple) -> tuple[jax.Array, jax.Array]:
    tangent = jnp.take(tangents[0], primals[1], axis=0, mode="fill", fill_value=0)
    return _bfloat16_rows(*primals), tangent


class LearnedPositions(nn.Module):
    """A vector for each position (Gehring et al., 2017): parameter `table` [max_positions + offset, features]."""

    max_positions: int
    features: int
    offset: int = 0
    table_init: Initializer = nn.initializers.normal(0.02)
    dtype: str = "float32"
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, positions: jax.Array | np.ndarray) -> jax.Array:
        """positions: [...] int -> [..., features].

        Raises:
            ValueError: a position lies past the table; a traced one, which cannot be checked, gives NaN instead.
        """
        known = not isinstance(positions, jax.core.Tracer) and positions.size
        length = int(np.max(np.asarray(positions))) + 1 if known else 0
        if length > self.max_positions:
            raise ValueError(f"a sequence of {length} positions does not fit model.max_positions={self.max_positions}: "
                             "shorten the input or train with a longer table")
        rows = self.param("table", self.table_init, (self.max_positions + self.offset, self.features),
                          jnp.dtype(self.param_dtype))
        return jnp.take(rows, positions + self.offset, axis=0, mode="fill",
                        fill_value=jnp.nan).astype(jnp.dtype(self.dtype))
