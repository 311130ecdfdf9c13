"""`tfm show attention RUN "source" ["target"]`: look inside a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from tfm.bundle import Bundle, load
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import require
from tfm.parallel.compilation import enable_compilation_cache


@dataclass(frozen=True)
class ShowOptions:
    """Draw a model's attention weights: PNG files, and one HTML page with a slider over layers and heads."""

    what: tyro.conf.Positional[Literal["attention"]]
    """What to look at."""
    run: tyro.conf.Positional[Path]
    """Run folder, or a checkpoint of the Hugging Face format."""
    source: tyro.conf.Positional[str]
    """The text that the model reads."""
    target: tyro.conf.Positional[str | None] = None
    """Encoder-decoder: the text that the decoder reads. Default: what the model translates itself."""
    layer: int | None = None
    """Only this layer, with the memory of one layer. Default: all."""
    head: int | None = None
    """The head that is drawn large. Default: the mean over the heads."""
    output: Path = Path("attention")
    """Folder for the files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: show_attention(parse(ShowOptions, arguments, prog="tfm show")))


def show_attention(options: ShowOptions) -> int:
    """Write the pictures and the page; give the exit code."""
    from tfm.analysis.attention_page import write_attention_page
    from tfm.analysis.attention_plots import draw_maps

    enable_compilation_cache()
    bundle = load(options.run, say=lambda text: print(text, file=sys.stderr))
    _check(bundle, options)
    maps = bundle.attention_maps(options.source, options.target, layer=options.layer)
    files = draw_maps(maps, options.output, head=options.head)
    page = options.output / "attention.html"
    write_attention_page(maps, page, title=f"Attention: {options.source}")
    for part in maps.parts:
        for i, entropies in enumerate(maps.entropy(part)):
            print(f"{part} layer {maps.first_layer + i}: entropy of the heads "
                  + " ".join(f"{entropy:.2f}" for entropy in entropies) + " nats")
    print("\n".join(str(path) for path in (*files, page)))
    return 0


def _check(bundle: Bundle, options: ShowOptions) -> None:
    """Refuse what cannot be drawn before anything is computed."""
    model = bundle.model
    require(options.target is None or model.is_encoder_decoder, "the target", options.target,
            "only an encoder-decoder reads one")
    depth = max(model.encoder_layers, model.decoder_layers)
    require(options.layer is None or 0 <= options.layer < depth, "--layer", options.layer,
            f"it must be 0 to {depth - 1}")
    heads = min(model.num_heads, model.decoder_num_heads or model.num_heads)
    require(options.head is None or 0 <= options.head < heads, "--head", options.head, f"it must be 0 to {heads - 1}")
    require(bool(options.source.strip()), "the source", options.source, "it must not be empty")
