"""A small random generator whose numbers are the same in every version of Python and NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Choices:
    """Picks from sequences, by SplitMix64 (Steele et al., 2014).

    Args:
      seeds: numbers that decide all picks.

    Example:
      >>> Choices(0, 1).pick("abc") == Choices(0, 1).pick("abc")
      True
    """

    def __init__(self, *seeds: int) -> None:
        self._state = 0x9E3779B97F4A7C15
        for seed in seeds:
            self._state = (self.next() ^ seed) & _MASK

    def next(self) -> int:
        """The next 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        return self.next() % limit

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.next() % (high - low + 1)

    def chance(self, percent: int) -> bool:
        """True in `percent` of 100 cases."""
        return self.next() % 100 < percent

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.next() % len(items)]

    def weighted(self, items: Sequence[tuple[int, T]]) -> T:
        """One of the items, each as likely as its whole-number weight says."""
        place = self.below(sum(weight for weight, _ in items))
        for weight, item in items:
            place -= weight
            if place < 0:
                return item
        raise AssertionError("weights are positive")
