"""Speed of training steps beside torch and Hugging Face: tokens per second and peak memory, as JSON lines.

    python benchmarks/train.py --cases small base
    python benchmarks/train.py --cases gpt2 bert
    python benchmarks/train.py --cases base --implementations tfm tfm-bf16 torch-eager torch-eager-bf16@tuned
    python benchmarks/train.py --cases small --implementations tfm tfm-without-hash tfm-only-hash tfm-only-nothing

All do the same work: float32, dropout 0.1 on embeddings, sub-layers, attention weights and (translation) the inner
feed-forward layer, the loss over every token, Adam. Each runs in a process of its own and the processes take turns, so
that a slow spell of the machine falls on all of them; a turn begins when the machine is idle. Quote ratios between the
rows of one run. Without torch or transformers their rows say so.

Names: `tfm` is the library as its commands run it. `tfm-without-A+B` switches techniques off, `tfm-only-A` all others;
they are hash (dropout bits by counter hash; else threefry), projection (its own backward pass; else JAX's), loss (fused
cross-entropy; else logits written out), norm (its own backward pass; else JAX's), stored (activations turned over as
arrays of their own for the gradient of a large matrix; else as they lie, or bfloat16 ones turned over by whatever reads
them), narrow (bfloat16 operands turned over for products over rows; else XLA multiplies float32 copies; without stored,
too) and malloc (freed memory kept, on huge pages). A peer's name may end in `@tuned`: its math library's fast path on
any x86 processor (which needs a C compiler here) and huge pages; or in `@kept`: the fast path and freed memory kept.
`-bf16` multiplies in bfloat16. The peak that shares are of is the best of eight products of 2048 x 2048 matrices, which
take turns with the rest; `share_of_median` is of the median of the eight.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from idle import wait_until_idle
from torch_tuned import HUGE_PAGES, fast_path

TRANSLATION = ["tfm", "torch-eager", "torch-compile", "huggingface"]
CASES: dict[str, dict[str, Any]] = {
    "small": dict(kind="translation", d_model=256, d_ff=1024, heads=4, layers=3, vocab=8000, batch=64, length=32),
    "base": dict(kind="translation", d_model=512, d_ff=2048, heads=8, layers=6, vocab=37000, batch=32, length=32),
    "gpt2": dict(kind="gpt2", d_model=768, d_ff=3072, heads=12, layers=12, vocab=50257, batch=2, length=512),
    "bert": dict(kind="bert", d_model=768, d_ff=3072, heads=12, layers=12, vocab=30522, batch=8, length=128),
    "tiny": dict(kind="translation", d_model=32, d_ff=64, heads=4, layers=1, vocab=128, batch=4, length=8),
    "tiny-gpt2": dict(kind="gpt2", d_model=32, d_ff=128, heads=4, layers=1, vocab=128, batch=4, length=8),
    "tiny-bert": dict(kind="bert", d_model=32, d_ff=128, heads=4, layers=1, vocab=128, batch=4, length=8),
}
TECHNIQUES = ("hash", "projection", "loss", "norm", "stored", "narrow", "malloc")
RECIPE = dict(dropout=0.1, learning_rate=1e-4, betas=(0.9, 0.98), epsilon=1e-9)
BOS, EOS = 1, 2
Step = Callable[[int], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["small", "base"], choices=list(CASES))
    parser.add_argument("--implementations", nargs="+", help="default: tfm and the peers of the case, as shipped")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(json.loads(arguments.worker))
        return
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases:
            default = TRANSLATION if CASES[case]["kind"] == "translation" else ["tfm", "huggingface"]
            for row in measure(case, arguments.implementations or default, arguments, folder):
                print(json.dumps(row), flush=True)


def measure(case: str, names: list[str], arguments: argparse.Namespace, folder: str) -> list[dict]:
    """A row for the machine, whose peak takes its turn as the others do, and one for each implementation."""
    workers, ready, seconds = {}, {}, {name: [] for name in names}
    peak = Worker(dict(implementation="machine"), arguments.threads, folder)
    about, peaks = peak.receive(), []
    for name in names:  # one after the other: each builds and compiles alone
        workers[name] = Worker(dict(case=case, implementation=name), arguments.threads, folder)
        ready[name] = workers[name].receive()
    for _ in range(arguments.turns):
        peaks.append(peak.ask({}))
        for name, worker in workers.items():
            if "error" not in ready[name]:
                ready[name] |= worker.ask(dict(steps=arguments.steps))
                seconds[name] += ready[name].pop("seconds", [])
    for worker in (peak, *workers.values()):
        worker.close()
    machine = {name: statistics.median(turn[name] for turn in peaks) for name in peaks[0]}
    first = statistics.median(seconds[names[0]] or [0.0])
    return [dict(bench="machine", case=case, **about, **machine),
            *(row(case, name, ready[name], seconds[name], first, machine) for name in names)]


def case_of(name: str) -> dict:
    """Sizes and recipe of a case."""
    smoothing = 0.1 if CASES[name]["kind"] == "translation" else 0.0
    return CASES[name] | RECIPE | dict(smoothing=smoothing)


def row(case: str, name: str, ready: dict, seconds: list[float], first: float, machine: dict) -> dict:
    """What one implementation did; `speed` is relative to the first one of the run."""
    cell = dict(bench="train", case=case, implementation=name)
    if "error" in ready:
        return cell | dict(left_out=ready["error"])
    median, work = statistics.median(seconds), case_of(case)
    tokens = work["batch"] * work["length"] * (2 if work["kind"] == "translation" else 1)
    rate = training_flops(work) / median
    dtype = "bfloat16" if "bf16" in name else "float32"
    return cell | dict(
        tokens_per_s=round(tokens / median), speed=round(first / median, 3), step_ms=round(1e3 * median, 1),
        fastest_ms=round(1e3 * min(seconds), 1), slowest_ms=round(1e3 * max(seconds), 1), steps=len(seconds),
        gflops=round(rate / 1e9), share_of_peak=round(rate / machine[f"flops_{dtype}"], 3),
        share_of_median=round(rate / machine[f"median_flops_{dtype}"], 3), **ready)


def training_flops(work: dict) -> int:
    """FLOPs of the matrix products of a step, every pair of tokens counted: three times those of a forward pass."""
    from tfm.analysis.costs import training_flops

    parts = training_flops(model_config(work), work["batch"], work["length"], dense=True)
    return sum(flops for part, flops in parts.items() if part != "softmax")


class Worker:
    """A process with one implementation."""

    def __init__(self, request: dict, threads: int, folder: str) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(request)]
        environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(threads))
        if "@" in request["implementation"]:
            environment |= fast_path(folder)
        if request["implementation"].endswith("@tuned"):
            environment |= HUGE_PAGES
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=environment)

    def receive(self) -> dict:
        """The next answer, or {"error": ...}."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        return json.loads(line) if line else dict(error="the process ended")

    def ask(self, request: dict) -> dict:
        """The answer to a request, made when the machine is idle."""
        assert self.process.stdin
        wait_until_idle()
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.receive()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve(request: dict) -> None:
    """Build, then answer requests from stdin on stdout until stdin ends; what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(answer: dict) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    if request["implementation"] == "machine":
        return serve_peak(reply)
    try:
        start = time.perf_counter()
        step, parameters = make(request["implementation"], case_of(request["case"]))
        loss = step(0)
        first_step = round(time.perf_counter() - start, 1)
        step(1)
        reply(dict(parameters=parameters, first_step_s=first_step, first_loss=loss))
    except ImportError as error:
        return reply(dict(error=str(error)))
    count = 2
    for line in sys.stdin:
        seconds = []
        for _ in range(json.loads(line)["steps"]):
            start = time.perf_counter()
            loss = step(count)
            seconds.append(time.perf_counter() - start)
            count += 1
        reply(dict(seconds=seconds, last_loss=loss,
                   peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))


def serve_peak(reply: Callable[[dict], None]) -> None:
    """Answer each request with the best of some matrix products, as XLA reaches it here, in FLOP/s."""
    import jax
    import jax.numpy as jnp

    size = 2048
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    operands = {dtype: jnp.ones((size, size), dtype) for dtype in ("float32", "bfloat16")}

    def measure() -> dict:
        best = {}
        for dtype, x in operands.items():
            seconds = []
            for _ in range(8):
                start = time.perf_counter()
                jax.block_until_ready(product(x))
                seconds.append(time.perf_counter() - start)
            best[f"flops_{dtype}"] = round(2 * size**3 / min(seconds))
            best[f"median_flops_{dtype}"] = round(2 * size**3 / statistics.median(seconds))
        return best

    measure()
    reply(dict(device=jax.devices()[0].device_kind, cores=os.cpu_count()))
    for _ in sys.stdin:
        reply(measure())


def make(name: str, work: dict) -> tuple[Step, int]:
    """The training step of an implementation, and its number of parameters."""
    base, _, setting = name.partition("@")
    if setting == "kept":
        from tfm.parallel.host import keep_freed_memory

        keep_freed_memory()
    if base.startswith("tfm"):
        return make_tfm(base, work)
    from train_peers import make_peer

    return make_peer(base, work, batches(work))


def batches(work: dict, count: int = 4) -> list[dict[str, Any]]:
    """Random ids without padding, as int32 arrays: what the model reads, and its labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape, found = (work["batch"], work["length"]), []
    for _ in range(count):
        source, labels = rng.integers(4, work["vocab"], (2, *shape), dtype=np.int32)
        source[:, -1] = labels[:, -1] = EOS
        target = np.concatenate([np.full((shape[0], 1), BOS, np.int32), labels[:, :-1]], 1)
        if work["kind"] == "translation":
            found.append(dict(source=source, target=target, labels=labels))
        else:
            found.append(dict(tokens=target if work["kind"] == "gpt2" else source, labels=labels))
    return found


def model_config(work: dict, dtype: str = "float32") -> Any:
    """The case as a ModelConfig."""
    from tfm import ModelConfig
    from tfm.models import presets

    sizes = dict(d_model=work["d_model"], d_ff=work["d_ff"], num_heads=work["heads"], dtype=dtype,
                 dropout_rate=work["dropout"], attention_dropout_rate=work["dropout"])
    if work["kind"] == "gpt2":
        return presets.gpt2(work["vocab"], decoder_layers=work["layers"], **sizes)
    if work["kind"] == "bert":
        return presets.bert_base(work["vocab"], encoder_layers=work["layers"], pooler=False, **sizes)
    return ModelConfig(vocab_size=work["vocab"], encoder_layers=work["layers"], decoder_layers=work["layers"],
                       norm_position="pre", activation_dropout_rate=work["dropout"], **sizes)


def make_tfm(name: str, work: dict) -> tuple[Step, int]:
    """The library's own step, and its number of parameters."""
    import jax

    from tfm.parallel.host import move_to_huge_pages

    update, state, inputs = tfm_step(name, work)

    def run(number: int) -> float:
        nonlocal state
        state, metrics = update(state, inputs[number % len(inputs)])
        jax.block_until_ready(state)
        if number == 1 and "malloc" in techniques_of(name):
            move_to_huge_pages()  # as a long run does after a minute
        return float(metrics["loss"]) / float(metrics["weight"])

    return run, sum(x.size for x in jax.tree.leaves(state.params))


def tfm_step(name: str, work: dict) -> tuple[Any, Any, Any]:
    """(jitted step, state, batches): the model, the loss and the optimizer that the library's commands use."""
    kept = techniques_of(name)
    if "malloc" in kept:
        from tfm.parallel.host import keep_freed_memory

        keep_freed_memory()
    import jax

    from tfm.decoding.program import compiler_options
    from tfm.models import build, init_params
    from tfm.parallel.host import run_in_turn
    from tfm.training import optimizer, step
    from tfm.training.loss import make_loss

    run_in_turn()
    switch_off(set(TECHNIQUES) - kept)
    config = model_config(work, "bfloat16" if "bf16" in name else "float32")
    settings = optimizer.OptimizerConfig(beta1=work["betas"][0], beta2=work["betas"][1], epsilon=work["epsilon"])
    rule = optimizer.make_optimizer(settings, lambda count: work["learning_rate"])
    state = jax.jit(lambda: step.init_state(lambda key: init_params(config, key), rule, 0))()
    loss = make_loss(build(config), config, smoothing=work["smoothing"])
    update = jax.jit(step.make_train_step(loss, rule), donate_argnums=0, compiler_options=compiler_options())
    return update, state, jax.device_put([with_masks(batch) for batch in batches(work)])


def with_masks(batch: dict) -> dict:
    """The batch as the data pipeline gives it: with masks and weights, here without padding."""
    import numpy as np

    masks = {"mask" if name == "tokens" else f"{name}_mask": np.ones(x.shape, bool)
             for name, x in batch.items() if name != "labels"}
    return batch | masks | dict(weights=np.ones(batch["labels"].shape, np.float32))


def techniques_of(name: str) -> set[str]:
    """The techniques that a name leaves on."""
    _, without, off = name.partition("-without-")
    _, only, on = name.partition("-only-")
    named = set((off or on).split("+")) - {""}
    if unknown := named - {*TECHNIQUES, "nothing"}:
        raise SystemExit(f"{name}: no technique is called {', '.join(sorted(unknown))}; there are {TECHNIQUES}")
    return named & set(TECHNIQUES) if only else set(TECHNIQUES) - named if without else set(TECHNIQUES)


def switch_off(techniques: set[str]) -> None:
    """Put the plain form in the place of each technique, for the whole process."""
    import functools
    import importlib

    import jax
    import jax.numpy as jnp

    import tfm.nn.dropout
    import tfm.nn.norms
    import tfm.nn.projection
    import tfm.ops.dense
    import tfm.training.loss
    from tfm.ops.losses import label_smoothed_cross_entropy
    from tfm.ops.products import contract, row_product

    def plain_projection(x: Any, kernel: Any, bias: Any = None, *, dtype: Any = None) -> Any:
        y = jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32).astype(dtype)
        return y if bias is None else y + bias.astype(dtype)

    def plain_loss(hidden: Any, embedding: Any, targets: Any, *, smoothing: float, weights: Any, bias: Any,
                   softcap: Any, parts: Any) -> Any:
        logits = jnp.matmul(hidden, embedding.T.astype(hidden.dtype), preferred_element_type=jnp.float32)
        logits = logits if bias is None else logits + bias
        return jnp.sum(label_smoothed_cross_entropy(logits, targets, smoothing=smoothing, weights=weights))

    def plain_norm(x: Any, scale: Any, bias: Any = None, *, epsilon: float, centred: bool = True) -> Any:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True) if centred else wide
        y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon) * scale
        return (y if bias is None else y + bias).astype(x.dtype)

    if "hash" in techniques:
        tfm.nn.dropout.dropout = functools.partial(tfm.nn.dropout.dropout, bits="threefry")
        tfm.ops.dense.keep_mask = lambda key, rate, *axes: jax.random.bernoulli(
            key, 1.0 - rate, jnp.broadcast_shapes(*(axis.shape for axis in axes)))
    if "projection" in techniques:
        tfm.nn.projection.projection = plain_projection
    if "loss" in techniques:
        tfm.training.loss.fused_cross_entropy_sum = plain_loss
    if "norm" in techniques:
        tfm.nn.norms.layer_norm, tfm.nn.norms.rms_norm = plain_norm, functools.partial(plain_norm, centred=False)
    modules: list[Any] = [importlib.import_module(f"tfm.ops.{name}") for name in ("projection", "losses")]
    if "stored" in techniques:
        modules[0].row_product = lambda x, y, after=None: row_product(x, y)
    if "narrow" in techniques:
        for module in modules:
            module.row_product = lambda x, y, after=None: contract(x, y, (0, 0))


if __name__ == "__main__":
    main()
