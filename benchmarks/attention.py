"""Attention on one device: milliseconds, extra memory and share of the matrix-product peak, as JSON lines.

    python benchmarks/attention.py --lengths 1024 2048 4096 8192 --patterns causal window
    python benchmarks/attention.py --lengths 131072 --heads 1 --implementations blockwise

Every implementation runs in a process of its own; the processes of one line of the table take turns, so that a slow
spell of the machine falls on all of them.  A turn begins when the machine is idle, since a process goes on freeing
gigabytes after its answer.  Quote ratios between the rows of one run, not times.  All that is JAX is compiled as
`train.py` compiles its steps (`tfm.decoding.program`).  `torch-tuned` is torch with the fast path of its math
library on any x86 processor (which needs a C compiler here) and huge pages.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from cores import Cores, core_to_core
from idle import wait_until_idle
from torch_tuned import HUGE_PAGES, fast_path

LENGTHS = [1024, 2048, 4096, 8192]
PATTERNS = ["causal", "window", "longformer", "bigbird", "linear"]
IMPLEMENTATIONS = ["blockwise", "causal-only", "plain", "jax.nn", "torch", "torch-tuned"]
SECONDS = 0.8  # of a turn, at least one call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--patterns", nargs="+", default=["causal"], choices=PATTERNS)
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS)
    parser.add_argument("--modes", nargs="+", default=["forward", "both"], choices=["forward", "both"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--max-gib", type=float, default=14.0, help="leave out what stores larger score matrices")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", choices=["near", "far"], help="measure while the cores are so (cores.py)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(**json.loads(arguments.worker))
        return
    with tempfile.TemporaryDirectory() as folder:
        peak = run_alone(dict(implementation="peak", dtype=arguments.dtype), folder)["gflops"]
        print(json.dumps(dict(bench="peak", dtype=arguments.dtype, gflops=peak)), flush=True)
        cores = Cores(folder, arguments.cores)
        for case in cases(arguments):
            for row in measure(case, arguments, peak, folder, cores):
                print(json.dumps(row), flush=True)


def cases(arguments: argparse.Namespace) -> Iterator[dict]:
    for length in arguments.lengths:
        for pattern in arguments.patterns:
            for mode in arguments.modes:
                yield dict(length=length, pattern=pattern, mode=mode, heads=arguments.heads, dtype=arguments.dtype)


def measure(case: dict, arguments: argparse.Namespace, peak: float, folder: str, cores: Cores) -> Iterator[dict]:
    """Lets the implementations of one case take turns; a row for each."""
    stored = case["heads"] * case["length"] ** 2 * 4 * (4 if case["mode"] == "both" else 2) / 2**30
    workers, rows = {}, {}
    for name in arguments.implementations:
        if name != "blockwise" and case["pattern"] != "causal":
            continue
        if name in ("plain", "jax.nn") and stored > arguments.max_gib:
            yield dict(bench="attention", **case, implementation=name, left_out=f"{stored:.0f} GiB of scores")
            continue
        workers[name] = Worker(dict(case, implementation=name, block_size=arguments.block_size), folder)
    for _ in range(arguments.repeats):
        for name, worker in workers.items():
            rows.setdefault(name, []).append(cores.measured(worker.ask))
    for name, worker in workers.items():
        worker.close()
        seconds = statistics.median(r["seconds"] for r in rows[name])
        gflops = worker.ready["flops"] / seconds / 1e9
        yield dict(
            bench="attention",
            **case,
            implementation=name,
            ms=round(seconds * 1e3, 2),
            extra_mib=round(max(r["extra_mib"] for r in rows[name]), 1),
            gflops=round(gflops, 1),
            peak_share=round(gflops / peak, 3),
            **core_to_core(rows[name]),
        )


class Worker:
    """A process with one compiled function; each question makes it run once or more."""

    def __init__(self, settings: dict, folder: str) -> None:
        command = [sys.executable, __file__, "--worker", json.dumps(settings)]
        tuned = fast_path(folder) | HUGE_PAGES if settings["implementation"] == "torch-tuned" else {}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=os.environ | tuned)
        self.ready = self._read()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self) -> dict:
        wait_until_idle()
        print("run", file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def run_alone(settings: dict, folder: str) -> dict:
    worker = Worker(settings, folder)
    worker.close()
    return worker.ready


def serve(implementation: str, dtype: str, **case) -> None:
    """A worker: tells the work of a call in FLOP, then answers each line with the time of one."""
    if implementation == "peak":
        print(json.dumps(dict(gflops=round(matrix_product_peak(dtype), 1))), flush=True)
        return
    make = torch_call if implementation.startswith("torch") else jax_call
    call = make(implementation=implementation, dtype=dtype, **case)
    call()
    print(json.dumps(dict(flops=work(case))), flush=True)
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_mib("VmRSS")
    for _ in sys.stdin:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        start, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - start < SECONDS:
            call()
            count += 1
        seconds = (time.perf_counter() - start) / count
        print(json.dumps(dict(seconds=seconds, extra_mib=memory_mib("VmHWM") - before)), flush=True)


def memory_mib(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def matrix_product_peak(dtype: str) -> float:
    """GFLOP/s of the best of some products of 2048 x 2048 matrices."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((2048, 2048), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    product(x).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        product(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times) / 1e9


def rule_of(pattern: str, length: int):
    from tfm import masks

    return {
        "causal": lambda: masks.Causal(),
        "window": lambda: masks.sliding_window(512),
        "longformer": lambda: masks.longformer(512, tokens=[0]),
        "bigbird": lambda: masks.bigbird(length),
    }[pattern]()


def work(case: dict) -> float:
    """FLOP of the pairs that see each other: two products forward, five backward; linear: the states and chunks."""
    length, heads, dim = case["length"], case["heads"], 64
    if case["pattern"] == "linear":
        forward = 2 * heads * length * (128 * (2 * dim + 1) + 2 * dim * (dim + 1))
        return forward * (4 if case["mode"] == "both" else 1)
    forward = 4 * dim * heads * rule_of(case["pattern"], length).num_pairs(length, length)
    return forward * (3.5 if case["mode"] == "both" else 1)


def jax_call(implementation: str, pattern: str, length: int, heads: int, mode: str, dtype: str, block_size) -> Callable:
    import jax

    from tfm.decoding.program import compiler_options

    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, cotangent = (jax.random.normal(k, (1, length, heads, 64), dtype) for k in keys)
    attend = attend_function(implementation, pattern, length, block_size)

    def both(query, key, value, cotangent):
        output, pull = jax.vjp(attend, query, key, value)
        return output, pull(cotangent)

    jitted = jax.jit(both if mode == "both" else attend, compiler_options=compiler_options())
    arguments = (query, key, value, cotangent)[: 4 if mode == "both" else 3]
    return lambda: jax.block_until_ready(jitted(*arguments))


def attend_function(implementation: str, pattern: str, length: int, block_size: int | None) -> Callable:
    import jax
    import jax.numpy as jnp

    from tfm.ops import attention, linear_attention

    if implementation == "plain":

        def attend(query, key, value):
            scores = jnp.einsum("BTHD,BSHD->BHTS", query, key) / query.shape[-1] ** 0.5
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
            return jnp.einsum("BHTS,BSHD->BTHD", jax.nn.softmax(scores), value)

        return attend
    if implementation == "jax.nn":
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    if implementation == "causal-only":
        import causal_only

        return causal_only.attention
    if pattern == "linear":
        return lambda q, k, v: linear_attention(q, k, v, causal=True)
    rule = rule_of(pattern, length)
    return lambda q, k, v: attention(q, k, v, mask=rule, implementation="blockwise", block_size=block_size)


def torch_call(length: int, heads: int, mode: str, dtype: str, **_) -> Callable:
    """torch's scaled_dot_product_attention as shipped."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(0)
    made = [torch.randn(1, heads, length, 64, dtype=getattr(torch, dtype)) for _ in range(4)]
    query, key, value, cotangent = made
    if mode == "forward":

        def forward() -> None:
            with torch.no_grad():
                scaled_dot_product_attention(query, key, value, is_causal=True)

        return forward

    def both() -> None:
        for x in (query, key, value):
            x.requires_grad_()
            x.grad = None
        scaled_dot_product_attention(query, key, value, is_causal=True).backward(cotangent)

    return both


if __name__ == "__main__":
    main()
