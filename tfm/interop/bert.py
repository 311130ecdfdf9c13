"""BERT (Devlin et al., 2019) and encoders of sentences built on it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig, require
from tfm.interop.attributes import Attributes, activation_name
from tfm.interop.family import Family
from tfm.interop.table import SAME, Entry, dense, embedding, norm

POST_LN_ENCODER: dict[str, Any] = {
    "decoder_layers": 0, "position": "learned", "embedding_norm": True, "attention_bias": True,
    "attention_output_bias": True, "scale_embeddings": False, "embedding_init": "normal", "kernel_init": "normal",
}
"""What BERT, RoBERTa and DistilBERT have in common."""


def read_sizes(attributes: Attributes) -> dict[str, Any]:
    """The fields that BERT and RoBERTa name alike."""
    attributes.expect("position_embedding_type", "absolute", because="relative positions of BERT have no table")
    attributes.skip("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                    "pooler_size_per_head", "pooler_type")  # of a pooler that these models do not have
    return {
        **POST_LN_ENCODER,
        "vocab_size": attributes.take("vocab_size"), "d_model": attributes.take("hidden_size"),
        "d_ff": attributes.take("intermediate_size"), "num_heads": attributes.take("num_attention_heads"),
        "encoder_layers": attributes.take("num_hidden_layers"),
        "token_types": attributes.take("type_vocab_size", default=2),
        "activation": attributes.activation("hidden_act", default="gelu"),
        "norm_epsilon": attributes.take("layer_norm_eps", default=1e-12),
        "dropout_rate": attributes.take("hidden_dropout_prob", default=0.1),
        "attention_dropout_rate": attributes.take("attention_probs_dropout_prob", default=0.1),
        "init_std": attributes.take("initializer_range", default=0.02),
        "tie_embeddings": "all" if attributes.take("tie_word_embeddings", default=True) else "none",
    }


def write_sizes(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_sizes`."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "intermediate_size": config.d_ff,
        "num_attention_heads": config.num_heads, "num_hidden_layers": config.encoder_layers,
        "type_vocab_size": config.token_types or 1,  # none there has no table of them
        "hidden_act": activation_name(config.activation),
        "layer_norm_eps": config.norm_epsilon, "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate, "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings == "all",
        **({"id2label": {str(i): f"LABEL_{i}" for i in range(config.num_classes)}} if config.num_classes else {}),
    }


def read_classes(attributes: Attributes, found: bool) -> int:
    """Outputs of the classification head; 0 where none was found."""
    if not found:
        return 0
    for name in attributes.take("architectures", default=()):
        require("ForTokenClassification" not in name, "architectures", name,
                "a head that labels every token is not supported, only one that labels a text")
    attributes.expect("problem_type", None, "single_label_classification", because="a text has one label of several")
    labels = attributes.take("id2label", default=None)
    if not labels:
        return attributes.take("num_labels", default=2)
    require(sorted(labels) == sorted(str(i) for i in range(len(labels))) and
            all(isinstance(name, str) for name in labels.values()), "id2label", labels,
            f"it must name the {len(labels)} classes by a text each, from '0' to '{len(labels) - 1}'")
    return len(labels)


def _read(attributes: Attributes, names: Set[str]) -> ModelConfig:
    has_head, has_pooler = "cls.predictions.bias" in names, "bert.pooler.dense.weight" in names
    fields = read_sizes(attributes)
    if not has_head:
        fields["tie_embeddings"] = "all"
    return ModelConfig(max_positions=attributes.take("max_position_embeddings"), token_head=has_head,
                       logit_bias=has_head, pooler=has_pooler,
                       num_classes=read_classes(attributes, has_pooler and "classifier.weight" in names), **fields)


def _write(config: ModelConfig) -> dict[str, Any]:
    architecture = "BertForSequenceClassification" if config.num_classes else "BertModel"
    if config.token_head:
        architecture = "BertForPreTraining" if config.pooler else "BertForMaskedLM"
    return {"model_type": "bert", "architectures": [architecture], **write_sizes(config),
            "max_position_embeddings": config.max_positions}


def encoder_entries(config: ModelConfig, prefix: str) -> list[Entry]:
    """Embeddings, layers and pooler of BERT and RoBERTa."""
    entries = [
        *embedding(f"{prefix}embeddings.word_embeddings", "token_embedding"),
        *embedding(f"{prefix}embeddings.position_embeddings", "encoder/positions"),
        *embedding(f"{prefix}embeddings.token_type_embeddings", "encoder/token_types"),
        *norm(f"{prefix}embeddings.LayerNorm", "encoder/embedding_norm"),
    ]
    for i in range(config.encoder_layers):
        name, path = f"{prefix}encoder.layer.{i}", f"encoder/layers_{i}"
        for part in ("query", "key", "value"):
            entries += dense(f"{name}.attention.self.{part}", f"{path}/self_attention/{part}")
        entries += dense(f"{name}.attention.output.dense", f"{path}/self_attention/output")
        entries += norm(f"{name}.attention.output.LayerNorm", f"{path}/self_attention_norm")
        entries += dense(f"{name}.intermediate.dense", f"{path}/feed_forward/up")
        entries += dense(f"{name}.output.dense", f"{path}/feed_forward/down")
        entries += norm(f"{name}.output.LayerNorm", f"{path}/feed_forward_norm")
    return [*entries, *dense(f"{prefix}pooler.dense", "pooler")] if config.pooler else entries


def _entries(config: ModelConfig) -> list[Entry]:
    entries = encoder_entries(config, "bert.")
    if config.num_classes:
        entries += dense("classifier", "classifier")
    if config.token_head:
        entries += dense("cls.predictions.transform.dense", "token_head")
        entries += norm("cls.predictions.transform.LayerNorm", "token_head_norm")
        entries.append(Entry("cls.predictions.bias", ("output/bias",), SAME))
        if config.tie_embeddings == "none":
            entries += embedding("cls.predictions.decoder", "output")
    return entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    if not config.token_head:
        return {}
    aliases = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    if config.tie_embeddings == "all":
        aliases["cls.predictions.decoder.weight"] = "bert.embeddings.word_embeddings.weight"
    return aliases


BERT = Family(
    model_types=("bert",), read=_read, write=_write, entries=_entries, aliases=_aliases, prefix="bert.",
    copies_untied=True, unused=(r"bert\.embeddings\.(position_ids|token_type_ids)", r"cls\.seq_relationship\..*"),
    renamed={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"},
)
