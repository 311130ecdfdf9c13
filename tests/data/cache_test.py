"""The token cache: same ids as without it, a new entry for new text or tokenizer, nothing half-written."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from tfm.data import Texts
from tfm.data.cache import Tokens, cached_tokens, tokenize
from tfm.data.tokenizer import ByteTokenizer

TEXTS = ["ein", "", "zwei 😀", "drei"]


class CountingTokenizer(ByteTokenizer):
    """Counts the texts it encodes."""

    encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return super().encode(text)


def rows(tokens: Tokens) -> list[list[int]]:
    return [tokens[i].tolist() for i in range(len(tokens))]


def test_tokens_are_the_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfm.data.cache._BATCH", 2)
    tokens = tokenize(TEXTS, ByteTokenizer())
    assert rows(tokens) == [[byte + 4 for byte in text.encode()] for text in TEXTS]
    assert tokens.lengths.tolist() == [3, 0, 9, 4] and tokens.ids.dtype == np.uint16 and tokens[0].dtype == np.int32


def test_second_call_reads_the_disk(tmp_path: Path) -> None:
    tokenizer = CountingTokenizer()
    first = cached_tokens(Texts([TEXTS, TEXTS[::-1]]), 2, tokenizer, tmp_path)
    assert tokenizer.encoded == 8
    second = cached_tokens(Texts([list(TEXTS), TEXTS[::-1]]), 2, tokenizer, tmp_path)
    assert tokenizer.encoded == 8
    assert (
        [rows(side) for side in first]
        == [rows(side) for side in second]
        == [rows(tokenize(side, ByteTokenizer())) for side in (TEXTS, TEXTS[::-1])]
    )
    assert isinstance(second[0].ids, np.memmap)


def test_text_and_tokenizer_make_the_key(tmp_path: Path) -> None:
    for texts, tokenizer in (
        (TEXTS, ByteTokenizer()),
        ([*TEXTS[:3], "vier"], ByteTokenizer()),
        (["einzwei"], ByteTokenizer()),
        (["ein", "zwei"], ByteTokenizer()),
        (TEXTS, ByteTokenizer(["<mask>"])),
    ):
        before = len(list(tmp_path.iterdir()))
        assert rows(cached_tokens(Texts([texts]), 1, tokenizer, tmp_path)[0]) == [
            tokenizer.encode(text) for text in texts
        ]
        assert len(list(tmp_path.iterdir())) == before + 1


def test_a_failure_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", no_space)
    with pytest.raises(OSError, match="No space left"):
        cached_tokens(Texts([TEXTS]), 1, ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rows(cached_tokens(Texts([TEXTS]), 1, ByteTokenizer(), None)[0])[3] == [byte + 4 for byte in b"drei"]
    assert cached_tokens(Texts(()), 2, ByteTokenizer(), None)[1].lengths.tolist() == []
    assert list(tmp_path.iterdir()) == []


def test_parts_of_a_text() -> None:
    tokens = tokenize(["abcdef", "xyz"], ByteTokenizer())
    for index, text in enumerate(("abcdef", "xyz")):
        for start in range(8):
            for end in (*range(start, 8), None):
                assert tokens.part(index, start, end).tolist() == [byte + 4 for byte in text[start:end].encode()]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="no space left for 20,000 bytes of tokens") as caught:
            cached_tokens(Texts([["a" * 10_000]]), 1, ByteTokenizer(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in caught.value.filename
    assert list(tmp_path.iterdir()) == []
