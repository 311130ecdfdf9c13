"""The tokenizer inside a GGUF file, as the content of a `tokenizer.json` or of a sentencepiece model."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from tfm.config import require

_CONTROL, _BYTE = 3, 6
_KNOWN = re.compile(r"model|pre|tokens|token_type|token_type_count|scores|merges|add_(bos|eos|sep)_token"
                    r"|add_space_prefix|remove_extra_whitespaces|chat_template.*|\w+_token_ids?")
"""Names under `tokenizer.ggml.` that are read, or that only name tokens and templates of chats."""
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2}


def tokenizer_content(metadata: Mapping[str, Any]) -> bytes:
    """What `tfm.data.tokenizer.tokenizer_from_bytes` reads.

    Args:
        metadata: of the file.

    Raises:
        ValueError: another kind of tokenizer, or another way of splitting words, than those that are known.
    """
    kind = metadata["tokenizer.ggml.model"]
    require(kind in ("gpt2", "llama"), "tokenizer.ggml.model", kind, "it must be 'gpt2' or 'llama'")
    prefix = "tokenizer.ggml."
    for name in metadata:
        if name.startswith(prefix):
            require(bool(_KNOWN.fullmatch(name.removeprefix(prefix))), name, metadata[name],
                    "this setting of a tokenizer is not known: its ids may not be what they seem")
    return _byte_pairs(metadata) if kind == "gpt2" else _sentencepiece(metadata)


def surroundings(metadata: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The ids that the model expects before and after a text."""
    kind = metadata["tokenizer.ggml.model"]
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or
                          metadata.get("tokenizer.ggml.pre") == "llama-bpe")
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    return ([metadata["tokenizer.ggml.bos_token_id"]] if begins else [],
            [metadata["tokenizer.ggml.eos_token_id"]] if ends else [])


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    """The special ids by the names that a tokenizer has for them."""
    names = {"pad_id": "padding", "bos_id": "bos", "eos_id": "eos", "unk_id": "unknown", "mask_id": "mask"}
    return {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}


def _byte_pairs(metadata: Mapping[str, Any]) -> bytes:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    way = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges,
                                           ignore_merges=way == "llama-bpe"))
    if way in ("default", "gpt-2"):
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif way == "smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                      pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        require(way in _PATTERNS, "tokenizer.ggml.pre", way,
                f"it must be one of default, gpt-2, smollm, {', '.join(_PATTERNS)}")
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[way]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if way == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL])
    return made.to_str().encode()


def _sentencepiece(metadata: Mapping[str, Any]) -> bytes:
    """A sentencepiece model of the pieces and scores, written field by field in its protocol buffers."""
    pieces = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"],
                 metadata["tokenizer.ggml.token_type"], strict=True)
    model = b"".join(_message(1, _text(1, piece) + _float(2, score) + _number(3, kind))
                     for piece, score, kind in pieces)
    ids = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
    has_bytes = metadata["tokenizer.ggml.token_type"].count(_BYTE) == 256
    trainer = _number(3, 2) + _number(35, has_bytes)  # pairs are merged; bytes where no piece fits
    trainer += b"".join(_number(field, metadata.get(f"tokenizer.ggml.{name}_token_id", -1))
                        for field, name in ids.items())
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = _text(1, "identity") + _number(3, prefix) + _number(4, spaces) + _number(5, True)
    return model + _message(2, trainer) + _message(3, normalizer)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
