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

PATIENCE = 15
"""A run in which nothing moves on any process for so many time-outs hangs."""


class Watch:
    """A thread that writes this process's pulse into the run folder and reads those of the others.

    Args:
        folder: `RUN/processes`, which all processes see. With one process nothing is written or read.
        time_out: seconds without a pulse after which a process is lost.
    """

    def __init__(self, folder: Path, *, time_out: float = 60.0) -> None:
        self._folder, self._mine, self._count = folder, jax.process_index(), jax.process_count()
        self._time_out = time_out
        self._step, self._doing, self._moves, self._beats = 0, "start", 0, 0
        self._heard: dict[int, tuple[Any, float]] = {}
        self._moved: tuple[Any, float] = (None, float("inf"))
        self._closed = threading.Event()
        if self._count > 1:
            folder.mkdir(parents=True, exist_ok=True)
            self._beat()
            threading.Thread(target=self._run, daemon=True).start()

    def at(self, step: int, doing: str = "training") -> None:
        """This process goes on to something: from the first step on it must do so again and again."""
        self._step, self._doing = step, doing
        self._moves += 1

    def moves(self) -> bool:
        """What this process does goes on; gives False, as one who is asked whether to stop it."""
        self._moves += 1
        return False

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def explain(self) -> None:
        """An exchange failed: wait until it is known which process is gone, which ends this one; or say where all are.
        """
        if self._count > 1:
            time.sleep(self._time_out + 3 * self._period)
            print(f"error: an exchange between processes failed. {self._places(self._pulses())}", file=sys.stderr,
                  flush=True)

    @property
    def _period(self) -> float:
        return min(2.0, self._time_out / 10)

    def _run(self) -> None:
        while not self._closed.wait(self._period):
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
        pulse = {"beat": [os.getpid(), self._beats], "step": self._step, "doing": self._doing, "moves": self._moves,
                 "host": socket.gethostname()}
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
            if number != self._mine and now - since > self._time_out:
                return (f"nothing was heard of process {number} on {pulses[number]['host']} for {now - since:.0f} s; "
                        f"its last step was {pulses[number]['step']} ({pulses[number]['doing']})")
        moves = {number: pulse["moves"] for number, pulse in pulses.items()}
        if moves != self._moved[0]:
            self._moved = (moves, now)
        still = now - self._moved[1]
        if self._moves and still > PATIENCE * self._time_out:
            last = min(pulses, key=lambda number: (pulses[number]["step"], pulses[number]["moves"]))
            return (f"nothing moved for {still:.0f} s; process {last} on {pulses[last]['host']} is the furthest "
                    f"behind. {self._places(pulses)}")
        return None

    def _places(self, pulses: dict[int, dict[str, Any]]) -> str:
        """Where each process is; of many alike only the first is named."""
        places: dict[str, list[int]] = {}
        for number, pulse in pulses.items():
            places.setdefault(f"at step {pulse['step']} ({pulse['doing']})", []).append(number)
        return "; ".join(f"process {numbers[0]}{f' and {len(numbers) - 1} more' if len(numbers) > 1 else ''} {place}"
                         for place, numbers in places.items())
