"""An op inside plain JAX code: no module, no config, only arrays.

    python examples/op_in_plain_jax.py

Each token stands for a number; a layer of sliding-window attention with ALiBi learns the mean of the last eight.
"""

import jax
import jax.numpy as jnp

from tfm.masks import Causal, sliding_window
from tfm.ops import attention
from tfm.positions import Alibi, alibi_slopes

HEADS, WIDTH, TOKENS = 4, 16, 12


def init(key):
    shapes = {"embed": (TOKENS, HEADS * WIDTH), "query": (HEADS * WIDTH,) * 2, "key": (HEADS * WIDTH,) * 2,
              "value": (HEADS * WIDTH, HEADS * WIDTH), "out": (HEADS * WIDTH, 1)}
    return {name: 0.1 * jax.random.normal(jax.random.fold_in(key, i), shape)
            for i, (name, shape) in enumerate(shapes.items())}


def predict(params, ids):
    """ids [B, T] -> [B, T]."""
    x = params["embed"][ids]
    query, key, value = ((x @ params[name]).reshape(*ids.shape, HEADS, WIDTH) for name in ("query", "key", "value"))
    rule = Causal() & sliding_window(8)
    y = attention(query, key, value, mask=rule, bias=Alibi(alibi_slopes(HEADS)))
    return (y.reshape(x.shape) @ params["out"])[..., 0]


def mean_of_eight(ids):
    """The mean number of each token and the seven before it; token i stands for the number i - 5.5."""
    numbers, length = ids - (TOKENS - 1) / 2, ids.shape[1]
    shifted = jnp.stack([jnp.pad(numbers, ((0, 0), (k, 0)))[:, :length] for k in range(8)])
    return shifted.sum(0) / jnp.minimum(jnp.arange(1, length + 1), 8)


def loss(params, ids):
    return jnp.square(predict(params, ids) - mean_of_eight(ids)).mean()


@jax.jit
def step(params, key):
    value, gradient = jax.value_and_grad(loss)(params, jax.random.randint(key, (16, 24), 0, TOKENS))
    return jax.tree.map(lambda p, g: p - 0.03 * g, params, gradient), value


def main(steps=150):
    params, losses = init(jax.random.key(0)), []
    for i in range(steps):
        params, value = step(params, jax.random.key(i))
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
