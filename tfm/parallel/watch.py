"""Several processes watch each other: one that dies or hangs ends the run with a message that names it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

BEAT_SECONDS = 2.0
LOST_SECONDS = 30.0
"""A process whose file did not change for so long is lost."""
STALL_SECONDS = 900.0
"""Where no step ends for so long, the process that is furthest behind is said to hang."""


class Watch:
    """A thread that writes this process's pulse into the run folder and reads those of the others.

    Args:
        folder: `RUN/processes`, which all processes see. With one process nothing is written or read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._mine, self._count = folder, jax.process_index(), jax.process_count()
        self._step, self._since = 0, float("inf")
        self._beats = 0
        self._heard: dict[int, tuple[Any, float]] = {}
        self._closed = threading.Event()
        if self._count > 1:
            folder.mkdir(parents=True, exist_ok=True)
            self._beat()
            threading.Thread(target=self._run, daemon=True).start()

    def at(self, step: int) -> None:
        """This step was given to the devices."""
        self._step, self._since = step, time.monotonic()

    def pause(self) -> None:
        """What comes now, such as an evaluation, may take any time; until the next step."""
        self._since = float("inf")

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def explain(self) -> None:
        """A collective failed: wait until it is known which process is gone, then end this one. May return."""
        if self._count > 1:
            time.sleep(LOST_SECONDS + 3 * BEAT_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._beat()
            message = self._verdict(self._pulses(), time.monotonic())
            if message is not None and not self._closed.is_set():
                print(f"error: {message}. The checkpoints are whole: start all processes again", file=sys.stderr,
                      flush=True)
                os._exit(1)

    def _beat(self) -> None:
        self._beats += 1
        path = self._folder / str(self._mine)
        draft = path.with_suffix(".part")
        pulse = {"beat": [os.getpid(), self._beats], "step": self._step, "host": socket.gethostname()}
        draft.write_text(json.dumps(pulse), encoding="utf-8")
        draft.replace(path)

    def _pulses(self) -> dict[int, dict[str, Any]]:
        pulses = {}
        for number in range(self._count):
            try:
                pulses[number] = json.loads((self._folder / str(number)).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
        return pulses

    def _verdict(self, pulses: dict[int, dict[str, Any]], now: float) -> str | None:
        """What is wrong with which process, if anything is."""
        for number, pulse in pulses.items():
            beat, since = self._heard.get(number, (None, now))
            self._heard[number] = (pulse["beat"], now if beat != pulse["beat"] else since)
        for number, (_, since) in self._heard.items():
            if number != self._mine and now - since > LOST_SECONDS:
                return (f"nothing was heard of process {number} on {pulses[number]['host']} for {now - since:.0f} s; "
                        f"its last step was {pulses[number]['step']}")
        if now - self._since > STALL_SECONDS and pulses:
            last = min(pulses, key=lambda number: pulses[number]["step"])
            return (f"no step ended for {now - self._since:.0f} s; process {last} on {pulses[last]['host']} is the "
                    f"furthest behind, at step {pulses[last]['step']}")
        return None
