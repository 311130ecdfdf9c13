"""Draws the temporary memory of blockwise attention against the length, as the compiler reports it.

    python benchmarks/attention_memory.py docs/images/attention_memory.png

One head of width 64, float32, causal, forward and forward with backward, beside the bytes of one stored matrix of
weights in 2 bytes a number.  Nothing is run: the numbers are `memory_analysis()` of the compiled functions.
"""

import json
import sys

import jax
import jax.numpy as jnp

from tfm.masks import Causal
from tfm.ops import attention

LENGTHS = [2**n for n in range(10, 18)]


def temporary_bytes(length: int, backward: bool) -> int:
    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, mask=Causal(), implementation="blockwise")

    def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> tuple:
        output, pull = jax.vjp(forward, query, key, value)
        return output, pull(cotangent)

    lowered = jax.jit(both).lower(x, x, x, x) if backward else jax.jit(forward).lower(x, x, x)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def draw(rows: list[dict], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, label in (("stored", "one matrix of weights, 2 bytes"), ("both", "both"), ("forward", "forward")):
        axes.plot([r["length"] for r in rows], [r[name] / 2**20 for r in rows], "o-", label=label)
    axes.set(xscale="log", yscale="log", xlabel="length", ylabel="temporary memory, MiB", title="one head of width 64")
    axes.set_xticks(LENGTHS, [f"{n // 1024}k" for n in LENGTHS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    rows = []
    for length in LENGTHS:
        row = dict(
            length=length,
            forward=temporary_bytes(length, False),
            both=temporary_bytes(length, True),
            stored=2 * length**2,
        )
        print(json.dumps(row), flush=True)
        rows.append(row)
    if len(sys.argv) > 1:
        draw(rows, sys.argv[1])


if __name__ == "__main__":
    main()
