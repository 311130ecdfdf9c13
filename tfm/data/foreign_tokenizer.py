"""Tokenizers that other software made: with the special ids of a checkpoint, and Marian's pair of models."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm.data.tokenizer import META_SYMBOL, Tokenizer, tokenizer_from_bytes

_LANGUAGE = re.compile(r">>[^<]+<<")


class ForeignTokenizer(Tokenizer):
    """A tokenizer with the special ids of a checkpoint.

    Attributes:
      inner: what splits texts.
      added: symbols that `inner` does not know, and their ids.
      before: ids that its model expects before a text, such as [CLS].
      after: ids that it expects after one, such as [SEP] or </s>.
      before_target: what every target begins with.
    """

    def __init__(self, inner: Tokenizer, ids: Mapping[str, int | None], *, before: Sequence[int] = (),
                 after: Sequence[int] = (), added: Mapping[str, int] | None = None,
                 before_target: Sequence[int] = ()) -> None:
        """Wrap `inner`.

        Args:
          inner: what splits texts.
          ids: `pad_id`, `bos_id`, ... where they are not those of `inner`.
          before: ids before a text.
          after: ids after a text.
          added: symbols that `inner` does not know, and their ids.
          before_target: what every target begins with.
        """
        self.inner, self._ids, self.added = inner, dict(ids), dict(added or {})
        self.before, self.after = tuple(before), tuple(after)
        self.before_source, self.before_target = self.before, tuple(before_target)
        self.vocab_size = max([inner.vocab_size, *(i + 1 for i in self.added.values())])
        self.pad_id, self.bos_id = self._id("pad_id", inner.pad_id), self._id("bos_id", inner.bos_id)
        self.eos_id, self.unk_id = self._id("eos_id", inner.eos_id), self._id("unk_id", inner.unk_id)
        mask = ids.get("mask_id")
        self.mask_id = inner.mask_id if mask is None else mask
        sentinels = [self.added.get(f"<extra_id_{i}>") for i in range(len(self.added))]
        self.sentinel_ids = tuple(i for i in sentinels if i is not None) or inner.sentinel_ids
        self._names = {i: name for name, i in self.added.items()}
        self._split = re.compile("|".join(map(re.escape, sorted(self.added, key=len, reverse=True))) or r"(?!)")

    @property
    def after_source(self) -> tuple[int, ...]:
        return self.after

    def with_ids(self, ids: Mapping[str, int | None], before_target: Sequence[int]) -> ForeignTokenizer:
        """The same with other special ids and another beginning of targets."""
        return ForeignTokenizer(self.inner, {**self._ids, **ids}, before=self.before, after=self.after,
                                added=self.added, before_target=before_target)

    def _id(self, role: str, default: int) -> int:
        found = self._ids.get(role)
        return default if found is None else found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._split.finditer(text):
            ids += self._encode_plain(text[start:match.start()])
            ids.append(self.added[match[0]])
            start = match.end()
        return ids + self._encode_plain(text[start:])

    def _encode_plain(self, text: str) -> list[int]:
        return self.inner.encode(text) if text else []

    def encode_target(self, text: str) -> list[int]:
        return self.inner.encode_target(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return super().encode_batch(texts) if self.added else self.inner.encode_batch(texts)

    def encode_target_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return super().encode_batch(texts) if self.added else self.inner.encode_target_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        hidden = {self.pad_id, self.bos_id, self.eos_id, self.unk_id, *self._names}
        return self.inner.decode([int(i) for i in ids if int(i) not in hidden])

    def piece(self, token: int) -> str:
        return self._names.get(int(token)) or self.inner.piece(token)

    def to_bytes(self) -> bytes:
        fields = {"kind": "foreign", "ids": self._ids, "before": self.before, "after": self.after,
                  "added": self.added, "before_target": self.before_target,
                  "inner": base64.b64encode(self.inner.to_bytes()).decode()}
        return json.dumps(fields).encode()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ForeignTokenizer:
        """The inverse of `to_bytes`, of its JSON."""
        inner = tokenizer_from_bytes(base64.b64decode(fields["inner"]), fields["ids"])
        return cls(inner, fields["ids"], before=fields["before"], after=fields["after"], added=fields["added"],
                   before_target=fields.get("before_target", ()))


class MarianTokenizer(Tokenizer):
    """Marian's: one sentencepiece model for each side, and ids from a vocabulary file.

    A source may begin with a language code such as `>>fr<<`.
    """

    def __init__(self, source: bytes, target: bytes, vocabulary: Mapping[str, int],
                 target_vocabulary: Mapping[str, int] | None = None) -> None:
        import sentencepiece

        self._files = (source, target)
        self._source, self._target = (sentencepiece.SentencePieceProcessor(model_proto=model)
                                      for model in (source, target))
        self._vocabulary = dict(vocabulary)
        self._target_vocabulary = None if target_vocabulary is None else dict(target_vocabulary)
        self._pieces = {i: piece for piece, i in (target_vocabulary or vocabulary).items()}
        self.vocab_size = max([*self._vocabulary.values(), *self._pieces]) + 1
        self.eos_id, self.unk_id = vocabulary["</s>"], vocabulary["<unk>"]
        self.pad_id = self.bos_id = vocabulary.get("<pad>", self.eos_id)
        self.mask_id, self.sentinel_ids = None, ()

    def encode(self, text: str) -> list[int]:
        code = _LANGUAGE.match(text)
        pieces = self._source.encode(text[code.end():] if code else text, out_type=str)
        return self._numbers([code[0], *pieces] if code else pieces, self._vocabulary)

    def encode_target(self, text: str) -> list[int]:
        return self._numbers(self._target.encode(text, out_type=str), self._target_vocabulary or self._vocabulary)

    def encode_target_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_target(text) for text in texts]

    def _numbers(self, pieces: list[str], vocabulary: Mapping[str, int]) -> list[int]:
        return [vocabulary.get(piece, vocabulary["<unk>"]) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        special = {self.eos_id, self.pad_id, self.unk_id}
        text = self._target.decode([self.piece(i) for i in ids if int(i) not in special])
        return text.replace(META_SYMBOL, " ").strip()  # of pieces that only the source's model knows

    def piece(self, token: int) -> str:
        return self._pieces.get(int(token), "<unk>")

    def to_bytes(self) -> bytes:
        source, target = (base64.b64encode(file).decode() for file in self._files)
        return json.dumps({"kind": "marian", "source": source, "target": target, "vocabulary": self._vocabulary,
                           "target_vocabulary": self._target_vocabulary}).encode()

    def save_files(self, folder: Path) -> None:
        """Write the files that Marian's models come with."""
        for name, content in zip(("source.spm", "target.spm"), self._files, strict=True):
            (folder / name).write_bytes(content)
        for name, vocabulary in (("vocab.json", self._vocabulary), ("target_vocab.json", self._target_vocabulary)):
            if vocabulary is not None:
                (folder / name).write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        if self._target_vocabulary is not None:  # or other software takes the source's ids for the target's
            (folder / "tokenizer_config.json").write_text('{"separate_vocabs": true}\n', encoding="utf-8")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MarianTokenizer:
        """The inverse of `to_bytes`, of its JSON."""
        return cls(base64.b64decode(fields["source"]), base64.b64decode(fields["target"]), fields["vocabulary"],
                   fields["target_vocabulary"])
