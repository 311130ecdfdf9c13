"""An experiment on a claim of a paper as a command: measure, print tables, write JSON and a picture."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]
Tables = Mapping[str, Rows]
"""Title -> rows, each a dict from column to value."""


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it is measured.

    Attributes:
        name: of the files.
        statement: the expected outcome, with the paper's section.
        measure: (quick) -> tables; all seeds are fixed.
        draw: (figure, tables): draws the picture into a matplotlib figure.
        size: of the picture in inches.
    """

    name: str
    statement: str
    measure: Callable[[bool], Tables]
    draw: Callable[[Any, Tables], None]
    size: tuple[float, float] = (12.0, 4.5)


def run_claim(claim: Claim, argv: Sequence[str] | None = None) -> Tables:
    """Measure as the arguments say, print the tables, write `NAME.json` and `NAME.png`.

    Args:
        claim: the experiment.
        argv: `--quick` (smaller, for a first look) and `--output FOLDER`; None: the program's own.

    Returns:
        the tables.
    """
    options = make_parser(claim).parse_args(argv)
    started = time.perf_counter()
    tables = claim.measure(options.quick)
    seconds = time.perf_counter() - started
    console = Console(highlight=False)
    console.print(claim.statement, soft_wrap=True)
    for title, rows in tables.items():
        console.print(make_table(title, rows))
    options.output.mkdir(parents=True, exist_ok=True)
    files = [options.output / f"{claim.name}.{kind}" for kind in ("json", "png")]
    files[0].write_text(json.dumps({"statement": claim.statement, "quick": options.quick, "seconds": round(seconds, 1),
                                    "tables": tables}, indent=1) + "\n", encoding="utf-8")
    _draw(claim, tables, files[1])
    console.print(f"{seconds:.0f} s; {files[0]}, {files[1]}", soft_wrap=True)
    return tables


def make_parser(claim: Claim) -> argparse.ArgumentParser:
    """The arguments of a claim's command."""
    parser = argparse.ArgumentParser(description=claim.statement)
    parser.add_argument("--quick", action="store_true", help="smaller and faster")
    parser.add_argument("--output", type=Path, default=Path("claims"), help="folder for JSON and PNG")
    return parser


def make_table(title: str, rows: Rows) -> Table:
    """Rows as a table; floats with four digits."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def select(rows: Rows, x: str, y: str, **where: Any) -> tuple[list[Any], list[Any]]:
    """Two columns of the rows that have the given values, for a line of a plot.

    Example:
        >>> select([{"a": 1, "b": 2, "c": "u"}, {"a": 3, "b": 4, "c": "v"}], "a", "b", c="v")
        ([3], [4])
    """
    chosen = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return [row[x] for row in chosen], [row[y] for row in chosen]


def _draw(claim: Claim, tables: Tables, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=claim.size, layout="constrained")
    FigureCanvasAgg(figure)
    claim.draw(figure, tables)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                _plain_ticks(axis)
    figure.savefig(path, dpi=110)


def _plain_ticks(axis: Any) -> None:
    """Few ticks with plain numbers on a logarithmic axis, whatever its range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 500 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
