"""A profiler's trace of a few training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

PROFILE = "profile"
WARM = 3
"""Steps before the first traced one: compilation and the first fetches are over."""


class Trace:
    """Traces some steps into `RUN/profile`, which TensorBoard's profiler and ui.perfetto.dev open.

    Args:
        run: the run folder.
        steps: how many steps to trace; 0 traces none.
    """

    def __init__(self, run: Path, steps: int) -> None:
        self.folder, self.steps = run / PROFILE, steps
        self._seen, self._open = 0, False

    def before_step(self) -> None:
        """Start where the next step is the first to be traced."""
        if self.steps and self._seen == WARM:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True, profiler_options=options)
            self._open = True

    def after_step(self, result: Any) -> None:
        """Wait for the last traced step and write the trace."""
        self._seen += 1
        if self._open and self._seen == WARM + self.steps:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Write what there is."""
        if self._open:
            self._open = False
            jax.profiler.stop_trace()

    def files(self) -> list[Path]:
        """The traces in the folder, the newest last."""
        return sorted(self.folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
