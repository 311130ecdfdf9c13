"""A pretrained encoder with a new head, trained with optax.

    python examples/new_head.py FOLDER      # a checkpoint folder of a BERT-type encoder; without it, a random one

The head says which of two words a row of ids has more of.
"""

import sys

import jax
import jax.numpy as jnp
import optax

from tfm import build, init_params, load, presets


def features(encoder, params, ids, mask):
    """The mean of the real tokens' hidden vectors: [B, M]."""
    hidden = encoder.apply({"params": params["encoder"]}, ids, mask=mask)
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)


def batch(key, vocab_size):
    ids = jax.random.randint(key, (16, 9), vocab_size - 2, vocab_size)
    mask = jnp.arange(9) < jax.random.choice(jax.random.fold_in(key, 1), jnp.array([5, 7, 9]), (16, 1))
    return ids, mask, (((ids == vocab_size - 1) & mask).sum(1) > mask.sum(1) / 2).astype(jnp.int32)


def main(folder=None, steps=100):
    if folder:
        bundle = load(folder)
        config, encoder_params = bundle.model, bundle.params
    else:
        config = presets.bert_base(vocab_size=100, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, pooler=False)
        encoder_params = init_params(config, jax.random.key(0))
    encoder = build(config)
    params = {"encoder": encoder_params, "head": jnp.zeros((config.d_model, 2))}
    rates = {"encoder": optax.adam(3e-4), "head": optax.adam(3e-2)}
    optimizer = optax.multi_transform(rates, {"encoder": "encoder", "head": "head"})

    def loss(params, ids, mask, labels):
        logits = features(encoder, params, ids, mask) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).mean()

    @jax.jit
    def step(params, state, key):
        (_, accuracy), gradient = jax.value_and_grad(loss, has_aux=True)(params, *batch(key, config.vocab_size))
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, accuracy

    state, accuracies = optimizer.init(params), []
    for i in range(steps):
        params, state, accuracy = step(params, state, jax.random.key(i))
        accuracies.append(float(accuracy))
    print(f"accuracy of the last ten batches {sum(accuracies[-10:]) / 10:.2f}")
    return accuracies


if __name__ == "__main__":
    main(*sys.argv[1:])
