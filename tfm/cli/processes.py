"""The options of commands that can run as several processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import jax

from tfm.config import require
from tfm.parallel.exchange import is_first
from tfm.parallel.processes import start_processes


@dataclass(frozen=True)
class ProcessOptions:
    """How this process finds the others of the same run."""

    coordinator: str | None = None
    """Several processes by hand: host:port of process 0. SLURM, Open MPI and TPU pods need none of these three."""
    num_processes: int | None = None
    """Several processes by hand: their number."""
    process_id: int | None = None
    """Several processes by hand: which one this is, from 0."""
    time_out: float = 60.0
    """Several processes: seconds without a sign of life after which a process is lost; 15 times as long without any
    progress ends the run, too."""

    def start(self) -> None:
        """Join the other processes, if there are any; only the first one then writes to standard output."""
        require(self.time_out >= 1, "--time-out", self.time_out, "it must be at least 1 second")
        start_processes(self.coordinator, self.num_processes, self.process_id, time_out=self.time_out)
        if jax.distributed.is_initialized() and not is_first():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
