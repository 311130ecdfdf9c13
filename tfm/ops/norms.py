"""LayerNorm and RMSNorm as functions of arrays, with float32 statistics whatever the input's type.

The backward pass keeps x and two numbers of each row, its mean and 1 / deviation, and no other array of its shape.
There is no forward-mode derivative (`jax.jvp`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tfm.ops.arguments import float_array
from tfm.ops.tokens import vary_alike


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, epsilon: float = 1e-6) -> jax.Array:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift: (x - mean) / sqrt(var + eps) * g + b.

    Args:
        x: [..., M] float; the statistics are taken in float32.
        scale: [M] the gain g.
        bias: [M] the shift b, or None.
        epsilon: added to the variance.

    Returns:
        [..., M] in the type of x.

    Raises:
        ValueError: shapes that do not fit, an x of integers.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), epsilon=0.0).tolist()
        [-1.0, 1.0]

    Reference: Ba, Kiros and Hinton (2016), "Layer Normalization", equation 4.
    """
    return _normalize(*_arrays(x, scale, bias), epsilon, True)


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float = 1e-6) -> jax.Array:
    """Divide the last axis by its root mean square, then scale: x / sqrt(mean(x^2) + eps) * g.

    Args:
        x: [..., M] float; the mean is taken in float32.
        scale: [M] the gain g.
        epsilon: added to the mean square.

    Returns:
        [..., M] in the type of x.

    Raises:
        ValueError: shapes that do not fit, an x of integers.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.array([3.0, -3.0]), jnp.ones(2), epsilon=0.0).tolist()
        [1.0, -1.0]

    Reference: Zhang and Sennrich (2019), "Root Mean Square Layer Normalization", equation 4.
    """
    return _normalize(*_arrays(x, scale, None), epsilon, False)


def _arrays(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, scale = float_array(x, "x"), jnp.asarray(scale)
    bias = None if bias is None else jnp.asarray(bias)
    for name, y in (("scale", scale), ("bias", scale if bias is None else bias)):
        if y.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {y.shape}; it must be {x.shape[-1:]} for this x")
    return vary_alike((x, scale, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float, centred: bool) -> jax.Array:
    """The norm of x, less its mean where it is to be `centred`."""
    return _normalize_forward(x, scale, bias, epsilon, centred)[0]


def _normalize_forward(x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float,
                       centred: bool) -> tuple[jax.Array, tuple]:
    wide = _widen(x)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if centred else None
    shifted = wide if mean is None else wide - mean
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(shifted), axis=-1, keepdims=True) + epsilon)
    y = shifted * inverse * scale
    return (y if bias is None else y + bias).astype(x.dtype), (x, mean, inverse, scale, bias)


def _normalize_backward(epsilon: float, centred: bool, saved: tuple,
                        dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """With n = (x - mean) / deviation and g = scale dy:  dx = (g - mean(g) - n mean(g n)) / deviation."""
    x, mean, inverse, scale, bias = saved
    dy = _widen(jax.lax.optimization_barrier(dy))
    normal = (_widen(x) if mean is None else _widen(x) - mean) * inverse
    g = dy * scale
    dx = g - normal * jnp.mean(g * normal, axis=-1, keepdims=True)
    if centred:
        dx -= jnp.mean(g, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    d_bias = None if bias is None else jnp.sum(dy, axis=rows).astype(bias.dtype)
    return (dx * inverse).astype(x.dtype), jnp.sum(dy * normal, axis=rows).astype(scale.dtype), d_bias


_normalize.defvjp(_normalize_forward, _normalize_backward)


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
