"""Greedy and beam search around a model that is not ours: here a recurrent one in plain JAX.

    python examples/decode_other_model.py

A decoding loop needs a step (tokens [N, T], cache) -> (logits [N, V], cache) and a cache whose leaves start with N.
"""

import jax
import jax.numpy as jnp

from tfm.decoding import beam_search, greedy

VOCAB, WIDTH, BOS, EOS = 6, 32, 0, 1


def init(key):
    keys = iter(jax.random.split(key, 3))
    return {"embed": jax.random.normal(next(keys), (VOCAB, WIDTH)),
            "state": 0.3 * jax.random.normal(next(keys), (WIDTH, WIDTH)),
            "out": jax.random.normal(next(keys), (WIDTH, VOCAB)) / WIDTH**0.5}


def make_step(params):
    """One step of a tanh network; its cache is the hidden state [N, WIDTH]."""

    def read(state, token):
        return jnp.tanh(params["embed"][token] + state @ params["state"]), None

    def step(tokens, state):
        state, _ = jax.lax.scan(read, state, tokens.T)
        return state @ params["out"], state

    return step


def main():
    step, cache = make_step(init(jax.random.key(3))), jnp.zeros((2, WIDTH))
    prompt = jnp.array([[BOS, 2], [BOS, 5]])
    one = jax.jit(lambda: greedy(step, cache, prompt, max_length=4, eos_id=EOS))()
    best = jax.jit(lambda: beam_search(step, cache, prompt, beam_size=VOCAB**3, alpha=0.0, max_length=4, eos_id=EOS))()
    for row in range(2):
        print(f"prompt {prompt[row].tolist()}: greedy {one.ids[row].tolist()} {one.scores[row]:.3f}, "
              f"beam {best.ids[row, 0].tolist()} {best.scores[row, 0]:.3f}")
    return one, best


if __name__ == "__main__":
    main()
