"""Speed of a training step against batch, length, depth and width, beside the roofline, as JSON lines and a picture.

    python benchmarks/train_sizes.py docs/images/train_sizes.png

A decoder of GPT-2's form, float32; one size changes at a time. The roofline is the least of the peak of matrix products
and of bytes moved times the speed of memory, both measured in the same run; the bytes are those of the compiled step,
each fusion reading and writing once.
"""

import json
import statistics
import sys
import time
from typing import Any

from train import RECIPE, tfm_step, training_flops

CENTRE = dict(batch=8, length=256, layers=4, d_model=256)
SIZES = dict(batch=(1, 2, 4, 8, 16), length=(32, 64, 128, 256, 512, 1024), layers=(1, 2, 4, 8),
             d_model=(64, 128, 256, 512, 768))
STEPS = 7


def main() -> None:
    from tfm.parallel.host import keep_freed_memory, run_in_turn

    keep_freed_memory()
    run_in_turn()
    machine = measure_machine()
    print(json.dumps(dict(bench="machine", **machine)), flush=True)
    rows = []
    for name, values in SIZES.items():
        for value in values:
            row = dict(bench="train_sizes", varied=name, **measure(CENTRE | {name: value}, machine))
            rows.append(row)
            print(json.dumps(row), flush=True)
    draw(rows, machine, sys.argv[1])


def measure_machine() -> dict:
    """Peak of matrix products and speed of memory, float32."""
    import jax
    import jax.numpy as jnp

    def fastest(function: Any, *arguments: Any) -> float:
        seconds = []
        for _ in range(8):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    x, y = jnp.ones((2048, 2048)), jnp.ones(1 << 26)
    return dict(flops=2 * 2048**3 / fastest(jax.jit(jnp.matmul), x, x),
                bytes_per_s=2 * y.nbytes / fastest(jax.jit(lambda v: v + 1.0), y))


def measure(sizes: dict, machine: dict) -> dict:
    """One row."""
    import jax

    from tfm.analysis.hlo import parse_program

    work = dict(kind="gpt2", d_ff=4 * sizes["d_model"], heads=sizes["d_model"] // 64, vocab=8000, smoothing=0.0,
                **sizes, **RECIPE)
    update, state, inputs = tfm_step("tfm", work)
    program = update.lower(state, inputs[0]).compile()
    traffic = parse_program(program.as_text()).traffic()
    seconds = []
    for i in range(STEPS):
        start = time.perf_counter()
        state, _ = program(state, inputs[i % len(inputs)])
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    step, flops = statistics.median(seconds[1:]), training_flops(work)
    bound = min(machine["flops"], flops / traffic * machine["bytes_per_s"])
    return dict(**sizes, step_ms=round(1e3 * step, 2), tokens_per_s=round(sizes["batch"] * sizes["length"] / step),
                flops=flops, bytes=round(traffic), flops_per_byte=round(flops / traffic, 2),
                gflops=round(flops / step / 1e9, 1), share_of_peak=round(flops / step / machine["flops"], 3),
                share_of_roofline=round(flops / step / bound, 3))


def draw(rows: list[dict], machine: dict, path: str) -> None:
    """A panel for each size, and the roofline with all steps on it."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 3.6), layout="constrained")
    panels = figure.subplots(1, len(SIZES) + 1)
    for axes, name in zip(panels, SIZES, strict=False):
        chosen = [row for row in rows if row["varied"] == name]
        axes.plot([row[name] for row in chosen], [row["tokens_per_s"] for row in chosen], "o-")
        axes.set(xscale="log", yscale="log", xlabel=name, ylabel="tokens/s", ylim=(1000, 50_000))
        axes.set_xticks([row[name] for row in chosen], [str(row[name]) for row in chosen])
        axes.set_yticks([1000, 2000, 5000, 10_000, 20_000, 50_000], ["1k", "2k", "5k", "10k", "20k", "50k"])
        axes.minorticks_off()
        axes.grid(alpha=0.3, which="both")
    roof, x = panels[-1], np.geomspace(1, 300, 100)
    roof.plot(x, np.minimum(machine["flops"], x * machine["bytes_per_s"]) / 1e9, color="black", label="roofline")
    for name in SIZES:
        chosen = [row for row in rows if row["varied"] == name]
        roof.plot([row["flops_per_byte"] for row in chosen], [row["gflops"] for row in chosen], "o", label=name)
    roof.set(xscale="log", yscale="log", xlabel="FLOPs per byte moved", ylabel="GFLOP/s", xlim=(2, 200))
    roof.set_yticks([100, 200, 300, 500], ["100", "200", "300", "500"])
    roof.minorticks_off()
    roof.grid(alpha=0.3)
    roof.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
