"""All tables, and which of them reads or writes a model."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfm.config import ModelConfig, require
from tfm.interop.attributes import Attributes
from tfm.interop.bart import BART, MBART
from tfm.interop.bert import BERT
from tfm.interop.distilbert import DISTILBERT
from tfm.interop.family import Family
from tfm.interop.gpt2 import GPT2
from tfm.interop.gpt_neox import GPT_NEOX
from tfm.interop.llama import GEMMA, LLAMA, MISTRAL, QWEN2, QWEN3
from tfm.interop.marian import MARIAN
from tfm.interop.roberta import ROBERTA
from tfm.interop.t5 import T5

FAMILIES = (BERT, ROBERTA, DISTILBERT, GPT2, T5, BART, MBART, MARIAN, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GPT_NEOX)

# Fields that change how a model is run, trained or initialised, and not which function it is.
_IRRELEVANT = (
    "dtype", "param_dtype", "attention_implementation", "scan_layers", "remat", "embedding_init", "kernel_init",
    "init_std", "dropout_rate", "attention_dropout_rate", "activation_dropout_rate", "lora_alpha",
    "lora_targets",
)


def family_of_type(model_type: str) -> Family:
    """The table that reads a foreign `model_type`.

    Raises:
        ValueError: there is none.

    Example:
        >>> family_of_type("bert").prefix
        'bert.'
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"model_type is {model_type!r}, but it must be one of {known}")


def family_of_config(config: ModelConfig) -> Family:
    """The table that writes a model: the first whose foreign config, read back, describes the same function.

    Raises:
        ValueError: no foreign model computes what this one does; the message names what the nearest cannot have.

    Example:
        >>> from tfm.models import presets
        >>> family_of_config(presets.mistral()).model_types
        ('mistral',)
    """
    differences = []
    for family in FAMILIES:
        found = _difference(config, family)
        if not found:
            return family
        no_classes = any(difference.startswith("model.num_classes=") for difference in found)
        differences.append(((no_classes, len(found)), family.model_types[0], found))
    _, name, found = min(differences, key=lambda item: item[0])
    raise ValueError("model: no Hugging Face model computes what this config does; the nearest, "
                     f"{name}, differs in {', '.join(found)}")


def read_config(values: dict[str, Any], names: set[str], where: str = "config.json") -> tuple[ModelConfig, Family]:
    """A foreign config as ours.

    Args:
        values: of the foreign config.
        names: of the tensors in the checkpoint, as the table spells them or not.
        where: for messages.

    Raises:
        ValueError: an attribute that is not known, or a value that is not supported.
    """
    require(isinstance(values.get("model_type"), str), f"{where}: model_type", values.get("model_type"),
            "a Hugging Face checkpoint names its kind there")
    attributes = Attributes(values, where)
    try:
        family = family_of_type(values["model_type"])
        config = family.read(attributes, {family.table_name(name, names) for name in names})
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from error
    attributes.finish()
    return config, family


def _difference(config: ModelConfig, family: Family) -> list[str]:
    """Fields that a family would not keep."""
    # whatever a classifier of ours reads, foreign ones read the first hidden vector through a pooler
    heads: dict[str, Any] = {"pooler": True, "class_pooling": "first"} if config.num_classes else {}
    near = dataclasses.replace(config, **heads)
    try:
        names = {entry.name for entry in family.entries(near)}
        written, _ = read_config(family.write(near), names)
    except (ValueError, ZeroDivisionError) as error:
        return [str(error)] * 100
    ours, theirs = _essence(config), _essence(written)
    return [f"model.{name}={ours[name]!r} (there {theirs[name]!r})" for name in ours if ours[name] != theirs[name]]


def _essence(config: ModelConfig) -> dict[str, Any]:
    """The fields that say which function a model is, spelled one way."""
    layers = config.decoder_layers or config.encoder_layers
    resolved = dataclasses.replace(
        config, head_dim=config.head_dim or (None if config.decoder_num_heads else config.resolved_head_dim),
        num_kv_heads=config.num_kv_heads or (None if config.decoder_num_heads else config.num_heads),
        value_dim=config.resolved_value_dim, class_pooling=config.class_pooling if config.num_classes else "first",
        attention_pattern=tuple(config.pattern_of(i) for i in range(layers)))
    fields = {field.name: getattr(resolved, field.name) for field in dataclasses.fields(ModelConfig)}
    return {name: value for name, value in fields.items() if name not in _IRRELEVANT}
