"""Draws the pictures of the site with the library's own code.

    python docs/make_pictures.py [--output docs/images] [--run runs/quickstart]

Without a run the attention map is left as it is. `attention_memory.png` comes from `benchmarks/attention_memory.py`,
the pictures under `claims/` from `examples/claims`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.analysis.costs import parameter_counts
from tfm.decoding import beam_search, greedy, length_penalty
from tfm.masks import Causal, Padding, Prefix, Rule, Segments, Window, bigbird, draw, longformer, sliding_window
from tfm.models import presets
from tfm.positions import alibi_slopes, rotary, sinusoidal, t5_bucket

LENGTH = 48
PACKED = np.repeat([0, 1, 2], [20, 18, 10])
MASKS: dict[str, Rule] = {
    "causal": Causal(),
    "window": sliding_window(8),
    "dilated": Window(6, 6, dilation=3),
    "longformer": longformer(12, tokens=[0, 24]),
    "bigbird": bigbird(LENGTH, block_size=4, num_random_blocks=2),
    "prefix": Causal() | Prefix(12),
    "packed": Causal() & Segments(PACKED, PACKED),
    "padded": Padding(np.arange(LENGTH) < 36),
}
PIECES = {"embeddings": "embeddings", "attention": "attention", "feed-forward": "feed-forward", "": "all else"}


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure that is written to a file at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, dpi=80)


def draw_masks(folder: Path) -> None:
    """Each rule as a matrix, by `tfm.masks.draw`."""
    for name, rule in MASKS.items():
        draw(rule, LENGTH, path=folder / f"mask_{name}.png")


def draw_blocks(folder: Path) -> None:
    """A rule's matrix beside its map of blocks: what the kernel skips, visits with the mask, and visits without."""
    length, block = 128, 16
    rule = longformer(32, tokens=range(8))
    with picture(folder / "blocks.png", 9, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        left.imshow(rule.dense(np.arange(length), np.arange(length))[0, 0], cmap="Greys", vmax=1.4)
        kinds = rule.block_map(length, length, block, block)
        right.imshow(kinds, cmap="Blues", vmax=2.6)
        for (i, j), kind in np.ndenumerate(kinds):
            right.text(j, i, ("", "part", "full")[kind], ha="center", va="center", fontsize=7)
        visited = (kinds > 0).mean()
        left.set(title="the rule, pair by pair", xlabel="key", ylabel="query")
        right.set(title=f"its blocks of {block} x {block}: {visited:.0%} are visited", xlabel="block of keys",
                  ylabel="block of queries")


def draw_positions(folder: Path) -> None:
    """What four schemes make of a position or of a distance."""
    distances = np.arange(0, 129)
    with picture(folder / "positions.png", 11, 6) as figure:
        (sines, turns), (slopes, buckets) = figure.subplots(2, 2)
        sines.imshow(sinusoidal(np.arange(64), 64).T, aspect="auto", cmap="RdBu")
        sines.set(title="sinusoidal: a vector for each position", xlabel="position", ylabel="dimension")
        ones = jnp.ones((1, len(distances), 1, 64))
        products = jnp.sum(rotary(ones, distances) * rotary(ones[:, :1], distances[:1]), axis=(0, 2, 3)) / 64
        turns.plot(distances, products)
        turns.set(title="RoPE: q . k of equal vectors", xlabel="distance", ylabel="product over its length")
        for head, slope in enumerate(alibi_slopes(4)):
            slopes.plot(distances, -float(slope) * distances, label=f"head {head}")
        slopes.set(title="ALiBi: added to the scores", xlabel="distance", ylabel="bias", ylim=(-12, 0.5))
        slopes.legend()
        buckets.step(distances, t5_bucket(-distances, bidirectional=False), where="post")
        buckets.set(title="T5: which learned bias", xlabel="distance", ylabel="bucket")


def draw_sizes(folder: Path) -> None:
    """Where the parameters of the published models are: one config, one tree for all."""
    models: dict[str, Callable[..., Any]] = {
        "Transformer base": presets.transformer_base, "BERT base": presets.bert_base, "GPT-2": presets.gpt2,
        "T5 small": presets.t5_small, "BART base": presets.bart_base, "Marian": presets.marian,
        "Llama 7B": presets.llama, "Mistral 7B": presets.mistral}
    counts = {name: parameter_counts(make()) for name, make in models.items()}
    with picture(folder / "sizes.png", 8, 3.8) as figure:
        axes = figure.subplots()
        begun = np.zeros(len(models))
        seen: dict[str, set[str]] = {name: set() for name in models}
        for piece, label in PIECES.items():
            shares = []
            for name, parts in counts.items():
                mine = {part for part in parts if piece in part} - seen[name]
                seen[name] |= mine
                shares.append(sum(parts[part] for part in mine) / sum(parts.values()))
            axes.barh(list(models), shares, left=begun, label=label)
            begun += shares
        for i, parts in enumerate(counts.values()):
            axes.text(1.01, i, f"{sum(parts.values()) / 1e6:,.0f} M", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.set(xlabel="share of the parameters", xlim=(0, 1.12))
        axes.legend(ncol=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def garden_path(tokens: jax.Array, cache: None) -> tuple[jax.Array, None]:
    """A toy language of five words in which the likeliest first word leads to unlikely sentences.

    0: the start, 1: the end; after 2 anything may come, after 3 nearly always 4 and then the end.
    """
    table = jnp.array([[0.0, 0.0, 0.6, 0.4, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.3, 0.2, 0.2, 0.3],
                       [0.0, 0.05, 0.0, 0.0, 0.95], [0.0, 0.9, 0.05, 0.05, 0.0]])
    return jnp.log(table)[tokens], cache


def draw_search(folder: Path) -> None:
    """Greedy search and a beam on a toy language, and the length penalty."""
    start, limits = jnp.zeros((1, 1), jnp.int32), {"max_length": 3, "eos_id": 1}
    one = jax.jit(lambda prompt: greedy(garden_path, None, prompt, **limits))(start)
    beams = jax.jit(lambda prompt: beam_search(garden_path, None, prompt, beam_size=3, n_best=3, alpha=0.0,
                                               **limits))(start)
    names = ["START", "END", "a", "b", "c"]

    def spell(ids: jax.Array) -> str:
        words = [names[i] for i in ids.tolist()]
        return " ".join(words[: words.index("END") + 1])

    with picture(folder / "search.png", 9, 3.6) as figure:
        left, right = figure.subplots(1, 2)
        found = [("greedy: " + spell(one.ids[0]), float(jnp.exp(one.scores[0])))]
        found += [(f"beam {i + 1}: " + spell(ids), float(jnp.exp(score)))
                  for i, (ids, score) in enumerate(zip(beams.ids[0], beams.scores[0], strict=True))]
        left.barh([name for name, _ in found], [p for _, p in found], color=["tab:orange"] + ["tab:blue"] * 3)
        left.invert_yaxis()
        left.set(xlabel="probability of the whole text", title="greedy search against a beam of 3")
        lengths = np.arange(1, 61)
        for alpha in (0.0, 0.6, 1.0):
            right.plot(lengths, length_penalty(lengths, alpha), label=f"alpha = {alpha}")
        right.set(xlabel="generated tokens", title="what a log-probability is divided by")
        right.legend()


def draw_attention(folder: Path, run: Path) -> None:
    """Cross-attention of a trained run, the mean over the heads of its last layer."""
    import tfm
    from tfm.analysis.attention_plots import draw_head

    maps = tfm.load(run).attention_maps("The old woman gave the child a red book.")
    draw_head(maps.cross[-1].mean(0), *maps.tokens("cross"), folder / "attention_map.png",
              title="cross-attention, last layer, mean of the heads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images", help="folder for the files")
    parser.add_argument("--run", type=Path, help="run folder of configs/quickstart.py, for the attention map")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for drawing in (draw_masks, draw_blocks, draw_positions, draw_sizes, draw_search):
        drawing(options.output)
    if options.run is not None:
        draw_attention(options.output, options.run)


if __name__ == "__main__":
    main()
