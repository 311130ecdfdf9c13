"""What a person sees: a table of what will run, then progress; plain lines where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

COSTS = (("loss", "loss", ".3f"), ("learning_rate", "lr", ".2e"), ("tokens_per_second", "tokens/s", ",.0f"))
SCORES = (("valid_loss", "valid loss", ".3f"), ("valid_accuracy", "valid accuracy", ".3f"), ("bleu", "BLEU", ".2f"))
"""What a report shows of training, and of an evaluation: (key, name, format)."""


def parameter_rows(params: Any) -> list[tuple[str, str]]:
    """(part, number of parameters) for each top-level part of a params tree, and in total.

    Example:
        >>> import numpy as np
        >>> parameter_rows({"encoder": {"kernel": np.ones((20, 100))}, "output": {"bias": np.ones(100)}})
        [('parameters', '2,100'), ('  encoder', '2,000'), ('  output', '100')]
    """
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in params.items()}
    return [("parameters", f"{sum(sizes.values()):,}"), *((f"  {name}", f"{size:,}") for name, size in sizes.items())]


def program_memory(compiled: Any) -> int | None:
    """Bytes that a compiled program needs on each device by the compiler's own analysis; None where it has none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return (stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes)


class Reporter:
    """Writes to stderr: tables, messages, and a progress bar (or a line for each report)."""

    def __init__(self, steps: int, *, silent: bool = False) -> None:
        self._console = Console(file=sys.stderr, highlight=False, quiet=silent)
        self._steps = steps
        self._progress: Progress | None = None
        self._started = time.perf_counter()
        self._first = 0

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table of names and values."""
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start(self, step: int) -> None:
        """Show progress from this step on."""
        self._first, self._started = step, time.perf_counter()
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(), console=self._console)
            self._progress.add_task("train", total=self._steps, completed=step, text="compiling")
            self._progress.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Show loss, learning rate, speed and time left."""
        costs, scores = _words(values, COSTS), _words(values, SCORES)
        if self._progress is not None:  # the scores stay in their own line: with them it is too wide for a terminal
            self._progress.update(self._progress.task_ids[0], completed=step, text="  ".join(costs))
            if scores:
                self.say("  ".join([f"step {step}", *costs, *scores]))
            return
        left = (time.perf_counter() - self._started) / max(step - self._first, 1) * (self._steps - step)
        self.say("  ".join([f"step {step}/{self._steps}", *costs, *scores, f"{duration(left)} left"]))

    def stop(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _words(values: Mapping[str, float], names: Sequence[tuple[str, str, str]]) -> list[str]:
    """Those of the named values that there are, with their names."""
    return [f"{name} {values[key]:{form}}" for key, name, form in names if key in values]


def duration(seconds: float) -> str:
    """A time as h:mm:ss.

    Example:
        >>> duration(3725.4)
        '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
