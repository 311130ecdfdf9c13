"""All attention weights of a text as one HTML file that needs no network: a slider over layers and heads."""

from __future__ import annotations

import base64
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tfm.analysis.attention_maps import AttentionMaps
from tfm.analysis.attention_plots import visible

MARK = "__DATA__"


def attention_page(maps: AttentionMaps, *, title: str = "Attention") -> str:
    """The page as text: weights as 16-bit numbers, tokens, entropy of each head and rollout inside it.

    Args:
        maps: of one text or pair.
        title: of the page.

    Returns:
        HTML. Its content policy forbids any request; tokens reach it as JSON and as text nodes only.

    Example:
        >>> page = attention_page(AttentionMaps(decoder=(np.eye(2, dtype=np.float32)[None],)).with_tokens(["<b>", "&"]))
        >>> "<b>" in page, page.startswith("<!doctype html>")
        (False, True)
    """
    views = [_view(part, maps.layers(part), *maps.tokens(part), maps.first_layer) for part in maps.parts]
    for part in maps.parts:
        layers = maps.layers(part)
        if part != "cross" and len(layers) > 1:
            views.append(_view(f"{part} rollout", (maps.rollout(part)[None],), *maps.tokens(part), None))
    text = json.dumps({"title": title, "views": views}, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    template = files("tfm.analysis").joinpath("attention_page.html").read_text(encoding="utf-8")
    before, after = template.split(MARK)
    return before + text + after


def write_attention_page(maps: AttentionMaps, path: Path, *, title: str = "Attention") -> None:
    """Write `attention_page` to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(attention_page(maps, title=title), encoding="utf-8")


def _view(name: str, layers: tuple[np.ndarray, ...], rows: tuple[str, ...], columns: tuple[str, ...],
          first_layer: int | None) -> dict[str, Any]:
    from tfm.analysis.attention_maps import head_entropy

    return {"name": name, "rows": [visible(token) for token in rows], "columns": [visible(token) for token in columns],
            "firstLayer": first_layer, "heads": len(layers[0]),
            "entropy": [head_entropy(weights).round(4).tolist() for weights in layers],
            "layers": [_pack(weights) for weights in layers]}


def _pack(weights: np.ndarray) -> str:
    """[H, T, S] in [0, 1] -> base64 of little-endian 16-bit integers, 65535 for 1: exact to 8e-6."""
    return base64.b64encode(np.round(np.clip(weights, 0.0, 1.0) * 65535.0).astype("<u2").tobytes()).decode("ascii")
