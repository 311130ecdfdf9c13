"""BART (Lewis et al., 2020) and mBART (Liu et al., 2020); Marian's table shares their layers."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes, activation_name
from tfm.interop.family import Family
from tfm.interop.table import ROW, Entry, dense, embedding, norm


def read_sizes(attributes: Attributes) -> dict[str, Any]:
    """The fields that BART, mBART and Marian name alike."""
    attributes.skip("encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "classif_dropout", "save_step")
    attributes.expect("is_encoder_decoder", True, because="the table is that of an encoder-decoder")
    attributes.expect("add_bias_logits", False, because="the logits' bias is final_logits_bias")
    heads, d_ff = attributes.take("encoder_attention_heads"), attributes.take("encoder_ffn_dim")
    decoder_heads, decoder_d_ff = attributes.take("decoder_attention_heads"), attributes.take("decoder_ffn_dim")
    return {
        "d_model": attributes.take("d_model"), "d_ff": d_ff, "num_heads": heads,
        "encoder_layers": attributes.take("encoder_layers"), "decoder_layers": attributes.take("decoder_layers"),
        "decoder_d_ff": None if decoder_d_ff == d_ff else decoder_d_ff,
        "decoder_num_heads": None if decoder_heads == heads else decoder_heads,
        "norm_epsilon": 1e-5, "max_positions": attributes.take("max_position_embeddings"),
        "activation": attributes.activation("activation_function", default="gelu"), "attention_bias": True,
        "attention_output_bias": True, "dropout_rate": attributes.take("dropout", default=0.1),
        "attention_dropout_rate": attributes.take("attention_dropout", default=0.0),
        "activation_dropout_rate": attributes.take("activation_dropout", default=0.0),
        "scale_embeddings": attributes.take("scale_embedding", default=False),
        "init_std": attributes.take("init_std", default=0.02), "embedding_init": "normal", "kernel_init": "normal",
    }


def write_sizes(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_sizes`."""
    return {
        "vocab_size": config.vocab_size, "d_model": config.d_model, "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.decoder_d_ff or config.d_ff, "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.decoder_num_heads or config.num_heads,
        "encoder_layers": config.encoder_layers, "decoder_layers": config.decoder_layers,
        "max_position_embeddings": config.max_positions, "activation_function": activation_name(config.activation),
        "dropout": config.dropout_rate, "attention_dropout": config.attention_dropout_rate,
        "activation_dropout": config.activation_dropout_rate, "scale_embedding": config.scale_embeddings,
        "init_std": config.init_std, "is_encoder_decoder": True,
    }


def _read(attributes: Attributes, names: Set[str], *, position: str) -> ModelConfig:
    attributes.expect("normalize_before", position == "pre", because="the model type says where norms are")
    attributes.expect("add_final_layer_norm", position == "pre", because="the model type says where norms are")
    attributes.expect("normalize_embedding", True, because="the table has a norm on the embeddings")
    attributes.expect("extra_pos_embeddings", 2, because="the position table has two rows before that of position 0")
    attributes.expect("static_position_embeddings", False, because="the table has learned positions")
    tied = attributes.take("tie_word_embeddings", default=True)
    return ModelConfig(**{
        **read_sizes(attributes), "vocab_size": attributes.take("vocab_size"), "norm_position": position,
        "position": "learned", "position_offset": 2, "embedding_norm": True,
        "logit_bias": "final_logits_bias" in names, "tie_embeddings": "all" if tied else "inputs"})


def _read_bart(attributes: Attributes, names: Set[str]) -> ModelConfig:
    return _read(attributes, names, position="post")


def _read_mbart(attributes: Attributes, names: Set[str]) -> ModelConfig:
    return _read(attributes, names, position="pre")


def _write(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **write_sizes(config),
            "tie_word_embeddings": config.tie_embeddings == "all"}


def stack_entries(config: ModelConfig, stack: str) -> list[Entry]:
    """The layers of the encoder or decoder."""
    entries = []
    parts = (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output"))
    attentions = {"self_attn": "self_attention"} | ({"encoder_attn": "cross_attention"} if stack == "decoder" else {})
    for i in range(config.decoder_layers if stack == "decoder" else config.encoder_layers):
        name, path = f"model.{stack}.layers.{i}", f"{stack}/layers_{i}"
        for foreign, ours in attentions.items():
            for short, part in parts:
                entries += dense(f"{name}.{foreign}.{short}_proj", f"{path}/{ours}/{part}")
            entries += norm(f"{name}.{foreign}_layer_norm", f"{path}/{ours}_norm")
        entries += dense(f"{name}.fc1", f"{path}/feed_forward/up")
        entries += dense(f"{name}.fc2", f"{path}/feed_forward/down")
        entries += norm(f"{name}.final_layer_norm", f"{path}/feed_forward_norm")
    return entries


def _entries(config: ModelConfig) -> list[Entry]:
    entries = embedding("model.shared", "token_embedding")
    for stack in ("encoder", "decoder"):
        entries += embedding(f"model.{stack}.embed_positions", f"{stack}/positions")
        entries += norm(f"model.{stack}.layernorm_embedding", f"{stack}/embedding_norm")
        entries += stack_entries(config, stack)
        if config.norm_position == "pre":
            entries += norm(f"model.{stack}.layer_norm", f"{stack}/final_norm")
    if config.logit_bias:
        entries.append(Entry("final_logits_bias", ("output/bias",), ROW))
    return [*entries, *embedding("lm_head", "output")] if config.tie_embeddings == "inputs" else entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    names = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
    return dict.fromkeys(names + (["lm_head.weight"] if config.tie_embeddings == "all" else []), "model.shared.weight")


BART = Family(
    model_types=("bart",), read=_read_bart, entries=_entries, aliases=_aliases, prefix="model.",
    copies_untied=True, write=lambda config: _write(config, "bart", "BartForConditionalGeneration"))
MBART = Family(
    model_types=("mbart",), read=_read_mbart, entries=_entries, aliases=_aliases, prefix="model.",
    copies_untied=True, write=lambda config: _write(config, "mbart", "MBartForConditionalGeneration"))
