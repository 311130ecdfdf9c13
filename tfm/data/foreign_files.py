"""The tokenizer in the folder of a foreign checkpoint.

Read are `tokenizer.json`, sentencepiece models (T5, Llama; Marian's two with their `vocab.json`), and the older
`vocab.txt` (WordPiece) and `vocab.json` with `merges.txt` (bytes and pairs).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfm.config import require
from tfm.data.foreign_tokenizer import ForeignTokenizer, MarianTokenizer
from tfm.data.tokenizer import (
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_tokenizer_json,
)

OWN_FILE = "tfm_tokenizer.json"
_ROLES = {
    "pad_id": ("pad_token",), "bos_id": ("bos_token", "cls_token"), "eos_id": ("eos_token", "sep_token"),
    "unk_id": ("unk_token",), "mask_id": ("mask_token",),
}


def load_foreign_tokenizer(folder: str | os.PathLike[str]) -> ForeignTokenizer | None:
    """The tokenizer in a checkpoint folder.

    Special tokens that are spelled out in a text, such as `</s>`, become their ids with a `tokenizer.json` (or the
    older files that are made into one). A sentencepiece model takes them for plain characters, except those in
    `added_tokens.json` and T5's `<extra_id_0>`: where prompts hold them, let transformers save a `tokenizer.json`.

    Args:
      folder: with `tokenizer.json` or one of the older files.

    Returns:
      The tokenizer; None where the folder has none.

    Raises:
      ValueError: a file that is damaged, or one whose ids only other software knows.
    """
    folder = Path(folder)
    if (folder / OWN_FILE).is_file():
        own = load_tokenizer(folder / OWN_FILE)
        return own if isinstance(own, ForeignTokenizer) else ForeignTokenizer(own, {})
    settings = _settings(folder)
    names = {role: next((_text(settings[name]) for name in keys if settings.get(name)), None)
             for role, keys in _ROLES.items()}
    if (content := _json_content(folder, settings)) is not None:
        return _from_json(content, names, settings)
    if (folder / "source.spm").is_file():
        marian = _read_marian(folder)
        return ForeignTokenizer(marian, {}, after=(marian.eos_id,))
    for file in ("spiece.model", "tokenizer.model"):
        if (folder / file).is_file():
            return _from_sentencepiece(folder / file, names, settings)
    if (folder / "sentencepiece.bpe.model").is_file():
        raise ValueError(f"{folder} has only sentencepiece.bpe.model, whose ids other software shifts: save its "
                         "tokenizer.json with that software first")
    return None


def save_foreign_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Write a tokenizer so that `load_foreign_tokenizer` finds it again, special ids and all.

    Args:
      tokenizer: any; plain bytes, which no file of other software describes, go to a file of our own.
      folder: of the checkpoint.
    """
    folder = Path(folder)
    outer = tokenizer if isinstance(tokenizer, ForeignTokenizer) else ForeignTokenizer(tokenizer, {})
    inner = outer.inner
    if isinstance(inner, MarianTokenizer):
        inner.save_files(folder)
        return
    if not isinstance(inner, (JsonTokenizer, SentencePieceTokenizer)):
        (folder / OWN_FILE).write_bytes(outer.to_bytes())
        return
    settings: dict[str, Any] = {f"{role[:-3]}_token": outer.piece(i) for role in _ROLES
                                if (i := getattr(outer, role)) is not None and i >= 0}
    if isinstance(inner, SentencePieceTokenizer):
        settings |= {"add_bos_token": bool(outer.before), "add_eos_token": bool(outer.after)}
        if outer.added:
            (folder / "added_tokens.json").write_text(json.dumps(outer.added), encoding="utf-8")
    name = "tokenizer.json" if isinstance(inner, JsonTokenizer) else "tokenizer.model"
    (folder / name).write_bytes(inner.to_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
                                                  encoding="utf-8")


def _settings(folder: Path) -> dict[str, Any]:
    """What the JSON files beside the tokenizer say, the later ones first."""
    found: dict[str, Any] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json", "config.json"):
        if (folder / file).is_file():
            found = {**_read_object(folder / file), **found}
    if (folder / "added_tokens.json").is_file():
        found["added"] = _read_vocabulary(folder / "added_tokens.json")
    return found


def _read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    require(isinstance(values, dict), str(file), values, "it must hold a JSON object")
    return values


def _read_vocabulary(file: Path) -> dict[str, int]:
    """The ids of tokens in a JSON file."""
    values = _read_object(file)
    for token, number in values.items():
        require(type(number) is int and number >= 0, f"{file}: {token}", number, "a token's id is a whole number")
    return values


def _text(token: Any) -> str:
    """A special token is a string, or an object around it."""
    text: Any = token.get("content") if isinstance(token, dict) else token
    require(token is None or isinstance(text, str), "tokenizer_config.json: a special token", token,
            "it must be a text")
    return text


def _from_json(content: bytes, names: Mapping[str, str | None], settings: Mapping[str, Any]) -> ForeignTokenizer:
    backend = parse_tokenizer_json(content)
    ids = {role: None if name is None else backend.token_to_id(name) for role, name in names.items()}
    for role in ("pad_id", "bos_id", "eos_id"):  # the config may know ids that have no name
        known = settings.get(role.replace("_id", "_token_id"))
        if ids[role] is None and known is not None:
            ids[role] = known[0] if isinstance(known, list) else known
    inner = JsonTokenizer(content, ids)
    before, after = _surroundings(backend)
    return ForeignTokenizer(inner, ids, before=before, after=after)


def _surroundings(backend: Any) -> tuple[list[int], list[int]]:
    """The special ids that a `tokenizer.json` puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(full)) if full[i:i + len(plain)] == plain)
    return full[:start], full[start + len(plain):]


def _from_sentencepiece(file: Path, names: Mapping[str, str | None], settings: Mapping[str, Any]) -> ForeignTokenizer:
    inner = SentencePieceTokenizer(file.read_bytes())
    added = dict(settings.get("added") or {})
    is_t5 = file.name == "spiece.model" and settings.get("model_type", "t5") in ("t5", "mt5")
    if is_t5 and not added:
        count = settings.get("extra_ids", 100)
        added = {f"<extra_id_{i}>": inner.vocab_size + count - 1 - i for i in range(count)}
    known = {inner.piece(i): i for i in range(inner.vocab_size)} | added
    ids = {role: known.get(name) if name else None for role, name in names.items()}
    begins = settings.get("add_bos_token", not is_t5)
    ends = settings.get("add_eos_token", is_t5)
    bos, eos = (inner.bos_id if ids["bos_id"] is None else ids["bos_id"],
                inner.eos_id if ids["eos_id"] is None else ids["eos_id"])
    return ForeignTokenizer(inner, ids, before=[bos] * bool(begins), after=[eos] * bool(ends), added=added)


def _read_marian(folder: Path) -> MarianTokenizer:
    source, target = ((folder / name).read_bytes() for name in ("source.spm", "target.spm"))
    vocabulary = _read_vocabulary(folder / "vocab.json")
    file = folder / "target_vocab.json"
    target_vocabulary = _read_vocabulary(file) if file.is_file() else None
    return MarianTokenizer(source, target, vocabulary, target_vocabulary)


def _json_content(folder: Path, settings: Mapping[str, Any]) -> bytes | None:
    """The content of `tokenizer.json`, made from the older files where it is missing."""
    if (folder / "tokenizer.json").is_file():
        return (folder / "tokenizer.json").read_bytes()
    if (folder / "vocab.txt").is_file():
        return _wordpiece(folder / "vocab.txt", settings)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_pairs(folder, settings)
    return None


def _wordpiece(file: Path, settings: Mapping[str, Any]) -> bytes:
    """BERT's: text cleaned and split at spaces and punctuation, then the longest pieces first."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    lines = file.read_text(encoding="utf-8").splitlines()
    vocabulary = {line: i for i, line in enumerate(lines)}
    unknown, first, last = (_text(settings.get(name, default)) for name, default in (
        ("unk_token", "[UNK]"), ("cls_token", "[CLS]"), ("sep_token", "[SEP]")))
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True), strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing((last, vocabulary[last]), (first, vocabulary[first]))
    special = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    named = (_text(settings.get(name, f"[{name[:-6].upper()}]")) for name in special)
    made.add_special_tokens([name for name in named if name in vocabulary])
    return made.to_str().encode()


def _byte_pairs(folder: Path, settings: Mapping[str, Any]) -> bytes:
    """GPT-2's; RoBERTa and BART put <s> and </s> around a text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    made = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    made.decoder = decoders.ByteLevel()
    names = [_text(settings[name]) for name in ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token",
                                                "sep_token", "mask_token") if settings.get(name)]
    names = [name for name in dict.fromkeys(names or ["<s>", "</s>", "<unk>", "<pad>", "<mask>", "<|endoftext|>"])
             if made.token_to_id(name) is not None]
    made.add_special_tokens(names)
    begin, end = made.token_to_id("<s>"), made.token_to_id("</s>")
    if begin is not None and end is not None:
        made.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", begin), trim_offsets=True,
                                                           add_prefix_space=settings.get("add_prefix_space", False))
    return made.to_str().encode()
