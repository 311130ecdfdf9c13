"""Text files: lines and documents by index, and what bad files get."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from tfm.config import DataConfig
from tfm.data import load_splits
from tfm.data.text_file import Documents, Lines


def write(path: Path, content: bytes) -> str:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize(
    "content, lines",
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("\ufeffa\n\ufeffb", ["a", "\ufeffb"]),
        ("x\u2028y\x85z\x0b\nä 😀 \t", ["x\u2028y\x85z\x0b", "ä 😀 \t"]),
    ],
)
def test_lines(tmp_path: Path, name: str, content: str, lines: list[str]) -> None:
    found = Lines(write(tmp_path / name, content.encode()))
    assert list(found) == lines and len(found) == len(lines)
    assert found[:2] == lines[:2]
    if lines:
        assert found[-1] == lines[-1]
        with pytest.raises(IndexError):
            found[len(lines)]


def test_invalid_utf8_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.txt", b"fine\n" * 6 + b"then \xff\n" + b"fine\n")
    with pytest.raises(ValueError, match=r"bad\.txt, line 7: not UTF-8 \(byte 0xff"):
        Lines(path)


def test_invalid_utf8_is_found_in_any_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfm.data.text_file._CHUNK", 16)
    for bad in range(20):
        path = write(
            tmp_path / "bad.gz", b"".join(b"caf\xc3 x\n" if i == bad else "café\n".encode() for i in range(20))
        )
        with pytest.raises(ValueError, match=rf"line {bad + 1}:"):
            Lines(path)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.gz"):
        Lines(tmp_path / "absent.gz")
    with pytest.raises(ValueError, match=f"{tmp_path.name} is a folder"):
        Lines(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe\.txt is a pipe"):
        Lines(tmp_path / "pipe.txt")
    whole = gzip.compress(b"some text\n" * 50)
    for name, content in (("cut.gz", whole[:-12]), ("plain.gz", b"no gzip")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            Lines(tmp_path / name)


def test_documents_are_split_at_the_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", b"<|doc|>\none\n\ntwo\n<|doc|>\n\n<|doc|>\n three\nx <|doc|>\n<|doc|>")
    documents = Documents(Lines(path), "<|doc|>")
    assert list(documents) == ["one\n\ntwo", " three\nx <|doc|>"]
    config = DataConfig(source="text", task="causal_lm", train=(path,), document_separator="<|doc|>")
    assert list(load_splits(config).train) == list(documents)


def test_sides_of_different_length(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.en", b"1\n2\n3\n"), write(tmp_path / "a.de.gz", b"1\n2\n")
    with pytest.raises(ValueError, match=r"a\.en has 3 lines, but .*a\.de\.gz has 2"):
        load_splits(DataConfig(source="text", train=(first, second)))
    good = DataConfig(source="text", train=(first, first), valid=(second, second))
    splits = load_splits(good)
    assert splits.train[2] == ("3", "3") and len(splits.valid) == 2 and len(splits.test) == 0
    with pytest.raises(ValueError, match=r"data\.valid: "):
        load_splits(DataConfig(source="text", train=(first, first), valid=(first, second)))


def test_empty_and_miscounted_files(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.txt", b"")
    with pytest.raises(ValueError, match=r"data\.train: .*empty\.txt is empty"):
        load_splits(DataConfig(source="text", train=(empty, empty)))
    with pytest.raises(ValueError, match=r"data\.valid: .*empty\.txt is empty"):
        (tmp_path / "t.tsv").write_text("a\tb\n")
        load_splits(DataConfig(source="text", task="classify", train=str(tmp_path / "t.tsv"), valid=empty))
    with pytest.raises(ValueError, match="needs a source and a target file"):
        load_splits(DataConfig(source="text", train=(empty,)))
    with pytest.raises(ValueError, match="needs one file"):
        load_splits(DataConfig(source="text", task="causal_lm", train=(empty, empty)))


def test_fingerprints_follow_content(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.txt", b"a\n"), write(tmp_path / "2.txt", b"b\n")
    same = write(tmp_path / "3.txt.gz", b"a\n")
    pair = [
        load_splits(DataConfig(source="text", train=files)).train.fingerprint
        for files in ((one, two), (one, one), (two, one), (same, two))
    ]
    assert pair[0] == pair[3] and len(set(pair)) == 3
