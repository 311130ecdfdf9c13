"""A model of this library as a Flax NNX module, trained with NNX's own tools.

    python examples/model_in_nnx.py

The decoder learns to count upwards modulo 10.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tfm import build, presets

CONFIG = presets.tiny(vocab_size=10, encoder_layers=0, position="rotary", norm_position="pre", dropout_rate=0.0)


def batch(key):
    start = jax.random.randint(key, (8, 1), 0, 10)
    return (start + jnp.arange(12)) % 10


def main(steps=60):
    tokens = batch(jax.random.key(0))
    model = nnx.bridge.ToNNX(build(CONFIG), rngs=nnx.Rngs(0)).lazy_init(tokens)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss(model):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    losses = [float(step(model, optimizer, batch(jax.random.key(i)))) for i in range(steps)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
