"""Draws the temporary memory of blockwise attention against the length, as the compiler reports it.

    python benchmarks/attention_memory.py docs/images/attention_memory.png
    python benchmarks/attention_memory.py --run 16384 --heads 8

Float32, causal, heads of width 64 (one of them unless said otherwise), forward and forward with backward, beside the
bytes of one stored matrix of weights in 2 bytes a number.  The numbers are `memory_analysis()` of the compiled
functions, without inputs and results.  With `--run`, that length alone is also computed, forward and then both, and the
rows have the growth of the process's peak over what it held before, results included.
"""

import argparse
import ctypes
import gc
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tfm.masks import Causal
from tfm.ops import attention

LENGTHS = [2**n for n in range(10, 18)]


def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attention(query, key, value, mask=Causal(), implementation="blockwise")


def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> tuple:
    output, pull = jax.vjp(forward, query, key, value)
    return output, pull(cotangent)


def compiled(function: Callable, length: int, heads: int) -> jax.stages.Compiled:
    x = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
    return jax.jit(function).lower(*[x] * (3 if function is forward else 4)).compile()


def row_of(length: int, heads: int, run: bool) -> dict:
    """Temporary bytes of both functions, and what the process's peak grows by when they run."""
    row = dict(length=length, heads=heads, stored=2 * heads * length**2)
    for function in (forward, both):
        program = compiled(function, length, heads)
        row[function.__name__] = program.memory_analysis().temp_size_in_bytes
        if run:
            row[f"{function.__name__}_process"] = growth(program, length, heads, 3 if function is forward else 4)
    return row


def growth(program: jax.stages.Compiled, length: int, heads: int, count: int) -> int:
    """Growth of the peak of resident memory in a call, in bytes: the greatest of three."""
    inputs = [jax.random.normal(jax.random.key(n), (1, length, heads, 64)) for n in range(count)]
    jax.block_until_ready(inputs)
    grown = []
    for _ in range(3):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = resident("VmRSS")
        jax.block_until_ready(program(*inputs))
        grown.append(resident("VmHWM") - before)
    return max(grown)


def resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", help="where to draw the line")
    parser.add_argument("--run", type=int, help="a length to compute, too")
    parser.add_argument("--heads", type=int, default=1)
    arguments = parser.parse_args()
    rows = []
    for length in [arguments.run] if arguments.run else LENGTHS:
        rows.append(row_of(length, arguments.heads, bool(arguments.run)))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.picture:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
