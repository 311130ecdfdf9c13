"""What a run measures, on the host: a line of JSON and TensorBoard scalars for each report, curves at the end."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class MetricsWriter:
    """Appends to `RUN/metrics.jsonl` and to a TensorBoard event file (which needs no TensorFlow).

    Lines of later steps than the one a run goes on from are removed: they are about to be made again.
    """

    def __init__(self, run: str | Path, *, start_step: int = 0) -> None:
        self._path = Path(run) / METRICS
        kept = [line for line in read_metrics(run) if line["step"] <= start_step]
        draft = self._path.with_name(METRICS + ".part")
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        draft.replace(self._path)
        self._purge_step = start_step + 1 if start_step else None

    @functools.cached_property
    def _events(self) -> Any:
        """The event file; it is opened with the first line, as its library is slow to import where torch is there."""
        from tensorboardX import SummaryWriter

        return SummaryWriter(str(self._path.parent), purge_step=self._purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line: the step and the values, which must be finite."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Close the event file."""
        if "_events" in vars(self):
            self._events.close()


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`; one that was cut short by a kill is left out."""
    path = Path(run) / METRICS
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def plot_curves(run: str | Path) -> Path | None:
    """Draw loss, learning rate and BLEU against the step into `RUN/curves.png`; None where nothing was measured."""
    lines = read_metrics(run)
    panels = [names for names in (("loss", "valid_loss"), ("bleu",), ("learning_rate",), ("tokens_per_second",))
              if any(name in line for line in lines for name in names)]
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, names in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in names:
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else "",
                          label=name.replace("_", " "))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    path = Path(run) / "curves.png"
    figure.savefig(path, dpi=120)
    return path
