"""Tokens of a split as numbered training examples of known length, within the config's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tfm.config import DataConfig, require
from tfm.data.cache import Tokens
from tfm.data.objective import Example, TextObjective, cut_pieces, example_rng, pair_example, pair_room
from tfm.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Counts:
    """What became of the texts of a split, for the table at the start of a run.

    Attributes:
      texts: lines, pairs or documents found.
      examples: what training sees of them in an epoch.
      tokens: ids of these in an epoch, special ones included; of a pair, those of the longer side.
      skipped: left out because they are longer than max_length.
      cut: shortened to max_length.
      empty: left out because a side has no token.
    """

    texts: int
    examples: int
    tokens: int
    skipped: int = 0
    cut: int = 0
    empty: int = 0


class Examples(Protocol):
    """Numbered examples. `sides[i]` is what example i takes in a batch; `make(i, epoch)` is the example."""

    sides: np.ndarray
    """[N, 1] lengths; of pairs [N, 2], source and target."""
    counts: Counts

    def make(self, index: int, epoch: int) -> Example:
        """Example `index` as it is in this epoch."""


class PairExamples:
    """Pairs of texts for translation."""

    def __init__(self, source: Tokens, target: Tokens, tokenizer: Tokenizer, config: DataConfig) -> None:
        room = pair_room(tokenizer)
        self._texts, self._tokenizer, self._limit = (source, target), tokenizer, _room_for_text(config, max(room))
        shorter = np.minimum(source.lengths, target.lengths)
        longer = np.maximum(source.lengths, target.lengths)
        self._rows, fates = _apply_limit(shorter, longer, self._limit, config.too_long)
        both = np.stack([source.lengths, target.lengths], axis=1)[self._rows]
        self.sides = np.minimum(both, self._limit) + room  # such as EOS of the labels and of the source
        self.counts = Counts(len(source), len(self._rows), int(self.sides.max(axis=1).sum()), **fates)

    def make(self, index: int, epoch: int) -> Example:
        row = int(self._rows[index])
        source, target = (texts.part(row, 0, self._limit) for texts in self._texts)
        return pair_example(source, target, self._tokenizer)


class TextExamples:
    """Pieces of running text under an objective."""

    def __init__(self, texts: Tokens, tokenizer: Tokenizer, config: DataConfig, seed: int) -> None:
        self._texts, self._tokenizer, self._seed = texts, tokenizer, seed
        self._objective = TextObjective(config, tokenizer)
        lengths = texts.lengths
        extra = 1 if self._objective.whole else 0  # inputs: BOS and the text; labels: the text and EOS
        pieces = cut_pieces(np.where(lengths > 0, lengths + extra, 0), self._objective.piece_length)
        self._document, self._start, self._length = pieces
        self.sides = self._objective.sides(self._length)
        self.counts = Counts(len(texts), len(self._document), int(self.sides.max(axis=1).sum()),
                             empty=int((lengths == 0).sum()))

    def make(self, index: int, epoch: int) -> Example:
        document, start, length = (int(a[index]) for a in (self._document, self._start, self._length))
        piece = self._window(document, start, length) if self._objective.whole else self._texts.part(
            document, start, start + length)
        return self._objective(piece, example_rng(self._seed, epoch, index))

    def _window(self, document: int, start: int, length: int) -> np.ndarray:
        """`length` + 1 ids from place `start` of the document with BOS before and EOS after it."""
        ids = self._texts.part(document, max(start - 1, 0), start + length)
        bos = [self._tokenizer.bos_id] if start == 0 else []
        eos = [self._tokenizer.eos_id] if len(ids) + len(bos) == length else []
        return np.concatenate([bos, ids, eos]).astype(np.int32)


class LabelledExamples:
    """Texts with a class each, for an encoder with a classification head: tokens [T] and the label, a number."""

    def __init__(self, texts: Tokens, labels: Sequence[str], tokenizer: Tokenizer, config: DataConfig,
                 classes: Sequence[str]) -> None:
        self._texts, self._tokenizer, self._limit = texts, tokenizer, _room_for_text(config, 2)
        number = {name: i for i, name in enumerate(classes)}
        lengths = texts.lengths
        unknown = next((i for i, label in enumerate(labels) if label not in number and lengths[i]), None)
        if unknown is not None:
            raise ValueError(f"line {unknown + 1} has the label {labels[unknown]!r}, which is not among those of the "
                             f"training text: {', '.join(classes)}")
        self._rows, fates = _apply_limit(lengths, lengths, self._limit, config.too_long)
        self._labels = np.array([number.get(label, 0) for label in labels], np.int32)  # 0: of an empty text
        self.sides = np.minimum(lengths[self._rows], self._limit)[:, None] + 2
        self.counts = Counts(len(texts), len(self._rows), int(self.sides.sum()), **fates)

    def make(self, index: int, epoch: int) -> Example:
        row = int(self._rows[index])
        ids = self._texts.part(row, 0, self._limit)
        tokens = np.concatenate([[self._tokenizer.bos_id], ids, [self._tokenizer.eos_id]]).astype(np.int32)
        return {"tokens": tokens, "labels": self._labels[row], "weights": np.array(1.0, np.float32)}


def _room_for_text(config: DataConfig, special: int) -> int:
    """Most ids of a text beside the special ones."""
    require(config.max_length > special, "data.max_length", config.max_length,
            f"{config.task} needs at least {special + 1}, {special} of them for special ids")
    return config.max_length - special


def _apply_limit(shorter: np.ndarray, longer: np.ndarray, limit: int,
                 too_long: str) -> tuple[np.ndarray, dict[str, int]]:
    """Rows that stay, and how many are empty, skipped or cut."""
    empty = shorter == 0
    over = (longer > limit) & ~empty
    keep = ~empty & ~over if too_long == "skip" else ~empty
    fates = {"empty": int(empty.sum()), "skipped" if too_long == "skip" else "cut": int(over.sum())}
    return np.flatnonzero(keep), fates
