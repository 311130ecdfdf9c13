"""DistilBERT (Sanh et al., 2019)."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes, activation_name
from tfm.interop.bert import POST_LN_ENCODER
from tfm.interop.family import Family
from tfm.interop.table import SAME, Entry, dense, embedding, norm


def _read(attributes: Attributes, names: Set[str]) -> ModelConfig:
    has_head = "vocab_projector.bias" in names
    attributes.skip("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds")  # the table of positions is stored
    tied = attributes.take("tie_word_embeddings", "tie_weights_", default=True) or not has_head
    return ModelConfig(**{
        **POST_LN_ENCODER, "vocab_size": attributes.take("vocab_size"), "d_model": attributes.take("dim"),
        "d_ff": attributes.take("hidden_dim"), "num_heads": attributes.take("n_heads"),
        "encoder_layers": attributes.take("n_layers"), "max_positions": attributes.take("max_position_embeddings"),
        "activation": attributes.activation("activation", default="gelu"), "norm_epsilon": 1e-12,
        "dropout_rate": attributes.take("dropout", default=0.1),
        "attention_dropout_rate": attributes.take("attention_dropout", default=0.1),
        "init_std": attributes.take("initializer_range", default=0.02), "token_head": has_head,
        "logit_bias": has_head, "tie_embeddings": "all" if tied else "none"})


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "distilbert",
        "architectures": ["DistilBertForMaskedLM" if config.token_head else "DistilBertModel"],
        "vocab_size": config.vocab_size, "dim": config.d_model, "hidden_dim": config.d_ff, "n_heads": config.num_heads,
        "n_layers": config.encoder_layers, "max_position_embeddings": config.max_positions,
        "activation": activation_name(config.activation), "dropout": config.dropout_rate,
        "attention_dropout": config.attention_dropout_rate, "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings == "all", "sinusoidal_pos_embds": False,
    }


def _entries(config: ModelConfig) -> list[Entry]:
    entries = [
        *embedding("distilbert.embeddings.word_embeddings", "token_embedding"),
        *embedding("distilbert.embeddings.position_embeddings", "encoder/positions"),
        *norm("distilbert.embeddings.LayerNorm", "encoder/embedding_norm"),
    ]
    for i in range(config.encoder_layers):
        name, path = f"distilbert.transformer.layer.{i}", f"encoder/layers_{i}"
        for short, part in (("q_lin", "query"), ("k_lin", "key"), ("v_lin", "value"), ("out_lin", "output")):
            entries += dense(f"{name}.attention.{short}", f"{path}/self_attention/{part}")
        entries += norm(f"{name}.sa_layer_norm", f"{path}/self_attention_norm")
        entries += dense(f"{name}.ffn.lin1", f"{path}/feed_forward/up")
        entries += dense(f"{name}.ffn.lin2", f"{path}/feed_forward/down")
        entries += norm(f"{name}.output_layer_norm", f"{path}/feed_forward_norm")
    if config.token_head:
        entries += dense("vocab_transform", "token_head")
        entries += norm("vocab_layer_norm", "token_head_norm")
        entries.append(Entry("vocab_projector.bias", ("output/bias",), SAME))
        if config.tie_embeddings == "none":
            entries += embedding("vocab_projector", "output")
    return entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    if config.tie_embeddings == "none":
        return {}
    return {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}


DISTILBERT = Family(model_types=("distilbert",), read=_read, write=_write, entries=_entries, aliases=_aliases,
                    prefix="distilbert.", unused=(r"distilbert\.embeddings\.position_ids",))
