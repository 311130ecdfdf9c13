"""The worst error of every attention implementation, as JSON lines: against the same formulas in float64.

    python benchmarks/attention_error.py

One line for each implementation and dtype: the greatest difference from NumPy's float64, over some rules and draws, of
the output and of each gradient, beside the greatest value there.  Inputs are rounded to the dtype first, so the errors
are the implementation's own.
"""

import argparse
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tfm import masks
from tfm.ops import attention, linear_attention

LENGTH, HEADS, KEY_HEADS, WIDTH = 640, 4, 2, 64
DTYPES = "float32", "bfloat16", "float16"
RULES = {
    "causal": masks.Causal(),
    "window": masks.sliding_window(96),
    "longformer": masks.longformer(64, tokens=[0, 300]),
    "bigbird": masks.bigbird(LENGTH, block_size=32),
}
NAMES = "output", "query", "key", "value"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3)
    arguments = parser.parse_args()
    for dtype in DTYPES:
        for name in ("dense", "blockwise", "linear"):
            print(json.dumps(row(name, dtype, arguments.draws)), flush=True)


def row(name: str, dtype: str, draws: int) -> dict:
    """The worst errors of one implementation in one dtype."""
    errors, sizes = np.zeros(4), np.zeros(4)
    rules = {"causal": None} if name == "linear" else RULES
    for rule in rules.values():
        run = run_ours(name, rule)
        for seed in range(draws):
            random = np.random.default_rng(seed)
            shapes = [(1, LENGTH, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
            arrays = [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]
            exact = [np.asarray(x, np.float64) for x in arrays]
            want = linear_in_float64(*exact) if name == "linear" else attention_in_float64(rule, *exact)
            for n, (got, true) in enumerate(zip(run(*arrays), want, strict=True)):
                errors[n] = max(errors[n], np.abs(np.asarray(got, np.float64) - true).max())
                sizes[n] = max(sizes[n], np.abs(true).max())
    numbers = {f"d_{x}" if n else x: float(f"{errors[n]:.2g}") for n, x in enumerate(NAMES)}
    greatest = {f"greatest_d_{x}" if n else f"greatest_{x}": float(f"{sizes[n]:.3g}") for n, x in enumerate(NAMES)}
    return dict(bench="attention_error", implementation=name, dtype=dtype, **numbers, **greatest)


def run_ours(name: str, rule: masks.Rule | None) -> Callable:
    """Output and gradients of the query, the key and the value."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if name == "linear":
            return linear_attention(query, key, value, causal=True)
        return attention(query, key, value, mask=rule, implementation=name)

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> tuple:
        output, pull = jax.vjp(attend, query, key, value)
        return output, *pull(cotangent)

    return run


def attention_in_float64(rule: masks.Rule, *arrays: np.ndarray) -> list[np.ndarray]:
    """softmax(q k^T / sqrt(D)) v where the rule allows it, and its gradients."""
    q, k, v, g = heads_first(arrays)
    seen = np.asarray(rule.dense(np.arange(LENGTH), np.arange(LENGTH)))
    scores = np.where(seen, q @ k.swapaxes(2, 3) / WIDTH**0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = g @ v.swapaxes(2, 3)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / WIDTH**0.5
    d_k, d_v = d_scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ g
    return tokens_first(weights @ v, d_scores @ k, d_k, d_v)


def linear_in_float64(*arrays: np.ndarray) -> list[np.ndarray]:
    """The quadratic form of causal linear attention with phi = elu + 1, and its gradients."""
    q, k, v, g = heads_first(arrays)
    slopes = [np.where(x > 0, 1, np.exp(np.minimum(x, 0))) for x in (q, k)]
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    similar = q @ k.swapaxes(2, 3) * np.tri(LENGTH)
    total = similar.sum(-1, keepdims=True)
    weights = similar / total
    d_weights = g @ v.swapaxes(2, 3)
    d_similar = (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / total * np.tri(LENGTH)
    d_k, d_v = d_similar.swapaxes(2, 3) @ q * slopes[1], weights.swapaxes(2, 3) @ g
    return tokens_first(weights @ v, d_similar @ k * slopes[0], d_k, d_v)


def heads_first(arrays: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """[1, L, heads, D] -> [1, H, L, D]; query heads 0 .. G-1 use key head 0."""
    return [np.repeat(x, HEADS // x.shape[2], 2).swapaxes(1, 2) for x in arrays]


def tokens_first(output: np.ndarray, d_q: np.ndarray, d_k: np.ndarray, d_v: np.ndarray) -> list[np.ndarray]:
    """The inverse; the query heads that share a key head add up."""
    d_k, d_v = (x.reshape(1, KEY_HEADS, -1, LENGTH, WIDTH).sum(2) for x in (d_k, d_v))
    return [x.swapaxes(1, 2) for x in (output, d_q, d_k, d_v)]


if __name__ == "__main__":
    main()
