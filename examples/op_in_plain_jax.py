"""An op inside plain JAX code: no module, no config, only arrays.

    python examples/op_in_plain_jax.py

A layer of causal sliding-window attention with ALiBi learns to say whether a token was seen in the last seven places.
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
    return {name: 0.2 * jax.random.normal(jax.random.fold_in(key, i), shape)
            for i, (name, shape) in enumerate(shapes.items())}


def logits(params, ids):
    """ids [B, T] -> [B, T]."""
    x = params["embed"][ids]
    query, key, value = ((x @ params[name]).reshape(*ids.shape, HEADS, WIDTH) for name in ("query", "key", "value"))
    rule = Causal() & sliding_window(8)
    y = attention(query, key, value, mask=rule, bias=Alibi(alibi_slopes(HEADS)))
    return (jnp.tanh(x + y.reshape(x.shape)) @ params["out"])[..., 0]


def seen_before(ids):
    """Whether each token stands among the seven before it."""
    earlier = jnp.stack([jnp.pad(ids, ((0, 0), (k, 0)), constant_values=-1)[:, :ids.shape[1]] for k in range(1, 8)])
    return (earlier == ids).any(0)


def loss(params, ids):
    sign = jnp.where(seen_before(ids), 1.0, -1.0)
    return jax.nn.softplus(-sign * logits(params, ids)).mean()


@jax.jit
def step(params, key):
    value, gradient = jax.value_and_grad(loss)(params, jax.random.randint(key, (16, 24), 0, TOKENS))
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), value


def main(steps=200):
    params, losses = init(jax.random.key(0)), []
    for i in range(steps):
        params, value = step(params, jax.random.key(i))
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
