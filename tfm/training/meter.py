"""What a run's steps cost on the host's clock: time, waiting for input, tokens, and the shapes that were computed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

TOKENS = ("source", "target", "tokens")


@dataclass
class Meter:
    """Sums over the steps of this command; evaluation, checkpoints and compilation are not in them."""

    seconds: float = 0.0
    """Time of the steps."""
    waited: float = 0.0
    """Part of it in which the loop waited for the next batch."""
    tokens: float = 0.0
    """Real tokens of both sides, over all processes."""
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """(rows, length) or (rows, source length, target length) of this process's batches -> steps."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, the loop waits for input."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    def count(self, batch: Mapping[str, np.ndarray]) -> None:
        """Note the shape of a step's batch."""
        self.shapes[batch_shape(batch)] += 1

    @property
    def steps(self) -> int:
        """Steps counted."""
        return sum(self.shapes.values())

    @property
    def positions(self) -> int:
        """Positions of both sides that were computed by this process, padding included."""
        return sum(steps * shape[0] * sum(shape[1:]) for shape, steps in self.shapes.items())


def batch_shape(batch: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """(rows, length) of a batch, or (rows, source length, target length).

    Example:
        >>> batch_shape({"source": np.zeros((4, 7), int), "target": np.zeros((4, 9), int)})
        (4, 7, 9)
    """
    sides = [batch[name].shape for name in TOKENS if name in batch] or [batch["weights"].shape]
    return (sides[0][0], *(shape[1] for shape in sides))
