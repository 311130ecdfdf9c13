"""Layers of this library inside a Flax Linen model of your own: a small vision transformer.

    python examples/layer_in_flax.py

It learns on which side of a 16 x 16 picture the brighter square lies.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tfm.nn import FeedForward, MultiHeadAttention, Normalize, Projection


class PictureClassifier(nn.Module):
    """Pictures [B, 16, 16] -> logits [B, 2]."""

    width: int = 32

    @nn.compact
    def __call__(self, pictures):
        patches = pictures.reshape(-1, 4, 4, 4, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 16)
        x = Projection(self.width, use_bias=True)(patches)
        x = x + self.param("positions", nn.initializers.normal(0.02), (16, self.width))
        for _ in range(2):
            attention = MultiHeadAttention(self.width, num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8)
            x = x + attention(Normalize("rms")(x))
            x = x + FeedForward(64, activation="silu", gated=True, use_bias=False)(Normalize("rms")(x))
        return Projection(2)(Normalize("rms")(x).mean(axis=1))


def batch(key, size=32):
    """Noise with a bright square on each side, one of them brighter."""
    labels = jax.random.bernoulli(key, 0.5, (size,)).astype(jnp.int32)
    pictures = 0.3 * jax.random.normal(jax.random.fold_in(key, 1), (size, 16, 16))
    light = jnp.where(labels[:, None, None] == 1, 1.0, 2.0)
    return pictures.at[:, 4:12, 1:6].add(light).at[:, 4:12, 10:15].add(3.0 - light), labels


def main(steps=60):
    model, optimizer = PictureClassifier(), optax.adam(3e-3)
    params = model.init(jax.random.key(0), batch(jax.random.key(0))[0])["params"]
    state = optimizer.init(params)

    def loss(params, pictures, labels):
        logits = model.apply({"params": params}, pictures)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    @jax.jit
    def step(params, state, key):
        (_, accuracy), gradient = jax.value_and_grad(loss, has_aux=True)(params, *batch(key))
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, accuracy

    for i in range(steps):
        params, state, accuracy = step(params, state, jax.random.key(i + 1))
    print(f"accuracy {accuracy:.2f}")
    return float(accuracy)


if __name__ == "__main__":
    main()
