"""LayerNorm and RMSNorm as functions of arrays, with float32 statistics whatever the input's type."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, epsilon: float = 1e-6) -> jax.Array:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift: (x - mean) / sqrt(var + eps) * g + b.

    Args:
        x: [..., M] float; the statistics are taken in float32.
        scale: [M] the gain g.
        bias: [M] the shift b, or None.
        epsilon: added to the variance.

    Returns:
        [..., M] in the type of x.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), epsilon=0.0).tolist()
        [-1.0, 1.0]

    Reference: Ba, Kiros and Hinton (2016), "Layer Normalization", equation 4.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float = 1e-6) -> jax.Array:
    """Divide the last axis by its root mean square, then scale: x / sqrt(mean(x^2) + eps) * g.

    Args:
        x: [..., M] float; the mean is taken in float32.
        scale: [M] the gain g.
        epsilon: added to the mean square.

    Returns:
        [..., M] in the type of x.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.array([3.0, -3.0]), jnp.ones(2), epsilon=0.0).tolist()
        [1.0, -1.0]

    Reference: Zhang and Sennrich (2019), "Root Mean Square Layer Normalization", equation 4.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)
