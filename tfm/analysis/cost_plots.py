"""Costs against length as a picture."""

from __future__ import annotations

from pathlib import Path

from tfm.analysis.costs import (
    PARTS,
    cache_variants,
    forward_flops,
    kv_cache_bytes,
    layer_types,
    score_matrix_bytes,
    visited_pairs,
)
from tfm.config import AttentionPattern, ModelConfig


def plot_costs(config: ModelConfig, length: int, path: Path, *, bytes_per_element: int = 2, window: int = 512) -> None:
    """Draw FLOPs by part, pairs visited, memory and Table 1 against the length, up to `length`.

    Args:
        config: the architecture.
        length: greatest length.
        path: PNG, PDF or SVG file to write.
        bytes_per_element: of scores and cached keys and values.
        window: of the window pattern.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = [n for n in (2**i for i in range(5, 40)) if n < length] + [length]
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    (flops, pairs), (memory, table) = figure.subplots(2, 2)
    by_length = [forward_flops(config, 1, n) for n in lengths]
    for part in PARTS:
        flops.plot(lengths, [costs[part] for costs in by_length], label=part)
    flops.set(title="FLOPs of one forward pass", ylabel="FLOPs")
    local = AttentionPattern("window", window=window)
    pairs.plot(lengths, [visited_pairs(n) for n in lengths], label="full")
    pairs.plot(lengths, [visited_pairs(n, causal=True) for n in lengths], label="causal")
    pairs.plot(lengths, [visited_pairs(n, local, causal=True) for n in lengths], label=f"causal window of {window:,}")
    pairs.set(title="pairs of tokens visited, one head", ylabel="pairs")
    memory.plot(lengths, [score_matrix_bytes(n, bytes_per_element=bytes_per_element) for n in lengths],
                label="scores of one head and layer, if stored")
    if config.decoder_layers:
        for name, variant in cache_variants(config, window).items():
            memory.plot(lengths, [kv_cache_bytes(variant, 1, n, bytes_per_element=bytes_per_element) for n in lengths],
                        label=f"KV cache: {name}")
    memory.set(title="memory", ylabel="bytes")
    rows = [layer_types(n, config.d_model, neighbourhood=window) for n in lengths]
    for i, row in enumerate(rows[0]):
        table.plot(lengths, [at[i].complexity for at in rows], label=row.name)
    table.set(title=f"Table 1: operations of a layer, d = {config.d_model:,}", ylabel="operations")
    for axes in (flops, pairs, memory, table):
        axes.set(yscale="log", xlabel="tokens")
        axes.set_xscale("log", base=2)  # the lengths are powers of 2, and other ticks would run into each other
        axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
