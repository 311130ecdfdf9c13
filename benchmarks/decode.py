"""Decoding speed of a random Marian model: target tokens per second and the machine's limit, as JSON lines.

    python benchmarks/decode.py --sizes small --batches 1 32 --beams 1 4
    python benchmarks/decode.py --implementations tfm tfm-bfloat16 tfm-int8 huggingface ctranslate2 ctranslate2-int8

Every implementation decodes exactly --target-length tokens from the same --source-length tokens with the same weights.
Each runs in a process of its own and the processes take turns, so that a slow spell of the machine falls on all of
them: quote ratios between the rows of one run. "same" is the share of tokens that equal those of the first
implementation. "limit" is what the weights' bytes (read once a step) over the bandwidth of reading an array of that
size, or the products' FLOPs over the matrix-product peak, would allow, whichever is less; both are measured first.
"times" is the speed relative to each peer's, "core_to_core_ns" how far apart the cores were (`cores.py`). The whole
table takes about ten minutes on two idle cores.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cores import Cores, core_to_core

SIZES = {
    "small": dict(d_model=256, d_ff=1024, heads=4, layers=3, vocab=8000),
    "base": dict(d_model=512, d_ff=2048, heads=8, layers=6, vocab=37000),
    "tiny": dict(d_model=32, d_ff=64, heads=4, layers=1, vocab=128),
}
IMPLEMENTATIONS = ["tfm", "tfm-bfloat16", "tfm-int8", "huggingface", "ctranslate2", "ctranslate2-int8"]
EOS, UNK = 0, 1
Translate = Callable[[Any, int], Any]  # (source ids [B, S], beam size) -> ids [B, T]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=list(SIZES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS)
    parser.add_argument("--source-length", type=int, default=32)
    parser.add_argument("--target-length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--cores", choices=["near", "far"], help="measure while the cores are so (cores.py)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(json.loads(arguments.worker))
        return
    machine = ask_once(dict(implementation="machine"))
    print(json.dumps(dict(bench="machine", **machine)), flush=True)
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(size, arguments, folder, machine):
                print(json.dumps(row), flush=True)


def measure(size: str, arguments: argparse.Namespace, folder: str, machine: dict) -> Iterator[dict]:
    """The rows of one size, cell by cell."""
    case = dict(size=size, folder=folder, source=arguments.source_length, target=arguments.target_length)
    cores = Cores(folder, arguments.cores)
    ask_once(dict(case, implementation="prepare", wanted=arguments.implementations))
    workers = {name: Worker(dict(case, implementation=name), arguments.threads) for name in arguments.implementations}
    for batch in arguments.batches:
        for beam in arguments.beams:
            replies: dict[str, list[dict]] = {}
            for turn in range(arguments.turns):
                for name, worker in workers.items():
                    reply = cores.measured(partial(worker.ask, dict(batch=batch, beam=beam)))
                    if turn or "error" in reply:  # the first turn compiles
                        replies.setdefault(name, []).append(reply)
            yield from table(replies, dict(bench="decode", size=size, batch=batch, beam=beam), case, machine)
    for worker in workers.values():
        worker.close()


def table(replies: dict[str, list[dict]], cell: dict, case: dict, machine: dict) -> list[dict]:
    """One row for each implementation of a cell."""
    rows, reference, tokens = [], None, cell["batch"] * case["target"]
    for name, got in replies.items():
        if "error" in got[-1]:
            rows.append(dict(cell, implementation=name, left_out=got[-1]["error"]))
            continue
        ids = got[-1]["ids"]
        reference = reference or ids
        pairs = [a == b for row, other in zip(ids, reference, strict=True) for a, b in zip(row, other, strict=False)]
        seconds = statistics.median(r["seconds"] for r in got)
        bound = limit(cell, case, machine, name)
        rows.append(
            dict(
                cell,
                implementation=name,
                tokens_per_s=round(tokens / seconds, 1),
                same=round(sum(pairs) / len(pairs), 3),
                limit_tokens_per_s=round(tokens / bound["seconds"], 1),
                share_of_limit=round(bound["seconds"] / seconds, 3),
                limited_by=bound["by"],
                **core_to_core(got),
            )
        )
    speeds = {row["implementation"]: row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    for row in rows:
        if row["implementation"].startswith("tfm") and "tokens_per_s" in row:
            peers = {name: speed for name, speed in speeds.items() if not name.startswith("tfm")}
            row["times"] = {name: round(row["tokens_per_s"] / speed, 2) for name, speed in peers.items()}
    return rows


def limit(cell: dict, case: dict, machine: dict, name: str) -> dict:
    """The least seconds for one call by the decoder's weights alone: bytes over bandwidth, FLOPs over peak."""
    weights, steps = decoder_weights(case["size"]), case["target"]
    kind = name.partition("-")[2] or "float32"
    memory = steps * weights * {"float32": 4, "bfloat16": 2, "int8": 1}[kind] / machine["bytes_per_s"][case["size"]]
    peak = machine["flops_float32" if kind == "float32" else "flops_bfloat16"]  # products with int8 weights too
    products = steps * 2 * weights * cell["batch"] * cell["beam"] / peak
    return dict(seconds=max(memory, products), by="weight bytes" if memory > products else "products")


def decoder_weights(name: str) -> int:
    """Numbers that every step reads: projections but cross-attention's keys and values, feed-forward, output."""
    size = SIZES[name]
    width = size["d_model"]
    return size["layers"] * (6 * width * width + 2 * width * size["d_ff"]) + size["vocab"] * width


class Worker:
    """A process with one implementation; it answers requests one by one."""

    def __init__(self, case: dict, threads: int | None = None) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(case)]
        environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(threads or os.cpu_count()))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, request: dict) -> dict:
        """The answer, or {"error": ...}."""
        assert self.process.stdin and self.process.stdout
        if self.process.poll() is None:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else dict(error="the process ended")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def ask_once(case: dict) -> dict:
    """The one answer of a process of its own."""
    worker = Worker(case)
    reply = worker.ask({})
    worker.close()
    if "error" in reply:
        raise SystemExit(f"{case['implementation']}: {reply['error']}")
    return reply


def serve(case: dict) -> None:
    """Answer requests from stdin on stdout until stdin ends; what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    translate, failure = None, None
    try:
        if case["implementation"] in ("machine", "prepare"):
            answer = measure_machine() if case["implementation"] == "machine" else prepare(case)
        else:
            translate = make(case)
    except ImportError as error:
        failure = str(error)
    for line in sys.stdin:
        if translate is not None:
            answer = timed(translate, case, json.loads(line))
        elif failure is not None:
            answer = dict(error=failure)
        print(json.dumps(answer), file=replies, flush=True)


def timed(translate: Translate, case: dict, request: dict) -> dict:
    """Seconds of one call: the best of as many as fit half a second, and of two at least, and its tokens.

    The first call of a turn finds another process's data in the caches.
    """
    ids = sources(case, request["batch"])
    seconds: list[float] = []
    while sum(seconds) < 0.5 or len(seconds) < 2:
        start = time.perf_counter()
        found = translate(ids, request["beam"])
        seconds.append(time.perf_counter() - start)
    return dict(seconds=min(seconds), ids=found.tolist())


def sources(case: dict, batch: int) -> Any:
    import numpy as np

    ids = np.random.default_rng(1).integers(2, SIZES[case["size"]]["vocab"] - 1, (batch, case["source"]))
    ids[:, -1] = EOS
    return ids.astype(np.int32)


def measure_machine() -> dict:
    """Peak of matrix products and bandwidth of reading, as XLA reaches them here."""
    import jax
    import jax.numpy as jnp

    def best(f: Callable[..., Any], *inputs: Any) -> float:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(f(*inputs))
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    size = 2048
    found: dict[str, Any] = dict(device=jax.devices()[0].device_kind, cores=os.cpu_count())
    for dtype in ("float32", "bfloat16"):
        x = jnp.ones((size, size), dtype)
        product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
        found[f"flops_{dtype}"] = 2 * size**3 / best(product, x)
    # Of arrays as large as the weights: small ones stay in the last cache.
    found["bytes_per_s"] = {}
    for name in SIZES:
        x = jnp.ones((64, decoder_weights(name) // 64))
        found["bytes_per_s"][name] = x.nbytes / best(jax.jit(lambda x: jnp.max(x, axis=1)), x)
    return found


def prepare(case: dict) -> dict:
    """Write the one model in each form that is wanted."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    size, longest = SIZES[case["size"]], max(case["source"], case["target"] + 1)
    torch.manual_seed(0)
    pad = size["vocab"] - 1
    config = MarianConfig(
        vocab_size=size["vocab"],
        d_model=size["d_model"],
        encoder_layers=size["layers"],
        decoder_layers=size["layers"],
        encoder_attention_heads=size["heads"],
        decoder_attention_heads=size["heads"],
        encoder_ffn_dim=size["d_ff"],
        decoder_ffn_dim=size["d_ff"],
        activation_function="relu",
        scale_embedding=False,  # so that random weights give varied tokens
        max_position_embeddings=longest,
        pad_token_id=pad,
        eos_token_id=EOS,
        decoder_start_token_id=pad,
        bos_token_id=None,
        forced_eos_token_id=None,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
    )
    model = MarianMTModel(config).eval()
    model.save_pretrained(os.path.join(case["folder"], "huggingface"))
    if any(name.startswith("ctranslate2") for name in case["wanted"]):
        with contextlib.suppress(ImportError):  # its workers will say so
            convert(model, case)
    return {}


def names(vocab: int) -> dict[str, int]:
    """A vocabulary for CTranslate2, which asks for one."""
    found = {f"t{i}": i for i in range(vocab)}
    for i, name in ((EOS, "</s>"), (UNK, "<unk>"), (vocab - 1, "<pad>")):
        del found[f"t{i}"]
        found[name] = i
    return found


def convert(model: Any, case: dict) -> None:
    from ctranslate2.converters.transformers import MarianMTLoader

    class Tokens:
        eos_token, unk_token = "</s>", "<unk>"

        def get_vocab(self) -> dict[str, int]:
            return names(SIZES[case["size"]]["vocab"])

    for kind in ("float32", "int8"):
        spec = MarianMTLoader()(model, Tokens())
        spec.validate()
        spec.optimize(quantization=kind)
        path = os.path.join(case["folder"], f"ctranslate2-{kind}")
        os.makedirs(path)
        spec.save(path)


def make(case: dict) -> Translate:
    """The implementation's function."""
    name = case["implementation"]
    if name.startswith("tfm"):
        return make_tfm(case, name.partition("-")[2])
    if name == "huggingface":
        return make_huggingface(case)
    return make_ctranslate2(case, name.partition("-")[2] or "float32")


def make_tfm(case: dict, weights: str) -> Translate:
    import jax
    import numpy as np

    from tfm.decoding import logits
    from tfm.inference import Search, generate
    from tfm.interop import from_huggingface
    from tfm.models.narrow import narrow_weights
    from tfm.models.stepper import prepared
    from tfm.parallel.host import keep_freed_memory, move_to_huge_pages

    keep_freed_memory()  # as decode.py does
    config, params = from_huggingface(os.path.join(case["folder"], "huggingface"))
    if weights:
        config, params = narrow_weights(config, params, weights)
    config, params = prepared(config, jax.device_put(params))
    pad = config.vocab_size - 1
    rules = (logits.Suppress((EOS, pad)),)

    cells: set[tuple[int, int]] = set()

    def translate(ids: Any, beam: int) -> Any:
        search = Search(beam_size=beam, alpha=1.0, allow=rules, pad_id=pad, scored=beam > 1)
        limits = [case["target"]] * len(ids)
        found = generate(config, params, ids.tolist(), search, limits=limits, start_id=pad, batch_size=len(ids))
        if (len(ids), beam) not in cells:
            cells.add((len(ids), beam))
            move_to_huge_pages()  # as decode.py does after a minute
        return np.array([row[0].ids for row in found])

    return translate


def make_huggingface(case: dict) -> Translate:
    import torch
    from transformers import GenerationConfig, MarianMTModel

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = MarianMTModel.from_pretrained(os.path.join(case["folder"], "huggingface")).eval()
    pad, steps = model.config.pad_token_id, case["target"]

    def translate(ids: Any, beam: int) -> Any:
        source = torch.from_numpy(ids).long()
        settings = GenerationConfig(
            num_beams=beam,
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            suppress_tokens=[EOS, pad],
            pad_token_id=pad,
            eos_token_id=EOS,
            decoder_start_token_id=pad,
        )
        with torch.inference_mode():
            found = model.generate(source, attention_mask=torch.ones_like(source), generation_config=settings)
        return found[:, 1:].numpy()

    return translate


def make_ctranslate2(case: dict, kind: str) -> Translate:
    import ctranslate2
    import numpy as np

    translator = ctranslate2.Translator(
        os.path.join(case["folder"], f"ctranslate2-{kind}"),
        device="cpu",
        compute_type=kind,
        inter_threads=1,
        intra_threads=int(os.environ["OMP_NUM_THREADS"]),
    )
    number = names(SIZES[case["size"]]["vocab"])
    name = {i: n for n, i in number.items()}
    steps = case["target"]

    def translate(ids: Any, beam: int) -> Any:
        found = translator.translate_batch(
            [[name[i] for i in row] for row in ids.tolist()],
            beam_size=beam,
            min_decoding_length=steps,
            max_decoding_length=steps,
        )
        return np.array([[number[token] for token in result.hypotheses[0]] for result in found])

    return translate


if __name__ == "__main__":
    main()
