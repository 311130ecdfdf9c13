"""`tfm cost CONFIG`: parameters, FLOPs and memory of a model at a length, without running it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from tfm.analysis import costs
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import AttentionPattern, Config, ModelConfig, require

PICTURES = (".png", ".pdf", ".svg")
"""Kinds of file that a picture can be written to."""


@dataclass(frozen=True)
class CostOptions:
    """Parameters, FLOPs and memory of a model at a length."""

    config_file: tyro.conf.Positional[Path]
    """Python file whose get_config() gives the config."""
    config: Annotated[Config, tyro.conf.arg(name="")]
    """The config of the file, with the options below put in."""
    length: int = 1024
    """Tokens of a row, of each side."""
    batch: int = 1
    """Rows."""
    dtype: Literal["bf16", "fp16", "fp32", "int8"] = "bf16"
    """Of scores, keys and values in memory."""
    window: int = 512
    """Keys that the window pattern sees."""
    plot: Path | None = None
    """PNG, PDF or SVG file: the costs against the length."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: show_costs(parse(CostOptions, arguments, prog="tfm cost")))


def show_costs(options: CostOptions) -> int:
    """Print the tables and draw the picture; give the exit code."""
    for name in ("length", "batch", "window"):
        require(getattr(options, name) > 0, f"--{name}", getattr(options, name), "it must be above 0")
    require(options.plot is None or options.plot.suffix in PICTURES, "--plot", str(options.plot),
            f"it must end in one of {', '.join(PICTURES)}")
    model, length = options.config.model, options.length
    require(model.position != "learned" or length <= model.max_positions, "--length", length,
            f"the model has {model.max_positions} learned positions")
    console = Console(highlight=False)
    for table in (_parameters(model), _flops(model, options), _pairs(options), _memory(model, options),
                  _layer_types(model, options)):
        console.print(table)
    if options.plot is not None:
        from tfm.analysis.cost_plots import plot_costs

        plot_costs(model, length, options.plot, bytes_per_element=costs.DTYPE_BYTES[options.dtype],
                   window=options.window)
        console.print(str(options.plot), soft_wrap=True)
    return 0


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def _parameters(model: ModelConfig) -> Table:
    table, counts = _table("parameters", "part", "number", "share"), costs.parameter_counts(model)
    total = sum(counts.values())
    for part, count in [*counts.items(), ("all", total)]:
        table.add_row(part, f"{count:,}", f"{count / total:.1%}")
    return table


def _flops(model: ModelConfig, options: CostOptions) -> Table:
    forward = costs.forward_flops(model, options.batch, options.length)
    training = costs.training_flops(model, options.batch, options.length)
    table = _table(f"FLOPs of {options.batch:,} x {options.length:,} tokens", "part", "forward", "share",
                   "training step")
    total = sum(forward.values())
    for part in forward:
        table.add_row(part, f"{forward[part]:.4g}", f"{forward[part] / total:.1%}", f"{training[part]:.4g}")
    table.add_row("all", f"{total:.4g}", "100.0%", f"{sum(training.values()):.4g}")
    return table


def _pairs(options: CostOptions) -> Table:
    window = AttentionPattern("window", window=options.window)
    causal = costs.visited_pairs(options.length, causal=True)
    table = _table(f"pairs of {options.length:,} tokens visited, one head of one layer", "pattern", "pairs",
                   "causal / this")
    for name, pairs in (("full", costs.visited_pairs(options.length)), ("causal", causal),
                        (f"causal window of {options.window:,}",
                         costs.visited_pairs(options.length, window, causal=True))):
        table.add_row(name, f"{pairs:,}", f"{causal / pairs:.1f}")
    return table


def _memory(model: ModelConfig, options: CostOptions) -> Table:
    size, length, batch = costs.DTYPE_BYTES[options.dtype], options.length, options.batch
    table = _table(f"memory in {options.dtype}", "what", "GB", "bytes")
    depth = model.encoder_layers + model.decoder_layers
    stored = costs.score_matrix_bytes(length, bytes_per_element=size)
    rows = [("scores of one head of one layer, if stored", stored),
            (f"scores of {batch:,} x {depth} layers x {model.num_heads} heads, if stored",
             stored * batch * depth * model.num_heads)]
    if options.dtype != "int8":
        needed = costs.kernel_memory(length, head_dim=model.resolved_head_dim, dtype=options.dtype)
        rows.append(("our kernel for one head: temporaries (from the compiler)", needed.temporaries))
        rows.append(("our kernel for one head: output", needed.output))
    if model.decoder_layers:
        rows += [(f"KV cache of {batch:,} x {length:,} tokens: {name}",
                  costs.kv_cache_bytes(variant, batch, length, bytes_per_element=size))
                 for name, variant in costs.cache_variants(model, options.window).items()]
    for name, number in rows:
        table.add_row(name, f"{number / 1e9:,.4f}", f"{number:,}")
    return table


def _layer_types(model: ModelConfig, options: CostOptions) -> Table:
    sizes = f"n = {options.length:,}, d = {model.d_model:,}, k = 3, r = {options.window:,}"
    table = _table(f"Table 1 of the paper: {sizes}", "layer", "operations", "in sequence", "longest path")
    for row in costs.layer_types(options.length, model.d_model, neighbourhood=options.window):
        table.add_row(row.name, f"{row.complexity:.4g}", f"{row.sequential:,}", f"{row.path:,}")
    return table
