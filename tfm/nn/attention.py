"""Multi-head attention in its three uses: self, cross, and cached. Project, position, attend, project."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import AttentionPattern, ModelConfig
from tfm.nn.cache import KeyValue, Plan, by_head, store
from tfm.nn.norms import Normalize
from tfm.nn.positions import Rotary, rotary_from
from tfm.nn.projection import Initializer, Lora, Projection, kernel_initializer, lora_from
from tfm.nn.sharded import attend_on_mesh
from tfm.ops.attention import Implementation, attention
from tfm.ops.cached import FEW, cached_attention
from tfm.ops.linear import LinearState, linear_attention, linear_attention_step
from tfm.ops.narrow import is_narrowed, narrow_projection
from tfm.ops.positions import Shaw
from tfm.ops.projection import projection


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_H) W_O with head_i = attention(x W_Q, y W_K, y W_V); y is x or the encoder's output.

    Submodules `query`, `key`, `value`, `output`, with `query_norm` and `key_norm` where heads are normalised, and the
    parameters `relative_keys`, `relative_values` [2 * shaw_distance + 1, D] of Shaw et al. (2018).

    Args:
        features: M, the width of the result.
        num_heads, num_kv_heads: H query heads and K key heads, H % K == 0.
        head_dim, value_dim: D of queries and keys, Dv of values.
        use_bias, output_bias: whether the first three projections, and the last, add a bias.
        scale, softcap: of the scores; see `tfm.ops.attention`.
        qk_norm_epsilon: of the norm over each head of queries and keys; None: no norm.
        rotary: turns queries and keys by their positions.
        shaw_distance: farthest distance with vectors of its own; None: no such vectors.
        linear, causal: linear attention, and whether that is causal; softmax attention takes a `mask` in the call.
        dropout_rate: of the weights, where the call is not deterministic.
        dtype, param_dtype: of the products, and of the parameters.
        implementation: see `tfm.ops.attention`.
        lora: adapters of the projections.

    Reference: Vaswani et al. (2017), section 3.2.2; grouped heads: Ainslie et al. (2023).
    """

    features: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    use_bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    softcap: float | None = None
    qk_norm_epsilon: float | None = None
    rotary: Rotary | None = None
    shaw_distance: int | None = None
    linear: bool = False
    causal: bool = False
    dropout_rate: float = 0.0
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    dtype: str = "float32"
    param_dtype: str = "float32"
    implementation: Implementation = "auto"
    lora: Lora | None = None

    def setup(self) -> None:
        dense = partial(Projection, kernel_init=self.kernel_init, dtype=self.dtype, param_dtype=self.param_dtype,
                        lora=self.lora)
        self.query = dense(self.num_heads * self.head_dim, self.use_bias)
        self.key = dense(self.num_kv_heads * self.head_dim, self.use_bias)
        self.value = dense(self.num_kv_heads * self.value_dim, self.use_bias)
        self.output = dense(self.features, self.output_bias)
        if self.qk_norm_epsilon is not None:
            self.query_norm = Normalize("rms", self.qk_norm_epsilon, param_dtype=self.param_dtype)
            self.key_norm = Normalize("rms", self.qk_norm_epsilon, param_dtype=self.param_dtype)
        if self.shaw_distance is not None:
            rows, init = 2 * self.shaw_distance + 1, nn.initializers.xavier_uniform()
            dtype = jnp.dtype(self.param_dtype)
            self.relative_keys = self.param("relative_keys", init, (rows, self.head_dim), dtype)
            self.relative_values = self.param("relative_values", init, (rows, self.value_dim), dtype)

    def project_memory(self, memory: jax.Array) -> KeyValue:
        """Keys and values of memory [B, S, M] as a cache stores them."""
        return by_head(*self._keys(self.key(memory), self.value(memory), None))

    def _query(self, projected: jax.Array, positions: Any) -> jax.Array:
        """[B, T, H * D] -> [B, T, H, D], normalised and rotated to the positions."""
        query = projected.reshape(*projected.shape[:2], self.num_heads, self.head_dim)
        if self.qk_norm_epsilon is not None:
            query = self.query_norm(query)
        return query if self.rotary is None else self.rotary(query, positions)

    def _keys(self, key: jax.Array, value: jax.Array, positions: Any) -> tuple[jax.Array, jax.Array]:
        """[B, S, K * D] and [B, S, K * Dv] -> [B, S, K, D], normalised and rotated, and [B, S, K, Dv]."""
        key = key.reshape(*key.shape[:2], self.num_kv_heads, self.head_dim)
        value = value.reshape(*value.shape[:2], self.num_kv_heads, self.value_dim)
        if self.qk_norm_epsilon is not None:
            key = self.key_norm(key)
        return key if self.rotary is None else self.rotary(key, positions), value

    def _project(self, x: jax.Array) -> list[jax.Array]:
        """Query, key and value of x [B, T, M]; in one product where a decoding has brought the fused matrix."""
        if not self.has_variable("decoding", "fused"):
            return [self.query(x), self.key(x), self.value(x)]
        fused: Any = self.get_variable("decoding", "fused")
        kernel, bias, dtype = fused["kernel"], fused.get("bias"), jnp.dtype(self.dtype)
        if is_narrowed(kernel, self.param_dtype):
            y = narrow_projection(x, kernel, bias, scale=fused.get("scale"), dtype=dtype)
        else:
            y = projection(x, kernel, bias, dtype=dtype)
        width = self.num_heads * self.head_dim
        return jnp.split(y, (width, width + self.num_kv_heads * self.head_dim), axis=-1)

    def __call__(self, x: jax.Array, memory: KeyValue | None = None, *, positions: Any = None,
                 key_positions: Any = None, mask: Any = None, bias: Any = None, key_mask: jax.Array | None = None,
                 stored: Any = None, plan: Plan | None = None, deterministic: bool = True) -> Any:
        """Attend from x [B, T, M].

        Args:
            x: [B, T, M] float.
            memory: projected keys and values of cross-attention, for each row of x or for each n neighbouring rows
                (the beams of one sentence); None: those of x itself.
            positions: [T] or [B, T] int positions of x; None: 0, 1, 2, ...
            key_positions: positions of the keys where they are not those of x.
            mask: rule or bool [B, H, T, S].
            bias: rule or float [B, H, T, S].
            key_mask: [B, S] bool, what linear attention has of a mask.
            stored: this layer's part of a cache; then the result is (output, new stored).
            plan: where the cache puts new keys (not for linear attention).
            deterministic: no dropout.

        Returns:
            [B, T, M], and the new `stored` where one is given.
        """
        batch, length = x.shape[:2]
        if memory is None:
            projected, key, value = self._project(x)
            key, value = self._keys(key, value, positions)
        else:
            projected = self.query(x)
        query, after = self._query(projected, positions), stored
        if self.linear:
            heads, after = self.attend_linearly(query, key, value, key_mask, stored)
        else:
            seen = memory
            if stored is not None and plan is not None:
                after, seen = store(stored, key, value, plan)
            if seen is not None:
                rows = seen.value.shape[0]  # beams that share keys: [B * n, T] -> [B, n * T]
                query = query.reshape(rows, batch * length // max(rows, 1), *query.shape[2:])
            how = {"mask": mask, "bias": bias, "query_positions": positions,
                   "key_positions": positions if key_positions is None else key_positions,
                   "deterministic": deterministic}
            if seen is None:
                heads = self.attend(query, key, value, **how)
            elif isinstance(query.shape[1], int) and query.shape[1] <= FEW and self.implementation == "auto":
                heads = self.attend_stored(query, seen, **how)
            else:
                heads = self.attend(query, *seen.by_token(), **how)
        y = self.output(heads.reshape(batch, length, self.num_heads * self.value_dim))
        return y if stored is None else (y, after)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, bias: Any,
               query_positions: Any, key_positions: Any, deterministic: bool) -> jax.Array:
        """softmax(q k^T * scale + bias) v: [B, T, H, D], [B, S, K, D], [B, S, K, Dv] -> [B, T, H, Dv]."""
        rate = 0.0 if deterministic else self.dropout_rate
        common = {"mask": mask, "bias": bias, "scale": self.scale, "soft_cap": self.softcap,
                  "relative": self._relative(), "query_positions": query_positions, "key_positions": key_positions,
                  "implementation": self.implementation}
        heads: Any = None if rate else attend_on_mesh(query, key, value, **common)
        if heads is None:
            heads = attention(query, key, value, dropout_rate=rate,
                              dropout_key=self.make_rng("dropout") if rate else None, **common)
        assert isinstance(heads, jax.Array)
        return heads

    def attend_stored(self, query: jax.Array, keys: KeyValue, *, mask: Any, bias: Any, query_positions: Any,
                      key_positions: Any, deterministic: bool) -> jax.Array:
        """`attend` from a few queries to keys and values as a cache stores them."""
        if not deterministic and self.dropout_rate:
            return self.attend(query, *keys.by_token(), mask=mask, bias=bias, query_positions=query_positions,
                               key_positions=key_positions, deterministic=False)
        return cached_attention(query, keys.key, keys.value, mask=mask, bias=bias, scale=self.scale,
                                soft_cap=self.softcap, relative=self._relative(), query_positions=query_positions,
                                key_positions=key_positions)

    def _relative(self) -> Shaw | None:
        return None if self.shaw_distance is None else Shaw(self.relative_keys, self.relative_values)

    def attend_linearly(self, query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array | None,
                        state: LinearState | None) -> tuple[jax.Array, LinearState | None]:
        """Linear attention (Katharopoulos et al., 2020), with the state that a cache carries."""
        if state is None:
            return linear_attention(query, key, value, causal=self.causal, key_mask=key_mask), None
        state, heads = linear_attention_step(state, query, key, value, key_mask=key_mask)
        return heads, state


def make_attention(config: ModelConfig, *, pattern: AttentionPattern | None = None, causal: bool = False,
                   name: str | None = None) -> MultiHeadAttention:
    """The attention that a config asks for; `pattern` None makes a cross-attention, which has no position scheme."""
    is_self = pattern is not None
    return MultiHeadAttention(
        features=config.d_model, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads or config.num_heads,
        head_dim=config.resolved_head_dim, value_dim=config.resolved_value_dim, use_bias=config.attention_bias,
        output_bias=config.attention_output_bias, scale=config.attention_scale, softcap=config.attention_softcap,
        qk_norm_epsilon=config.norm_epsilon if config.qk_norm else None,
        rotary=rotary_from(config) if is_self else None,
        shaw_distance=config.shaw_distance if is_self and config.position == "shaw" else None,
        linear=pattern is not None and pattern.kind == "linear", causal=causal,
        dropout_rate=config.attention_dropout_rate, kernel_init=kernel_initializer(config), dtype=config.dtype,
        param_dtype=config.param_dtype, implementation=config.attention_implementation, lora=lora_from(config),
        name=name)
