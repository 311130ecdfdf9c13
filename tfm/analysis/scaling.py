"""Why scores are divided by sqrt(d_k): saturation of the softmax, and dot-product against additive attention."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tfm.analysis.fit import fit
from tfm.ops.additive import additive_attention
from tfm.ops.attention import attention, attention_weights

Kind = Literal["scaled dot", "dot", "additive"]
KINDS: tuple[Kind, ...] = ("scaled dot", "dot", "additive")
SYMBOLS, KEYS, CLASSES, ROWS = 16, 8, 4, 64


def softmax_saturation(d_k: int, *, scaled: bool, num_keys: int = 64, samples: int = 256,
                       seed: int = 0) -> dict[str, float]:
    """What d_k does to the scores of random queries and keys, whose components have mean 0 and variance 1.

    The gradient is the Frobenius norm of the softmax's Jacobian diag(p) - p p^T, averaged over queries: what is left
    of a gradient on its way back to the scores.

    Args:
        d_k: width of queries and keys.
        scaled: scores are q . k / sqrt(d_k), else q . k.
        num_keys: keys of a query.
        samples: queries.
        seed: of the random numbers.

    Returns:
        "variance" of the scores, mean "greatest weight", mean "entropy" in nats, mean "gradient".

    Reference: Vaswani et al. (2017), section 3.2.1 and footnote 4.
    """
    query_key, key_key = jax.random.split(jax.random.key(seed))
    query = jax.random.normal(query_key, (samples, 1, 1, d_k))
    key = jax.random.normal(key_key, (samples, num_keys, 1, d_k))
    scale = d_k**-0.5 if scaled else 1.0
    scores = scale * jnp.einsum("BTHD,BSHD->BHTS", query, key)
    weights = attention_weights(query, key, scale=scale)[:, 0, 0]  # [samples, num_keys]
    jacobian = jax.vmap(jnp.diag)(weights) - weights[:, :, None] * weights[:, None]
    entropy = -jnp.sum(weights * jnp.log(jnp.maximum(weights, 1e-30)), axis=-1)
    return {"variance": float(scores.var()), "greatest weight": float(weights.max(-1).mean()),
            "entropy": float(entropy.mean()), "gradient": float(jnp.linalg.norm(jacobian, axis=(1, 2)).mean())}


def init_lookup(kind: Kind, d_k: int, key: jax.Array) -> dict[str, jax.Array]:
    """Projections whose outputs have variance 1, so that q . k has the variance d_k that the paper assumes."""
    query_key, key_key, vector_key = jax.random.split(key, 3)
    params = {"query": jax.random.normal(query_key, (SYMBOLS, d_k)) * SYMBOLS**-0.5,
              "key": jax.random.normal(key_key, (SYMBOLS, d_k)) * SYMBOLS**-0.5}
    if kind == "additive":
        params["vector"] = jax.random.normal(vector_key, (d_k,)) * d_k**-0.5
    return params


def draw_lookup(key: jax.Array) -> dict[str, jax.Array]:
    """Different symbols as keys, one of them as query, a class for each key; the answer is the class of that key."""
    orders, chosen, classes = jax.random.split(key, 3)
    symbols = jax.vmap(partial(jax.random.permutation, x=SYMBOLS))(jax.random.split(orders, ROWS))[:, :KEYS]
    answer = jax.random.randint(chosen, (ROWS, 1), 0, KEYS)
    labels = jax.random.randint(classes, (ROWS, KEYS), 0, CLASSES)
    keys = SYMBOLS**0.5 * jax.nn.one_hot(symbols, SYMBOLS)
    return {"keys": keys, "query": jnp.take_along_axis(keys, answer[..., None], 1),
            "classes": jax.nn.one_hot(labels, CLASSES), "label": jnp.take_along_axis(labels, answer, 1)[:, 0]}


def lookup_loss(kind: Kind, params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """-log of the attention weight that reaches the right class."""
    query, keys, classes = batch["query"], batch["keys"], batch["classes"]
    if kind == "additive":
        mixed: Any = additive_attention(query, keys, classes, params["query"], params["key"], params["vector"])
    else:
        scale = 1.0 if kind == "dot" else None
        mixed = attention((query @ params["query"])[:, :, None], (keys @ params["key"])[:, :, None],
                          classes[:, :, None], scale=scale)
    right = jnp.take_along_axis(mixed.reshape(-1, CLASSES), batch["label"][:, None], 1)
    return -jnp.mean(jnp.log(jnp.maximum(right, 1e-6)))


def learn_lookup(kind: Kind, d_k: int, *, steps: int, learning_rate: float = 1e-3, seed: int = 0) -> list[float]:
    """Losses while one attention head learns to look a symbol up; a uniform head has about 1.2.

    Args:
        kind: which score.
        d_k: width of queries and keys; of the hidden layer of additive attention.
        steps: updates by Adam.
        learning_rate: of Adam.
        seed: of parameters and batches.

    Returns:
        loss before each update.
    """
    params = init_lookup(kind, d_k, jax.random.key(seed))
    _, losses = fit(partial(lookup_loss, kind), params, draw_lookup, steps=steps, seed=seed + 1,
                    learning_rate=learning_rate)
    return [float(loss) for loss in losses]


def attention_seconds(kind: Kind, *, length: int, d_k: int, repeats: int = 7) -> float:
    """Time of one forward pass of one head over random [1, length, d_k] arrays, the fastest of some."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (1, length, d_k))
    kernels = jax.random.normal(keys[1], (2, d_k, d_k)) * d_k**-0.5
    vector = jax.random.normal(keys[2], (d_k,))

    @jax.jit
    def run(x: jax.Array) -> Any:
        if kind == "additive":
            return additive_attention(x, x, x, kernels[0], kernels[1], vector)
        query, key = x @ kernels[0], x @ kernels[1]
        scale = 1.0 if kind == "dot" else None
        return attention(query[:, :, None], key[:, :, None], x[:, :, None], scale=scale, implementation="dense")

    run(x).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)
