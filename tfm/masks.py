"""Masks as rules: the public door to `tfm.ops.masks` and `tfm.ops.patterns`, and `draw`."""

from pathlib import Path

import numpy as np

from tfm.ops.masks import Causal as Causal
from tfm.ops.masks import Global as Global
from tfm.ops.masks import Matrix as Matrix
from tfm.ops.masks import Padding as Padding
from tfm.ops.masks import Prefix as Prefix
from tfm.ops.masks import Rule as Rule
from tfm.ops.masks import Segments as Segments
from tfm.ops.masks import Window as Window
from tfm.ops.patterns import Blocks as Blocks
from tfm.ops.patterns import bigbird as bigbird
from tfm.ops.patterns import longformer as longformer
from tfm.ops.patterns import sliding_window as sliding_window
from tfm.ops.tokens import register_rule as register_rule


def draw(
    rule: Rule, query_length: int, key_length: int | None = None, *, path: str | Path | None = None, head: int = 0
) -> str:
    """Draws a rule as text, one line a query, `#` where it may attend; and as a picture where a path is given.

    Args:
      rule: the rule.
      query_length: T.
      key_length: S; None: T.
      path: file of the picture, written if given; the suffix names the format (`.png`).
      head: the head to draw, of a rule that differs by head.

    Returns:
      T lines of S characters.

    Example:
      >>> print(draw(sliding_window(2), 3))
      #..
      ##.
      .##
    """
    key_length = query_length if key_length is None else key_length
    matrix = np.asarray(rule.dense(np.arange(query_length), np.arange(key_length))[0])
    matrix = matrix[head % len(matrix)]
    if path is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4, 4 * max(query_length / key_length, 0.2)), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(matrix, cmap="Greys", vmin=0, vmax=1.4, interpolation="nearest")
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        figure.savefig(path)
    return "\n".join("".join("#" if seen else "." for seen in row) for row in matrix)
