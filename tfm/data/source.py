"""Where text comes from: a config's source as three splits of random-access texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from tfm.config import DataConfig
from tfm.data.text_file import Documents, Lines


class Texts:
    """One split: columns of equal length; an example is a text, or a pair of texts where there are two columns.

    Args:
      columns: one sequence of texts for a language model; source and target, or text and label, otherwise.
      fingerprint: hash of the content, which names the cache of its tokens. None: it is computed from the texts.
    """

    def __init__(self, columns: Sequence[Sequence[str]], fingerprint: str | None = None) -> None:
        self.columns = tuple(columns)
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def __iter__(self) -> Iterator[str | tuple[str, str]]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> str | tuple[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> list[str | tuple[str, str]]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, str] | list[str | tuple[str, str]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if len(self.columns) == 1:
            return self.columns[0][index]
        return self.columns[0][index], self.columns[1][index]

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for column in self.columns:
                for text in column:
                    digest.update(text.encode("utf-8", "surrogatepass") + b"\xff")
                digest.update(b"\xfe")
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint


@dataclass(frozen=True)
class Splits:
    """The three splits. `valid` and `test` are empty where the config names none.

    Example:
      >>> splits = load_splits(DataConfig(generated_size=1000), seed=0)
      >>> english, german = splits.train[0]
      >>> len(splits.train), english.endswith((".", "?"))
      (1000, True)
    """

    train: Texts
    valid: Texts
    test: Texts


def load_splits(config: DataConfig, seed: int = 0, *, only: str | None = None) -> Splits:
    """Open the texts of a config.

    Args:
      config: which source, and its files.
      seed: seed of the generated source; files do not depend on it.
      only: name of the one split whose files are opened, such as "test"; those of the others need not be there.

    Returns:
      The three splits: pairs of texts for translation and classification, single texts for language models.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: invalid UTF-8, sides of different length, no training text, a wrong number of files.
    """
    if config.source == "generated":
        splits = _load_generated(config, seed)
    elif config.source == "text":
        splits = Splits(*(_open_files(config, name) if only in (None, name) else Texts(())
                          for name in ("train", "valid", "test")))
    else:
        from tfm.data.tfds_source import load_tfds

        splits = Splits(*load_tfds(config))
    if only in (None, "train") and not len(splits.train):
        raise ValueError("data.train holds no examples: an empty file or split cannot be trained on")
    return splits


def _load_generated(config: DataConfig, seed: int) -> Splits:
    if config.task == "translate":
        from tfm.data.grammar import generated_pairs

        return Splits(*generated_pairs(config.generated_size, seed))
    from tfm.data.documents import generated_documents

    return Splits(*generated_documents(config.generated_size, seed, labels=config.task == "classify"))


def _open_files(config: DataConfig, split: str) -> Texts:
    paths: tuple[str, ...] = getattr(config, split)
    if not paths:
        return Texts(())
    if config.task == "classify" and len(paths) == 1:
        return _open_table(paths[0], split)
    needed = 2 if config.task in ("translate", "classify") else 1
    if len(paths) != needed:
        files = {"translate": "a source and a target file",
                 "classify": "a text and a label file, or one file of lines `text TAB label`"}
        wanted = files.get(config.task, "one file")
        raise ValueError(f"data.{split} is {paths!r}, but task={config.task!r} needs {wanted}")
    lines = [Lines(path) for path in paths]
    if not any(map(len, lines)):
        raise ValueError(f"data.{split}: {paths[0]} is empty")
    if len({len(side) for side in lines}) > 1:
        raise ValueError(f"data.{split}: {paths[0]} has {len(lines[0])} lines, but {paths[1]} has {len(lines[1])}: "
                         "line n of one must belong to line n of the other")
    if config.task == "classify":
        labels = [label.strip() for label in lines[1]]
        return Texts([lines[0], labels], _join(*(side.fingerprint for side in lines)))
    if needed == 1 and config.document_separator is not None:
        documents = Documents(lines[0], config.document_separator)
        return Texts((documents,), _join(documents.fingerprint))
    return Texts(lines, _join(*(side.fingerprint for side in lines)))


def _open_table(path: str, split: str) -> Texts:
    """Lines `text TAB label`; the last tab counts, and a blank line is an empty example."""
    lines = Lines(path)
    if not len(lines):
        raise ValueError(f"data.{split}: {path} is empty")
    rows = [line.rpartition("\t") for line in lines]
    for number, (_, tab, label) in enumerate(rows, start=1):
        if not tab and label.strip():
            raise ValueError(f"{path}, line {number}: no tab between a text and its label in {label[:40]!r}")
    return Texts([[text for text, *_ in rows], [label.strip() for *_, label in rows]], lines.fingerprint)


def _join(*parts: str) -> str:
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
