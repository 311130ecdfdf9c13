"""A tiny recurrent model as a step function, and its exhaustive search in NumPy."""

import itertools
from dataclasses import dataclass
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

WIDTH = 6


def recurrent_step(weights, tokens, cache):
    """One step of `Toy`, the weights as an argument."""
    a, e, u = weights

    def one(h, token):
        h = jnp.tanh(h @ a + e[token])
        return h, h @ u

    h, logits = jax.lax.scan(one, cache["h"], tokens.T)
    return logits.swapaxes(0, 1), {"h": h}


@cache
def _compiled(search, static):
    return jax.jit(lambda w, c, p, arrays: search(partial(recurrent_step, w), c, p, **dict(static), **arrays))


@dataclass(frozen=True)
class Toy:
    """h <- tanh(A h + E[token]); logits = U h: the next token depends on the whole prefix."""

    vocab: int
    seed: int
    sharpness: float = 2.0

    @cached_property
    def weights(self):
        rng = np.random.default_rng(self.seed)
        return (
            rng.normal(size=(WIDTH, WIDTH)) * 0.9,
            rng.normal(size=(self.vocab, WIDTH)),
            rng.normal(size=(WIDTH, self.vocab)) * self.sharpness,
        )

    def cache(self, batch):
        return {"h": jnp.zeros((batch, WIDTH), jnp.float32)}

    def step(self, tokens, cache):
        """[N, T] -> logits [N, T, V]."""
        return recurrent_step(self.arrays, tokens, cache)

    @property
    def arrays(self):
        """The weights in float32."""
        return tuple(jnp.asarray(w, jnp.float32) for w in self.weights)

    def jit(self, search, **static):
        """search(step, cache, prompt, **static, **arrays), compiled once for all models of this vocabulary."""
        return lambda prompt, **arrays: _compiled(search, tuple(sorted(static.items())))(
            self.arrays, self.cache(len(prompt)), jnp.asarray(prompt), arrays
        )

    def last_step(self, tokens, cache):
        """The same, but the logits of the last position only."""
        logits, cache = self.step(tokens, cache)
        return logits[:, -1], cache

    def logits(self, tokens):
        """In NumPy, float64: the logits after a sequence of tokens."""
        a, e, u = self.weights
        h = np.zeros(WIDTH)
        for token in tokens:
            h = np.tanh(h @ a + e[token])
        return h @ u

    def log_probs(self, prompt, tokens):
        """In NumPy: the log-probability of each token after the prompt."""
        found = []
        for i, token in enumerate(tokens):
            logits = self.logits([*prompt, *tokens[:i]])
            top = logits.max()
            found.append(logits[token] - top - np.log(np.exp(logits - top).sum()))
        return np.array(found)

    def finished(self, prompt, limit, eos, alpha):
        """Every hypothesis that ends within limit tokens, as (score, ids), best first."""
        others = [i for i in range(self.vocab) if i != eos]
        found = []
        for n in range(limit):
            for head in itertools.product(others, repeat=n):
                ids = (*head, eos)
                total = self.log_probs(prompt, ids).sum()
                found.append((total / ((5 + len(ids)) / 6) ** alpha, ids))
        return sorted(found, reverse=True)


@pytest.fixture(scope="session")
def toy():
    """Makes a Toy model from vocab and seed."""
    return Toy


def _make_toy_step(weights, rows):
    return partial(recurrent_step, weights)


@pytest.fixture(scope="session")
def make_toy_step():
    """(weights, rows) -> step, what a Session takes."""
    return _make_toy_step
