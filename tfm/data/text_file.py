"""Lines and documents of plain or gzip text files, checked once and then read by index."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from tfm.config_checks import require_file

_NEWLINE = 10
_CHUNK = 1 << 26


class Lines(Sequence[str]):
    """The lines of a UTF-8 file, plain or .gz, without their line ends; only `\\n` ends a line.

    A byte order mark before the first line is no part of it. The file is held as bytes, so that a line costs eight
    bytes beside its text.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is a folder or a pipe, not UTF-8 (with the line's number), or not whole gzip.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._content = _read(self.path)
        _check_utf8(self._content, self.path)
        ends = np.flatnonzero(np.frombuffer(self._content, np.uint8) == _NEWLINE)
        if self._content and not self._content.endswith(b"\n"):
            ends = np.append(ends, len(self._content))
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = 0 if index == 0 else int(self._ends[index - 1]) + 1
        line = self._content[start:int(self._ends[index])]
        return line.removesuffix(b"\r").decode("utf-8")

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(self._content).hexdigest()[:16]


class Documents(Sequence[str]):
    """Documents of several lines, between lines that hold only `separator`; empty ones are left out.

    Args:
      lines: the file's lines.
      separator: such as `<|doc|>`.
    """

    def __init__(self, lines: Lines, separator: str) -> None:
        self._lines = lines
        marks = [i for i, line in enumerate(lines) if line == separator]
        spans = zip([0, *(mark + 1 for mark in marks)], [*marks, len(lines)], strict=True)
        self._spans = [span for span in spans if any(line.strip() for line in lines[span[0]:span[1]])]
        self.fingerprint = f"{lines.fingerprint}-{separator}"

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self._spans[index]
        return "\n".join(self._lines[start:end]).strip("\n")


def _read(path: Path) -> bytes:
    require_file(path, "text file")
    content = path.read_bytes()
    try:
        return (gzip.decompress(content) if path.suffix == ".gz" else content).removeprefix(codecs.BOM_UTF8)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"text file {path} is not whole gzip: {error}") from error


def _check_utf8(content: bytes, path: Path) -> None:
    start = 0
    while start < len(content):
        end = content.find(b"\n", start + _CHUNK) + 1 or len(content)
        try:
            content[start:end].decode("utf-8")
        except UnicodeDecodeError as error:
            number = content.count(b"\n", 0, start + error.start) + 1
            reason = f"byte 0x{content[start + error.start]:02x}: {error.reason}"
            raise ValueError(f"text file {path}, line {number}: not UTF-8 ({reason})") from None
        start = end
