"""Text to ids and back: sentencepiece, plain bytes, and a given `tokenizer.json`, behind one small interface.

A tokenizer is one file. `train_tokenizer.py` makes it; `load_tokenizer` reads it, whatever its kind.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tfm.config_checks import require_file

META_SYMBOL = "\u2581"  # what sentencepiece writes for a space
MASK_SYMBOL = "<mask>"
_SENTENCE_END = (".", "!", "?", "\n", "\u2026", "\u3002")
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def sentinel_symbols(count: int) -> list[str]:
    """The pieces that stand for corrupted spans, in order: `<extra_id_0>`, `<extra_id_1>`, ..."""
    return [f"<extra_id_{index}>" for index in range(count)]


class Tokenizer(abc.ABC):
    """What the rest of the library asks of a tokenizer.

    Attributes:
      vocab_size: number of ids; ids lie in [0, vocab_size).
      pad_id, bos_id, eos_id, unk_id: special ids. Nothing reads `pad_id` to find out what is padding: masks say that.
      mask_id: id of the mask, or None.
      sentinel_ids: ids of the span sentinels in order; empty where there are none.
      before_source, after_source: ids around the source of an encoder-decoder. A target ends with EOS alone, and its
        decoder starts with BOS.
      before_target: what every target begins with, such as the code of its language.
    """

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    mask_id: int | None
    sentinel_ids: tuple[int, ...]
    before_source: tuple[int, ...] = ()
    before_target: tuple[int, ...] = ()

    @property
    def after_source(self) -> tuple[int, ...]:
        return (self.eos_id,)

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS and EOS."""

    def encode_target(self, text: str) -> list[int]:
        """Ids of a target text; the same, unless source and target are split by different models."""
        return self.encode(text)

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ids give nothing."""

    @abc.abstractmethod
    def piece(self, token: int) -> str:
        """How one id is shown, such as `▁the`."""

    @abc.abstractmethod
    def to_bytes(self) -> bytes:
        """The content of the file that `load_tokenizer` reads."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts; faster than one by one where the backend can."""
        return [self.encode(text) for text in texts]

    def encode_target_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_target` for many texts."""
        return self.encode_batch(texts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file so that it is there whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(self.to_bytes())
        os.replace(temporary, path)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides the ids of a text."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    @functools.cached_property
    def is_special(self) -> np.ndarray:
        """bool [V]: ids that stand for no text: padding, BOS, EOS, unknown, mask, sentinels."""
        special = np.zeros(self.vocab_size, bool)
        ids = [self.pad_id, self.bos_id, self.eos_id, self.unk_id, *self.sentinel_ids]
        special[[i for i in ids if 0 <= i < self.vocab_size]] = True
        if self.mask_id is not None:
            special[self.mask_id] = True
        return special

    @functools.cached_property
    def starts_word(self) -> np.ndarray:
        """bool [V]: ids whose text begins with a space, hence a word."""
        return np.array([self.piece(i).startswith((META_SYMBOL, " ", "\u0120")) for i in range(self.vocab_size)])

    @functools.cached_property
    def ends_sentence(self) -> np.ndarray:
        """bool [V]: ids whose text ends with a full stop, a question or exclamation mark or a line break."""
        pieces = (_BYTE_PIECE.sub(lambda m: chr(int(m[1], 16)), self.piece(i)) for i in range(self.vocab_size))
        return np.array([piece.endswith(_SENTENCE_END) for piece in pieces]) & ~self.is_special


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (Kudo and Richardson, 2018).

    A model trained here falls back to bytes and keeps every space, so each UTF-8 text comes back as it was, the
    character that sentencepiece uses for spaces included: it is encoded by its bytes.
    """

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"not a sentencepiece model: {error}") from error
        processor = self._processor
        self.vocab_size = processor.vocab_size()
        self.unk_id = processor.unk_id()
        self.eos_id = processor.eos_id()
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else self._id_of("<s>", self.eos_id)
        self.pad_id = processor.pad_id() if processor.pad_id() >= 0 else self._id_of("<pad>", self.eos_id)
        if self.eos_id < 0:
            raise ValueError("the sentencepiece model has no end-of-sentence piece, but labels end with it")
        mask = self._id_of(MASK_SYMBOL, -1)
        self.mask_id = None if mask < 0 else mask
        self.sentinel_ids = self._find_sentinels()
        self._meta_bytes = [self._id_of(f"<0x{byte:02X}>", -1) for byte in META_SYMBOL.encode()]

    def _id_of(self, piece: str, default: int) -> int:
        found = self._processor.piece_to_id(piece)
        return default if found == self.unk_id else found

    def _find_sentinels(self) -> tuple[int, ...]:
        ids: list[int] = []
        while (found := self._id_of(f"<extra_id_{len(ids)}>", -1)) >= 0:
            ids.append(found)
        return tuple(ids)

    def encode(self, text: str) -> list[int]:
        if META_SYMBOL in text and min(self._meta_bytes) >= 0:
            return self._encode_meta_symbol(text)
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(META_SYMBOL in text for text in texts):
            return [self.encode(text) for text in texts]
        return self._processor.encode(list(texts))

    def _encode_meta_symbol(self, text: str) -> list[int]:
        """Let a character that occurs nowhere stand in, then put the bytes of the real one in its place."""
        stand_in, ids = next(
            (chr(code), ids) for code in range(0xFDD0, 0xFDF0) if chr(code) not in text
            and len(ids := self._byte_ids(chr(code))) == 3)
        encoded = self._processor.encode(text.replace(META_SYMBOL, stand_in))
        result: list[int] = []
        index = 0
        while index < len(encoded):
            if encoded[index:index + 3] == ids:
                result += self._meta_bytes
                index += 3
            else:
                result.append(encoded[index])
                index += 1
        return result

    def _byte_ids(self, character: str) -> list[int]:
        if self._processor.piece_to_id(character) != self.unk_id:
            return []
        return [self._id_of(f"<0x{byte:02X}>", -1) for byte in character.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        special = self.is_special
        return self._processor.decode([int(i) for i in ids if not special[i] or i == self.unk_id])

    def piece(self, token: int) -> str:
        return self._processor.id_to_piece(int(token))

    def to_bytes(self) -> bytes:
        return self._model


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids: 4 special ids, 256 bytes, then reserved symbols.

    Example:
      >>> tokenizer = ByteTokenizer()
      >>> tokenizer.encode("ä!"), tokenizer.decode([199, 168, 37])
      ([199, 168, 37], 'ä!')
    """

    _FIRST_BYTE = 4

    def __init__(self, symbols: Sequence[str] = ()) -> None:
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = range(4)
        self._symbols = list(symbols)
        first = self._FIRST_BYTE + 256
        self.vocab_size = first + len(self._symbols)
        self.mask_id = first + self._symbols.index(MASK_SYMBOL) if MASK_SYMBOL in self._symbols else None
        self.sentinel_ids = tuple(first + i for i, name in enumerate(self._symbols) if _SENTINEL.fullmatch(name))

    def encode(self, text: str) -> list[int]:
        return [byte + self._FIRST_BYTE for byte in text.encode("utf-8")]

    def decode(self, ids: Sequence[int]) -> str:
        values = (int(i) - self._FIRST_BYTE for i in ids)
        return bytes(value for value in values if 0 <= value < 256).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        value = int(token) - self._FIRST_BYTE
        if value < 0:
            return ("<pad>", "<s>", "</s>", "<unk>")[token]
        return chr(value) if value < 128 else f"<0x{value:02X}>" if value < 256 else self._symbols[value - 256]

    def to_bytes(self) -> bytes:
        return json.dumps({"kind": "bytes", "symbols": self._symbols}).encode()


def parse_tokenizer_json(content: bytes) -> Any:
    """The object of the package tokenizers that a `tokenizer.json` describes, without padding and truncation.

    Raises:
      ValueError: that package is missing, or it cannot read the file.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError('a tokenizer.json needs the package tokenizers: pip install "tfm[hf]"') from error
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # that package has no exceptions of its own
        raise ValueError(f"tokenizer.json is damaged: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


class JsonTokenizer(Tokenizer):
    """A given `tokenizer.json`; special ids are as given, or found by their usual names. Needs the extra `hf`."""

    _NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "pad_id": ("<pad>", "[PAD]", "<|endoftext|>", "</s>"),
        "bos_id": ("<s>", "[CLS]", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "<|startoftext|>"),
        "eos_id": ("</s>", "[SEP]", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|endoftext|>"),
        "unk_id": ("<unk>", "[UNK]", "<|endoftext|>", "</s>"),
        "mask_id": (MASK_SYMBOL, "[MASK]"),
    }

    def __init__(self, content: bytes, ids: Mapping[str, int | None] | None = None) -> None:
        self._content = content
        self._backend = parse_tokenizer_json(content)
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        found = {field: self._first_of(names) for field, names in self._NAMES.items()}
        found |= {field: i for field, i in (ids or {}).items() if i is not None}
        eos = found["eos_id"]
        if eos is None:
            raise ValueError(f"tokenizer.json has none of the end-of-text tokens {self._NAMES['eos_id']}")
        self.eos_id, self.mask_id = eos, found["mask_id"]
        self.pad_id, self.bos_id, self.unk_id = (
            eos if (named := found[name]) is None else named for name in ("pad_id", "bos_id", "unk_id"))
        sentinels = (self._backend.token_to_id(name) for name in sentinel_symbols(1000))
        self.sentinel_ids = tuple(i for i in sentinels if i is not None)

    def _first_of(self, names: tuple[str, ...]) -> int | None:
        return next((i for name in names if (i := self._backend.token_to_id(name)) is not None), None)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [item.ids for item in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        kept = [int(i) for i in ids if not self.is_special[i] or (i == self.unk_id != self.eos_id)]
        return self._backend.decode(kept, skip_special_tokens=True)

    def piece(self, token: int) -> str:
        return self._backend.id_to_token(int(token)) or ""

    def to_bytes(self) -> bytes:
        return self._content


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a tokenizer file: a sentencepiece model, a byte tokenizer or a `tokenizer.json`.

    Args:
      path: the file, such as `RUN/tokenizer.model`.

    Returns:
      The tokenizer.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is a folder, or holds none of the three.
    """
    path = Path(path)
    require_file(path, "tokenizer file")
    content = path.read_bytes()
    try:
        return tokenizer_from_bytes(content)
    except ValueError as error:
        raise ValueError(f"tokenizer file {path}: {error}") from error


def tokenizer_from_bytes(content: bytes, ids: Mapping[str, int | None] | None = None) -> Tokenizer:
    """The tokenizer that `to_bytes` wrote, or the content of a sentencepiece model or `tokenizer.json`.

    Args:
      content: of the file.
      ids: special ids of a `tokenizer.json` where their names do not tell them.
    """
    if not content.lstrip().startswith(b"{"):
        return SentencePieceTokenizer(content)
    fields: dict[str, Any] = json.loads(content)
    if fields.get("kind") == "bytes":
        return ByteTokenizer(fields["symbols"])
    if fields.get("kind") in ("foreign", "marian"):
        from tfm.data.foreign_tokenizer import ForeignTokenizer, MarianTokenizer

        return (ForeignTokenizer if fields["kind"] == "foreign" else MarianTokenizer).from_fields(fields)
    return JsonTokenizer(content, ids)
