"""A foreign checkpoint as a `Bundle`: its model, its tokenizer, and its habits of generating text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm.bundle import Bundle, Special
from tfm.config import Config, DecodeConfig, ModelConfig
from tfm.data.foreign_files import load_foreign_tokenizer
from tfm.data.foreign_tokenizer import ForeignTokenizer
from tfm.data.tokenizer import Tokenizer, tokenizer_from_bytes
from tfm.decoding.logits import (
    BadWords,
    ForceFirst,
    MinLength,
    NoRepeatNgram,
    RepetitionPenalty,
    Suppress,
    SuppressFirst,
)
from tfm.interop import GenerationSettings, from_gguf, from_huggingface, load_generation_settings
from tfm.interop.generation import settings_from


@dataclass(frozen=True)
class Foreign:
    """What a foreign checkpoint holds; `tokenizer` is None where it has none."""

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer | None
    settings: GenerationSettings


def load_foreign(path: str | Path) -> Bundle:
    """The bundle of a Hugging Face checkpoint folder or a GGUF file; see `open_foreign`."""
    return make_bundle(open_foreign(path))


def make_bundle(found: Foreign) -> Bundle:
    """What `tfm.load` gives for a foreign checkpoint."""
    special = Special(**special_fields(found.config, found.settings, found.tokenizer))
    config = Config(model=found.config, decode=DecodeConfig(beam_size=found.settings.num_beams))
    return Bundle(config, found.params, found.tokenizer, special)


def open_foreign(path: str | Path, *, dtype: Any = None, sharding: Any = None, allow_pickle: bool = False) -> Foreign:
    """Open a Hugging Face checkpoint folder or a GGUF file.

    Args:
        path: the folder, or a file that ends in .gguf.
        dtype: of parameters and activations; None: as stored (GGUF: float32).
        sharding: as for `tfm.interop.from_huggingface`.
        allow_pickle: as there.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it holds something that is not known.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype, sharding)
    config, params = from_huggingface(path, dtype=dtype, sharding=sharding, allow_pickle=allow_pickle)
    return Foreign(config, params, load_foreign_tokenizer(path), load_generation_settings(path))


def _load_gguf(path: Path, dtype: Any, sharding: Any) -> Foreign:
    from tfm.interop.gguf import gguf_generation_settings, open_gguf, read_metadata
    from tfm.interop.gguf_tokenizer import special_ids, surroundings, tokenizer_content

    metadata = read_metadata(open_gguf(path))
    before, after = surroundings(metadata)
    ids = special_ids(metadata)
    inner = tokenizer_from_bytes(tokenizer_content(metadata), ids)
    tokenizer = ForeignTokenizer(inner, ids, before=before, after=after)
    config, params = from_gguf(path, dtype=dtype, sharding=sharding)
    return Foreign(config, params, tokenizer, gguf_generation_settings(metadata))


def converted_special(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> Special:
    """The ids and rules that `tfm convert` left in a run folder."""
    settings = settings_from(json.loads((path / "generation_config.json").read_text(encoding="utf-8")))
    return Special(**special_fields(config, settings, tokenizer))


def special_fields(config: ModelConfig, settings: GenerationSettings, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The fields of `tfm.bundle.Special`: ids around texts, and rules about the next token.

    Args:
        config: of the model.
        settings: of the checkpoint.
        tokenizer: of the checkpoint, if it has one.
    """
    eos_ids, pad, bos = settings.eos_ids, settings.pad_id, settings.decoder_start_id
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    if tokenizer is not None:
        eos_ids = eos_ids or (tokenizer.eos_id,)
        pad = tokenizer.pad_id if pad is None else pad
        bos = tokenizer.bos_id if bos is None else bos
    if isinstance(tokenizer, ForeignTokenizer):
        before, after = tokenizer.before, () if config.is_decoder_only else tokenizer.after
    return {"start_id": 0 if bos is None else bos, "eos_ids": eos_ids, "pad_id": 0 if pad is None else pad,
            "before": before, "after": after, "reweight": _reweight(settings), "allow": _allow(settings, eos_ids)}


def _reweight(settings: GenerationSettings) -> tuple[Any, ...]:
    return () if settings.repetition_penalty == 1.0 else (RepetitionPenalty(settings.repetition_penalty),)


def _allow(settings: GenerationSettings, eos_ids: tuple[int, ...]) -> tuple[Any, ...]:
    rules: list[Any] = []
    if settings.suppressed_ids:
        rules.append(Suppress(settings.suppressed_ids))
    if settings.begin_suppressed_ids:
        rules.append(SuppressFirst(settings.begin_suppressed_ids))
    if settings.bad_words:
        rules.append(BadWords(settings.bad_words))
    if settings.forced_bos_id is not None:
        rules.append(ForceFirst((settings.forced_bos_id,)))
    if settings.min_length:
        rules.append(MinLength(settings.min_length, eos_ids))
    if settings.no_repeat_ngram:
        rules.append(NoRepeatNgram(settings.no_repeat_ngram))
    return tuple(rules)
