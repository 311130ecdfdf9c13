"""Token ids of a split, kept on disk: text is tokenised once, then memory-mapped."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfm.data.source import Texts
from tfm.data.tokenizer import Tokenizer

_BATCH = 4096
_BATCH_CHARACTERS = 1 << 22
_VERSION = "1"


@dataclass(frozen=True)
class Tokens:
    """Ids of many texts, end to end.

    Attributes:
      ids: [N] int32 or uint16, without BOS and EOS.
      offsets: [texts + 1] int64; text i is `ids[offsets[i]:offsets[i + 1]]`.
    """

    ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.part(index, 0, None)

    def part(self, index: int, start: int, end: int | None) -> np.ndarray:
        """Ids `start` to `end` of one text, int32, without reading the rest of it."""
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.ids[first + start:last if end is None else min(first + end, last)].astype(np.int32)

    @property
    def lengths(self) -> np.ndarray:
        """[texts] int64: number of ids of each text."""
        return np.diff(self.offsets)


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, *, target: bool = False,
             progress: Callable[[int], None] | None = None) -> Tokens:
    """Encode many texts in large batches.

    Args:
      texts: the texts.
      tokenizer: what encodes them.
      target: whether they are target texts.
      progress: called with the number of texts done since the last call.

    Returns:
      Their ids; int32 only where uint16 is too small for the vocabulary.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    parts, lengths = [np.zeros(0, dtype)], [np.zeros(1, np.int64)]
    for batch in _batches(texts):
        rows = (tokenizer.encode_target_batch if target else tokenizer.encode_batch)(batch)
        lengths.append(np.array([len(row) for row in rows], np.int64))
        parts.append(np.fromiter((token for row in rows for token in row), dtype, int(lengths[-1].sum())))
        if progress is not None:
            progress(len(batch))
    return Tokens(np.concatenate(parts), np.cumsum(np.concatenate(lengths)))


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def cached_tokens(texts: Texts, columns: int, tokenizer: Tokenizer, folder: str | os.PathLike[str] | None, *,
                  name: str = "") -> list[Tokens]:
    """Tokens of the first columns of a split, from the cache where it has them.

    The key is a hash of tokenizer and text, so a change of either makes a new entry. An entry is written to a
    temporary folder and renamed: it is there whole or not at all.

    Args:
      texts: the split.
      columns: how many of its columns are text.
      tokenizer: what encodes them.
      folder: the cache. None: nothing is written.
      name: shown beside the progress bar.

    Returns:
      One `Tokens` for each column.
    """
    if folder is None:
        return _tokenize_columns(texts, columns, tokenizer, name)
    key = "|".join((_VERSION, texts.fingerprint, tokenizer.fingerprint, str(columns)))
    entry = Path(folder) / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not entry.is_dir():
        _write_entry(entry, _tokenize_columns(texts, columns, tokenizer, name))
    return [Tokens(np.load(entry / f"ids_{i}.npy", mmap_mode="r"), np.load(entry / f"offsets_{i}.npy"))
            for i in range(columns)]


def _tokenize_columns(texts: Texts, columns: int, tokenizer: Tokenizer, name: str) -> list[Tokens]:
    if not len(texts):
        return [Tokens(np.zeros(0, np.uint16), np.zeros(1, np.int64)) for _ in range(columns)]
    with progress_bar(f"tokenising {name}".strip(), columns * len(texts)) as advance:
        return [tokenize(column, tokenizer, target=side == 1, progress=advance)
                for side, column in enumerate(texts.columns[:columns])]


def _write_entry(entry: Path, tokens: Sequence[Tokens]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tokens-", dir=entry.parent))
    try:
        for i, column in enumerate(tokens):
            _save(temporary / f"ids_{i}.npy", column.ids)
            _save(temporary / f"offsets_{i}.npy", column.offsets)
        try:
            os.rename(temporary, entry)
        except OSError:
            if not entry.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _save(path: Path, array: np.ndarray) -> None:
    """`np.save`, whose error says no more than how much was written where the disk is full."""
    try:
        np.save(path, array)
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.ENOSPC, f"no space left for {array.nbytes:,} bytes of tokens", str(path)) from error


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; nothing otherwise.

    Args:
      description: what is going on.
      total: number of steps.

    Yields:
      A function that moves the bar on by a number of steps.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)
