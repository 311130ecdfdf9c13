"""A foreign checkpoint as a `Bundle`: its model, its tokenizer, and its habits of generating text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tfm.bundle import Bundle, Special
from tfm.config import Config, DataConfig, DecodeConfig, ModelConfig, require
from tfm.data.foreign_files import load_foreign_tokenizer
from tfm.data.foreign_tokenizer import ForeignTokenizer
from tfm.data.tokenizer import Tokenizer, tokenizer_from_bytes
from tfm.decoding.logits import BadWords, Forced, MinLength, Suppress, SuppressFirst
from tfm.interop import GenerationSettings, from_gguf, from_huggingface, load_generation_settings
from tfm.interop.generation import read_settings, settings_from
from tfm.interop.tensor_files import read_json


@dataclass(frozen=True)
class Foreign:
    """What a foreign checkpoint holds; `tokenizer` is None where it has none."""

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer | None
    settings: GenerationSettings
    pooling: Literal["mean", "first"] = "mean"
    labels: tuple[str, ...] = ()
    """Names of the classes where it is a classifier."""


def load_foreign(path: str | Path, *, say: Callable[[str], None] = print) -> Bundle:
    """The bundle of a Hugging Face checkpoint folder or a GGUF file; see `open_foreign`.

    Args:
        path: the folder or file.
        say: told about settings of the checkpoint that are left to the caller.
    """
    found = open_foreign(path)
    if left := left_to_the_caller(found.settings):
        say(f"{path}: {left}")
    return make_bundle(found)


def left_to_the_caller(settings: GenerationSettings) -> str:
    """What a checkpoint asks for and is not done unless the caller asks for it, too; empty where there is nothing."""
    asked = ", ".join(f"{name}={value}" for name, value in settings.sampling if name != "do_sample")
    return "" if not settings.sampling else (
        f"the checkpoint asks for sampling ({asked or 'do_sample'}), and without a temperature given the most probable "
        "tokens are taken")


def make_bundle(found: Foreign) -> Bundle:
    """What `tfm.load` gives for a foreign checkpoint."""
    special = Special(**special_fields(found.config, found.settings, found.tokenizer), pooling=found.pooling)
    data = DataConfig(task="classify", labels=found.labels) if found.labels else DataConfig()
    config = Config(model=found.config, data=data, decode=DecodeConfig(beam_size=found.settings.num_beams))
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
    return Foreign(config, params, load_foreign_tokenizer(path), load_generation_settings(path),
                   sentence_pooling(path), class_labels(path, config))


def class_labels(folder: Path, config: ModelConfig) -> tuple[str, ...]:
    """The names of the classes in a foreign `config.json`, in order."""
    names = read_json(folder / "config.json").get("id2label") or {}
    return tuple(names.get(str(i), f"LABEL_{i}") for i in range(config.num_classes))


def sentence_pooling(folder: Path) -> Literal["mean", "first"]:
    """How a folder of sentence-transformers makes one vector of a text's hidden vectors; "mean" where it is no such.

    Raises:
        ValueError: in a way that `Bundle.embed` does not know.
    """
    if not (folder / "modules.json").is_file():
        return "mean"
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        kinds = {module["type"].rpartition(".")[2]: Path(module["path"]) for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / 'modules.json'} is no list of objects with a type and a path: "
                         f"{error!r}") from error
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    require(not unknown, f"{folder}: modules.json", unknown, "only Transformer, Pooling and Normalize are known")
    if "Pooling" not in kinds:
        return "mean"
    values = read_json(folder / kinds["Pooling"] / "config.json")
    used = [name for name, value in values.items() if name.startswith("pooling_mode_") and value]
    known: dict[str, Literal["mean", "first"]] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
    require(len(used) == 1 and used[0] in known, f"{folder}: {kinds['Pooling']}", used, f"one of {', '.join(known)}")
    return known[used[0]]


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
    return Special(**special_fields(config, run_settings(path, config), tokenizer))


def run_settings(path: Path, config: ModelConfig) -> GenerationSettings:
    """The generation settings in a run folder that came from a foreign checkpoint."""
    values = read_settings(path / "generation_config.json")
    return settings_from(values, pair=config.is_encoder_decoder)


def training_tokenizer(config: ModelConfig, settings: GenerationSettings, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of a checkpoint, which puts those ids around texts in training that generation uses.

    Args:
        config: of the model.
        settings: of the checkpoint.
        tokenizer: of the checkpoint.
    """
    fields = special_fields(config, settings, tokenizer)
    outer = tokenizer if isinstance(tokenizer, ForeignTokenizer) else ForeignTokenizer(tokenizer, {})
    ids = {"pad_id": fields["pad_id"], "eos_id": fields["eos_ids"][0]}
    if not config.is_encoder_decoder:
        return outer.with_ids(ids, ())
    first = () if settings.forced_bos_id is None else (settings.forced_bos_id,)
    return outer.with_ids({**ids, "bos_id": fields["start_id"]}, first)


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
    first = () if settings.forced_bos_id is None else (settings.forced_bos_id,)
    forced = (Forced(first, settings.forced_eos_ids),) if first or settings.forced_eos_ids else ()
    if tokenizer is not None:
        eos_ids = eos_ids or (tokenizer.eos_id,)
        pad = tokenizer.pad_id if pad is None else pad
        bos = tokenizer.bos_id if bos is None else bos
    if isinstance(tokenizer, ForeignTokenizer):
        before, after = tokenizer.before, () if config.is_decoder_only else tokenizer.after
    return {"start_id": 0 if bos is None else bos, "eos_ids": eos_ids, "pad_id": 0 if pad is None else pad,
            "before": before, "after": after, "reweight": forced, "allow": _allow(settings, eos_ids),
            "defaults": tuple(_defaults(settings).items()), "max_total": settings.max_total}


def _defaults(settings: GenerationSettings) -> dict[str, Any]:
    """The fields of `GenerationOptions` that the checkpoint sets."""
    return {"beam_size": settings.num_beams, "length_penalty": settings.length_penalty,
            "early_stopping": settings.early_stopping, "renormalize": settings.renormalize,
            "min_length": settings.min_length, "max_length": settings.max_length,
            "no_repeat_ngram": settings.no_repeat_ngram, "repetition_penalty": settings.repetition_penalty}


def _allow(settings: GenerationSettings, eos_ids: tuple[int, ...]) -> tuple[Any, ...]:
    rules: list[Any] = []
    if settings.suppressed_ids:
        rules.append(Suppress(settings.suppressed_ids))
    if settings.begin_suppressed_ids:
        rules.append(SuppressFirst(settings.begin_suppressed_ids, after=0 if settings.forced_bos_id is None else 1))
    if words := tuple(word for word in settings.bad_words if word not in [(i,) for i in eos_ids]):  # as transformers
        rules.append(BadWords(words))
    if settings.min_total:
        rules.append(MinLength(settings.min_total, eos_ids, prompt=True))
    return tuple(rules)
