"""Attention weights as pictures: one head with its tokens, and a grid of all heads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfm.analysis.attention_maps import AttentionMaps, Part
from tfm.config import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei",
         "Hiragino Sans", "PingFang SC", "Yu Gothic", "Microsoft YaHei", "Malgun Gothic", "Droid Sans Fallback",
         "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "Arial Unicode MS")
"""Tried one after the other for each character, as far as they are installed."""
INCHES_PER_TOKEN = 0.22
MOST_NAMED = 120
"""With more tokens on an axis their names would be too small to read: numbers stand in their place."""


def draw_head(weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], path: Path, *, title: str = "") -> None:
    """Draw one matrix of weights with its tokens on both axes.

    Args:
        weights: [T, S]; row i holds the weights of query i.
        rows: names of the T queries.
        columns: names of the S keys.
        path: PNG file to write.
        title: above the picture.

    Raises:
        ValueError: names that do not fit the weights.
    """
    for name, names, size in (("rows", rows, weights.shape[0]), ("columns", columns, weights.shape[1])):
        require(len(names) == size, f"the number of {name}", len(names), f"weights have {size}")
    height, width = (min(4.0 + INCHES_PER_TOKEN * n, 40.0) for n in weights.shape)
    with _picture(path, (width, height)) as figure:
        axes = figure.subplots()
        image = axes.imshow(weights, cmap="viridis", vmin=0.0, vmax=max(float(weights.max()), 1e-9), aspect="equal")
        _name_tokens(axes, rows, columns)
        figure.suptitle(title)
        axes.set_xlabel("key: read from")
        axes.set_ylabel("query: reads")
        figure.colorbar(image, ax=axes, shrink=0.6, label="weight")


def draw_grid(layers: Sequence[np.ndarray], path: Path, *, first_layer: int = 0, title: str = "") -> None:
    """Draw every head of every layer as a small picture: a row for each layer, a column for each head.

    Args:
        layers: for each layer [H, T, S].
        path: PNG file to write.
        first_layer: number of the first layer.
        title: above the picture.
    """
    heads = max(len(weights) for weights in layers)
    with _picture(path, (1.3 * heads + 0.6, 1.3 * len(layers) + 0.8)) as figure:
        grid = figure.subplots(len(layers), heads, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for i, weights in enumerate(layers):
            for h, head in enumerate(weights):
                axes = grid[i, h]
                axes.set_axis_on()
                axes.imshow(head, cmap="viridis", vmin=0.0, aspect="auto", interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                if h == 0:
                    axes.set_ylabel(f"layer {first_layer + i}")
                if i == 0:
                    axes.set_title(f"head {h}", fontsize=9)
        figure.suptitle(title)


def draw_maps(maps: AttentionMaps, folder: Path, *, head: int | None = None) -> list[Path]:
    """Draw what a person looks at first, for each part of the model.

    Args:
        maps: of one text or pair.
        folder: where the PNG files go.
        head: draw this head of each layer with its tokens; None: the mean over the heads of the last layer.

    Returns:
        the files: `{part}_grid.png` with all heads, and `{part}_layer{i}_head{h}.png` or `{part}_layer{i}_mean.png`.

    Raises:
        ValueError: a head that the model does not have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for part in maps.parts:
        layers = maps.layers(part)
        files.append(folder / f"{part}_grid.png")
        draw_grid(layers, files[-1], first_layer=maps.first_layer, title=f"{part}: every head")
        for number in range(len(layers)) if head is not None else (len(layers) - 1,):
            files.append(_draw_one(maps, part, number, head, folder))
    return files


def _draw_one(maps: AttentionMaps, part: Part, number: int, head: int | None, folder: Path) -> Path:
    weights, layer = maps.layers(part)[number], maps.first_layer + number
    if head is None:
        chosen, name = weights.mean(0), f"mean of {len(weights)} heads"
    else:
        require(0 <= head < len(weights), "head", head, f"the heads of the {part} are 0 to {len(weights) - 1}")
        chosen, name = weights[head], f"head {head}"
    path = folder / f"{part}_layer{layer}_{'mean' if head is None else f'head{head}'}.png"
    draw_head(chosen, *maps.tokens(part), path, title=f"{part}, layer {layer}, {name}")
    return path


def _name_tokens(axes: Any, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Tokens as labels of the ticks; they are text, never formulas."""
    for axis, names, style in ((axes.yaxis, rows, {}), (axes.xaxis, columns, {"rotation": 90})):
        if len(names) <= MOST_NAMED:
            axis.set_ticks(range(len(names)), [_label(name) for name in names], fontsize=9, parse_math=False, **style)
    if len(columns) <= MOST_NAMED:
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")


def visible(token: str) -> str:
    """A token's name without characters that would not show or would break a line.

    Example:
        >>> [visible(token) for token in ("a", " ", chr(10), chr(0), "")]
        ['a', '␣', '⏎', '\\\\x00', '∅']
    """
    if not token:
        return "∅"
    token = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join(c if c.isprintable() or c in "\u200c\u200d" else f"\\x{ord(c):02x}" for c in token)


@cache
def fonts() -> tuple[str, ...]:
    """Families of `FONTS` that are installed, fonts younger than matplotlib's own list among them."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {font.fname for font in fontManager.ttflist}
    for file in set(findSystemFonts()) - known:
        with suppress(RuntimeError, OSError, ValueError):
            fontManager.addfont(file)
    installed = {font.name for font in fontManager.ttflist}
    return tuple(name for name in FONTS if name in installed)


@cache
def _drawable() -> frozenset[int]:
    """Code points that the fonts have a glyph for."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    with _quiet():
        return frozenset(code for name in fonts() for code in get_font(findfont(FontProperties(name))).get_charmap())


def _label(token: str) -> str:
    """A token as the fonts can draw it: characters without a glyph become their numbers."""
    return "".join(c if ord(c) in _drawable() else f"<{ord(c):X}>" for c in visible(token))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without matplotlib's messages on fonts that have no regular weight."""
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _picture(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """A figure that is written to a file at the end; needs no display and leaves no global state."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _quiet(), mpl.rc_context({"font.family": list(fonts())}):
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=120)
