"""Splits of generated examples: made when asked for, disjoint, and the same for the same seed on any machine."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

from tfm.data.choices import Choices
from tfm.data.source import Texts

HELD_OUT_SIZE = 500
SPLIT_NAMES = ("train", "valid", "test")
_PARTS = 20  # one part in 20 of all examples is for valid, one for test

Maker = Callable[[Choices], tuple[str, str]]


def split_of(text: str) -> str:
    """The split that a text may stand in, by its hash: "train", "valid" or "test"."""
    part = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % _PARTS
    return {0: "valid", 1: "test"}.get(part, "train")


class GeneratedSplit:
    """One split of a generated corpus.

    Args:
      make: draws an example of two texts; the first decides by its hash which split it may stand in.
      seed: of the corpus.
      name: of the split.
      size: examples.
    """

    def __init__(self, make: Maker, seed: int, name: str, size: int) -> None:
        self._make, self._seed, self._name = make, seed, name
        self._made: list[tuple[str, str] | None] = [None] * size

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: int) -> tuple[str, str]:
        made = self._made[index]
        if made is None:
            made = self._made[index] = self._draw(index)
        return made

    def _draw(self, index: int) -> tuple[str, str]:
        choices = Choices(self._seed, SPLIT_NAMES.index(self._name), index)
        while True:
            made = self._make(choices)
            if split_of(made[0]) == self._name:
                return made

    def texts(self, columns: int) -> Texts:
        """The split with its first one or two columns."""
        parts = (_program_hash(), self._make.__name__, str(self._seed), self._name, str(len(self)), str(columns))
        fingerprint = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
        return Texts([_Column(self, side) for side in range(columns)], fingerprint)


class _Column(Sequence[str]):
    def __init__(self, split: GeneratedSplit, side: int) -> None:
        self._split, self._side = split, side

    def __len__(self) -> int:
        return len(self._split)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self._split[i][self._side] for i in numbers]
        return self._split[numbers][self._side]


@functools.cache
def _program_hash() -> str:
    """Hash of the files that write the texts: another grammar must not find the old one's tokens in the cache."""
    names = ("choices", "clause", "documents", "generated", "german", "grammar", "lexicon", "numerals", "phrases")
    files = (Path(__file__).with_name(f"{name}.py").read_bytes() for name in names)
    return hashlib.sha256(b"\0".join(files)).hexdigest()
