"""RoBERTa (Liu et al., 2019), with XLM-RoBERTa and CamemBERT, whose tensors are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes
from tfm.interop.bert import encoder_entries, read_classes, read_sizes, write_sizes
from tfm.interop.family import Family
from tfm.interop.table import SAME, Entry, dense, embedding, norm


def _read(attributes: Attributes, names: Set[str]) -> ModelConfig:
    has_head = "lm_head.bias" in names
    fields = read_sizes(attributes)
    if has_head:
        attributes.expect("hidden_act", "gelu", "gelu_python", because="the token head has an exact GELU")
    else:
        fields["tie_embeddings"] = "all"
    has_classes = "classifier.out_proj.weight" in names  # their dense layer is what BERT's pooler is
    offset = attributes.take("pad_token_id", default=1) + 1  # position 0 has the row after that of padding
    return ModelConfig(max_positions=attributes.take("max_position_embeddings") - offset, position_offset=offset,
                       token_head=has_head, logit_bias=has_head,
                       pooler=has_classes or "roberta.pooler.dense.weight" in names,
                       num_classes=read_classes(attributes, has_classes), **fields)


def _write(config: ModelConfig) -> dict[str, Any]:
    heads = {"ForMaskedLM": config.token_head, "ForSequenceClassification": config.num_classes > 0, "Model": True}
    return {"model_type": "roberta",
            "architectures": [f"Roberta{next(name for name, there in heads.items() if there)}"],
            **write_sizes(config), "max_position_embeddings": config.max_positions + config.position_offset,
            "pad_token_id": config.position_offset - 1}


def _entries(config: ModelConfig) -> list[Entry]:
    if config.num_classes:
        return [*encoder_entries(dataclasses.replace(config, pooler=False), "roberta."),
                *dense("classifier.dense", "pooler"), *dense("classifier.out_proj", "classifier")]
    entries = encoder_entries(config, "roberta.")
    if config.token_head:
        entries += dense("lm_head.dense", "token_head")
        entries += norm("lm_head.layer_norm", "token_head_norm")
        entries.append(Entry("lm_head.bias", ("output/bias",), SAME))
        if config.tie_embeddings == "none":
            entries += embedding("lm_head.decoder", "output")
    return entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    if not config.token_head:
        return {}
    aliases = {"lm_head.decoder.bias": "lm_head.bias"}
    if config.tie_embeddings == "all":
        aliases["lm_head.decoder.weight"] = "roberta.embeddings.word_embeddings.weight"
    return aliases


ROBERTA = Family(
    model_types=("roberta", "xlm-roberta", "camembert"), read=_read, write=_write, entries=_entries, aliases=_aliases,
    copies_untied=True, prefix="roberta.", unused=(r"roberta\.embeddings\.(position_ids|token_type_ids)",))
