"""Position schemes as functions of positions: vectors to add, rotations, and biases on the scores."""

import dataclasses
import math
from typing import ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.arguments import float_array
from tfm.ops.relative import collect, distances, key_run, look_up
from tfm.ops.tokens import Array, Tokens, pair_up, register_rule

Layout = Literal["half", "interleaved"]


class RotaryScaling(Protocol):
    """What `rotary` reads of a scaling: `kind` and, of the others, what the kind needs."""

    kind: str  # "linear" | "dynamic" | "llama3" | "yarn" | "factors"
    factor: float  # new context length over the original one
    original_max_positions: int  # dynamic, llama3, yarn
    low_freq_factor: float  # llama3
    high_freq_factor: float  # llama3
    beta_fast: float  # yarn
    beta_slow: float  # yarn
    attention_factor: float | None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool  # yarn: whole dimensions as bounds of the ramp
    factors: tuple[float, ...]  # factors: divisors of the frequencies


def _check_layout(layout: str) -> None:
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout is {layout!r}; it must be 'half' or 'interleaved'")


def sinusoidal(positions: Array, dim: int, *, base: float = 10000.0, layout: Layout = "interleaved") -> jax.Array:
    """Sines and cosines of the positions at geometrically spaced wavelengths.

    PE(p, 2i) = sin(p / base^(2i/dim)), PE(p, 2i+1) = cos(p / base^(2i/dim)).

    Args:
      positions: [...] int or float.
      dim: even width of the vectors.
      base: ratio of the longest wavelength to the shortest.
      layout: "interleaved", sine and cosine alternate, as in the paper; "half", all sines come first.

    Returns:
      [..., dim] float32.

    Raises:
      ValueError: an odd dim, an unknown layout.

    Example:
      >>> sinusoidal(np.array([0, 1]), 4).round(3).tolist()[0]
      [0.0, 1.0, 0.0, 1.0]

    Reference: Vaswani et al. (2017), Attention Is All You Need, section 3.5.
    """
    _check_layout(layout)
    if dim < 2 or dim % 2:
        raise ValueError(f"sinusoidal's dim is {dim}; it must be even, a sine and a cosine per wavelength")
    angles = _angles(positions, _frequencies(dim, base))
    parts = jnp.sin(angles), jnp.cos(angles)
    if layout == "half":
        return jnp.concatenate(parts, -1)
    return jnp.stack(parts, -1).reshape(*angles.shape[:-1], dim)


def _frequencies(dim: int, base: float) -> np.ndarray:
    """base^(-2i/dim) for i = 0 .. dim/2 - 1."""
    return (base ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)


def _angles(positions: Array, frequencies: Array) -> jax.Array:
    return jnp.asarray(positions)[..., None].astype(jnp.float32) * frequencies


def rotary(
    x: jax.Array,
    positions: Array,
    *,
    base: float = 10000.0,
    layout: Layout = "half",
    scaling: RotaryScaling | None = None,
    rotary_dim: int | None = None,
) -> jax.Array:
    """Rotates pairs of dimensions by an angle proportional to the position.

    (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a), with a = position * base^(-2i/D) for pair i.

    Args:
      x: [B, T, H, D] float, queries or keys.
      positions: [T] or [B, T] int.
      base: ratio of the longest wavelength to the shortest.
      layout: which dimensions make pair i: "half", i and i + D/2 (Llama, GPT-NeoX); "interleaved", 2i and 2i+1 (the
        paper, GPT-J).
      scaling: how the frequencies change for longer contexts; None leaves them.
      rotary_dim: rotates the first dimensions only; None rotates all.

    Returns:
      [B, T, H, D], x's dtype.

    Raises:
      ValueError: an x of integers, positions that do not fit, an odd width, an unknown layout or kind of scaling.

    Example:
      >>> x = jnp.ones((1, 2, 1, 2))
      >>> rotary(x, np.arange(2)).round(3).tolist()
      [[[[1.0, 1.0]], [[-0.301..., 1.382...]]]]

    Reference: Su et al. (2021), RoFormer, section 3.2.2; Peng et al. (2023), YaRN (scalings).
    """
    _check_layout(layout)
    x = float_array(x, "x")
    _check_positions(np.shape(positions), x.shape)
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    if dim % 2 or not 0 < dim <= x.shape[-1]:
        raise ValueError(f"rotary's width is {dim}; it must be even and at most the head width {x.shape[-1]}")
    if dim < x.shape[-1]:
        turned = rotary(x[..., :dim], positions, base=base, layout=layout, scaling=scaling)
        return jnp.concatenate([turned, x[..., dim:]], -1)
    frequencies, magnitude = scaled_frequencies(dim, base, scaling, positions)
    angles = _angles(positions, frequencies)[..., None, :]
    cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
    wide = x.astype(jnp.promote_types(x.dtype, cos.dtype))
    if layout == "half":
        x1, x2 = jnp.split(wide, 2, -1)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)
    x1, x2 = jnp.moveaxis(wide.reshape(*x.shape[:-1], dim // 2, 2), -1, 0)
    return jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).reshape(x.shape).astype(x.dtype)


def _check_positions(shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
    tokens = x_shape[:-2]
    if len(shape) > len(tokens) or any(n not in (1, m) for n, m in zip(shape[::-1], tokens[::-1], strict=False)):
        raise ValueError(f"positions have shape {shape}; they must be {tokens[-1:]} or {tokens} for this x")


def scaled_frequencies(dim: int, base: float, scaling: RotaryScaling | None,
                       positions: Array = 0) -> tuple[Array, float]:
    """Frequencies [dim/2], and the factor on the rotated vectors; only those of "dynamic" depend on the positions."""
    plain = _frequencies(dim, base)
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "dynamic":
        return _dynamic_frequencies(dim, base, scaling, positions), 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling), 1.0
    if scaling.kind == "yarn":
        factor = scaling.attention_factor
        return _yarn_frequencies(dim, base, scaling), 0.1 * math.log(scaling.factor) + 1 if factor is None else factor
    if scaling.kind == "factors":
        return plain / np.asarray(scaling.factors, np.float32), 1.0
    raise ValueError(f"scaling.kind is {scaling.kind!r}; it must be 'linear', 'dynamic', 'llama3', 'yarn' or 'factors'")


def _dynamic_frequencies(dim: int, base: float, scaling: RotaryScaling, positions: Array) -> jax.Array:
    """The base grows once the sequence is longer than the original context."""
    original = scaling.original_max_positions
    length = jnp.maximum(jnp.max(jnp.asarray(positions)) + 1, original)
    growth = scaling.factor * length / original - (scaling.factor - 1)
    exponents = np.arange(0, dim, 2) / dim
    return jnp.asarray(_frequencies(dim, base)) * growth ** -(exponents * (dim / (dim - 2))).astype(np.float32)


def _llama3_frequencies(plain: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    """Long wavelengths are slowed down by `factor`, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clip(0, 1)
    return ((1 - keep) * plain / scaling.factor + keep * plain).astype(np.float32)


def _yarn_frequencies(dim: int, base: float, scaling: RotaryScaling) -> np.ndarray:
    """Dimensions with many rotations over the original context stay, those with few are slowed down by `factor`."""

    def dimension(rotations: float) -> float:
        return dim * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    plain = _frequencies(dim, base)
    ramp = ((np.arange(dim // 2) - low) / max(high - low, 0.001)).clip(0, 1)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)


class Bias:
    """A term added to the scores, as a function of positions, evaluated for any block."""

    axes: ClassVar[dict[str, str]] = {}
    """As of `tfm.ops.masks.Rule`."""

    def values(self, query: Tokens, key: Tokens) -> jax.Array:
        """The bias of some queries and keys: float32, broadcastable to [B, H, n, m]."""
        raise NotImplementedError


@register_rule
@dataclasses.dataclass(frozen=True)
class MatrixBias(Bias):
    """A bias written out: float, broadcastable to [B, H, T, S], in the order of the query and key arrays."""

    axes: ClassVar = {"bias": "BHTS"}
    bias: Array

    def values(self, query: Tokens, key: Tokens) -> jax.Array:
        bias = jnp.asarray(self.bias)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        return query.per_head(query.rows(key.along(query.along(bias, 2), 3)), 1)


def alibi_slopes(num_heads: int) -> jax.Array:
    """Slopes of the linear biases: 2^(-8/n), 2^(-16/n), ... for n heads, a power of two.

    For other numbers of heads: the slopes of the next lower power of two, then every other one of twice that power.

    Args:
      num_heads: number of heads.

    Returns:
      [num_heads] float32.

    Example:
      >>> alibi_slopes(4).tolist()
      [0.25, 0.0625, 0.015625, 0.00390625]

    Reference: Press, Smith and Lewis (2022), ALiBi, section 3, and the authors' code for other numbers of heads.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; it must be 1 or more")
    power = 1 << (int(num_heads).bit_length() - 1)
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * power, 2))
    return jnp.asarray(np.concatenate([slopes, between])[:num_heads], jnp.float32)


@register_rule
@dataclasses.dataclass(frozen=True)
class Alibi(Bias):
    """A penalty proportional to the distance: bias = -slope * |query - key|.

    Args:
      slopes: [H] float.

    Reference: Press, Smith and Lewis (2022), ALiBi, section 3.
    """

    axes: ClassVar = {"slopes": "H"}
    slopes: Array

    def values(self, query: Tokens, key: Tokens) -> jax.Array:
        q, k = pair_up(query.positions, key.positions)
        slopes = query.per_head(jnp.asarray(self.slopes), 0)
        return -slopes[:, None, None] * abs(q - k).astype(slopes.dtype)


def t5_bucket(
    relative_position: Array, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> jax.Array:
    """Sorts distances into buckets: one each for the small ones, then logarithmically wider, then one for the rest.

    Args:
      relative_position: [...] int, key position minus query position.
      bidirectional: half of the buckets for keys after the query; False puts those into bucket 0.
      num_buckets: number of buckets.
      max_distance: distances from here on share the last bucket.

    Returns:
      [...] int32, in 0 .. num_buckets - 1.

    Raises:
      ValueError: fewer than two buckets for a direction, or a max_distance that the exact ones go beyond.

    Example:
      >>> t5_bucket(np.array([-200, -8, -1, 0, 1, 20]), bidirectional=True).tolist()
      [15, 8, 1, 0, 17, 26]

    Reference: Raffel et al. (2020), T5, section 2.1.
    """
    relative_position = jnp.asarray(relative_position)
    first = jnp.zeros((), jnp.int32)
    if bidirectional:
        num_buckets //= 2
        first = jnp.where(relative_position > 0, num_buckets, 0)
        distance = abs(relative_position)
    else:
        distance = jnp.maximum(-relative_position, 0)
    exact = num_buckets // 2
    if not 0 < exact < max_distance:
        raise ValueError(f"t5_bucket has {num_buckets} buckets a direction and a max_distance of {max_distance}; "
                         "the buckets must be 2 or more, and the distance above half of them")
    # Bucket exact + i begins at exact * (max_distance / exact)^(i / (num_buckets - exact)): comparisons with the
    # least integer of each, exact in every dtype, in place of a logarithm.
    steps = np.arange(1, num_buckets - exact) / (num_buckets - exact)
    begins = np.ceil(exact * (max_distance / exact) ** steps - 1e-9).astype(np.int32)
    bucket = jnp.minimum(distance, exact)
    for begin in begins.tolist():
        bucket = bucket + (distance >= begin)
    return (first + bucket).astype(jnp.int32)


@register_rule
@dataclasses.dataclass(frozen=True)
class T5Bias(Bias):
    """A learned bias per head and bucket of distances.

    Args:
      table: [num_buckets, H] float.
      bidirectional: see `t5_bucket`.
      max_distance: see `t5_bucket`.

    Reference: Raffel et al. (2020), T5, section 2.1.
    """

    axes: ClassVar = {"table": "*H"}
    table: Array
    bidirectional: bool = dataclasses.field(metadata={"static": True})
    max_distance: int = dataclasses.field(default=128, metadata={"static": True})

    def values(self, query: Tokens, key: Tokens) -> jax.Array:
        q, k = pair_up(query.positions, key.positions)
        table = query.per_head(jnp.asarray(self.table), 1)
        bucket = t5_bucket(
            k - q, bidirectional=self.bidirectional, num_buckets=table.shape[0], max_distance=self.max_distance
        )
        return jnp.moveaxis(table[bucket[:, 0]], -1, 1)


@register_rule
@dataclasses.dataclass(frozen=True)
class Shaw:
    """Learned vectors per clipped distance, added to the keys and to the values.

    score_ij = q_i . (k_j + a_r) * scale, output_i = sum_j w_ij (v_j + b_r), r = clip(j - i, -R, R) + R.

    Args:
      key_table: [2R+1, D] float, the vectors a.
      value_table: [2R+1, Dv] float, the vectors b, or None.

    Reference: Shaw, Uszkoreit and Vaswani (2018), section 3.2.
    """

    axes: ClassVar[dict[str, str]] = {"key_table": "RD", "value_table": "RE"}
    key_table: Array
    value_table: Array | None = None

    def products(self, query: Array, rows: Tokens, columns: Tokens) -> jax.Array:
        """q_i . a_r for queries [B, H, n, D] and some keys: [B, H, n, m]."""
        products = jnp.einsum("BHTD,RD->BHTR", query, self.key_table, preferred_element_type=jnp.float32)
        buckets = self._buckets(rows, columns)[:, None]
        shape = *products.shape[:3], buckets.shape[-1]
        return jnp.take_along_axis(products, jnp.broadcast_to(buckets, shape), -1)

    def values(self, weights: jax.Array, rows: Tokens, columns: Tokens) -> jax.Array:
        """sum_j w_ij b_r for weights [B, H, n, m]: [B, H, n, Dv]."""
        assert self.value_table is not None
        run = key_run(rows, columns)
        if run is not None:
            vectors = look_up(jnp.asarray(self.value_table), self._clip(distances(rows, columns, run)))
            return jnp.einsum("BHsTr,srD->BHTD", collect(weights, run), vectors)
        chosen = jax.nn.one_hot(self._buckets(rows, columns), len(self.value_table), dtype=weights.dtype)
        chosen = jnp.broadcast_to(chosen, (len(weights), *chosen.shape[1:]))
        sums = jnp.einsum("BHTS,BTSR->BHTR", weights, chosen)
        return jnp.einsum("BHTR,RD->BHTD", sums, self.value_table)

    def _buckets(self, query: Tokens, key: Tokens) -> jax.Array:
        """The rows r of the tables for some queries and keys: [B|1, n, m] int32."""
        return self._clip(key.positions[:, None, :] - query.positions[:, :, None])

    def _clip(self, distance: Array) -> jax.Array:
        reach = self.key_table.shape[0] // 2
        return jnp.clip(distance, -reach, reach) + reach
