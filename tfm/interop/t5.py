"""T5 (Raffel et al., 2020), its version 1.1, what was tuned from it (Flan), and mT5 (Xue et al., 2021)."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes, activation_name
from tfm.interop.family import Family
from tfm.interop.table import Entry, dense, embedding, norm


def _read(attributes: Attributes, names: Set[str]) -> ModelConfig:
    width, layers = attributes.take("d_model"), attributes.take("num_layers")
    gated, activation = _read_feed_forward(attributes)
    attributes.expect("is_encoder_decoder", True, because="the table is that of an encoder-decoder")
    attributes.skip("n_positions", "is_gated_act", "dense_act_fn")  # the last two repeat feed_forward_proj
    tied = attributes.take("tie_word_embeddings", default=True)
    multilingual = attributes.take("model_type", default="t5") == "mt5"  # which never multiplies its outputs
    # Newer files always say that embeddings are tied, and tell by scale_decoder_outputs what used to follow from it.
    scaled = attributes.take("scale_decoder_outputs", default=tied and not multilingual)
    if multilingual or "scale_decoder_outputs" in attributes:
        tied = "lm_head.weight" not in names
    return ModelConfig(
        vocab_size=attributes.take("vocab_size"), d_model=width, d_ff=attributes.take("d_ff"),
        num_heads=attributes.take("num_heads"), head_dim=attributes.take("d_kv"), encoder_layers=layers,
        decoder_layers=attributes.take("num_decoder_layers", default=layers), norm="rms", norm_position="pre",
        norm_epsilon=attributes.take("layer_norm_epsilon", default=1e-6), position="t5",
        t5_buckets=attributes.take("relative_attention_num_buckets", default=32),
        t5_max_distance=attributes.take("relative_attention_max_distance", default=128), activation=activation,
        gated=gated, feed_forward_bias=False, attention_scale=1.0,
        dropout_rate=(dropout := attributes.take("dropout_rate", default=0.1)), attention_dropout_rate=dropout,
        activation_dropout_rate=dropout, scale_embeddings=False, logit_scale=width**-0.5 if scaled else 1.0,
        tie_embeddings="all" if tied else "inputs")


def _read_feed_forward(attributes: Attributes) -> tuple[bool, Any]:
    name = attributes.take("feed_forward_proj", default="relu")
    gated = name.startswith("gated-")
    activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    return gated, Attributes({"feed_forward_proj": activation}).activation("feed_forward_proj")


def _write(config: ModelConfig) -> dict[str, Any]:
    tied, scaled = config.tie_embeddings == "all", config.logit_scale != 1.0
    name = "gelu" if config.gated and config.activation == "gelu_tanh" else activation_name(config.activation)
    return {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": config.vocab_size,
        "d_model": config.d_model, "d_ff": config.d_ff, "num_heads": config.num_heads,
        "d_kv": config.resolved_head_dim, "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers, "layer_norm_epsilon": config.norm_epsilon,
        "relative_attention_num_buckets": config.t5_buckets,
        "relative_attention_max_distance": config.t5_max_distance,
        "feed_forward_proj": f"gated-{name}" if config.gated else name, "dropout_rate": config.dropout_rate,
        "tie_word_embeddings": tied, "is_encoder_decoder": True,
        **({} if scaled == tied else {"scale_decoder_outputs": scaled}),  # older readers take the one for the other
    }


def _entries(config: ModelConfig) -> list[Entry]:
    entries = embedding("shared", "token_embedding")
    for stack in ("encoder", "decoder"):
        entries += embedding(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{stack}/relative_bias")
        for i in range(config.decoder_layers if stack == "decoder" else config.encoder_layers):
            entries += _layer_entries(f"{stack}.block.{i}.layer", f"{stack}/layers_{i}", config, stack == "decoder")
        entries += norm(f"{stack}.final_layer_norm", f"{stack}/final_norm", bias=False)
    return [*entries, *embedding("lm_head", "output")] if config.tie_embeddings == "inputs" else entries


def _layer_entries(name: str, path: str, config: ModelConfig, cross: bool) -> list[Entry]:
    entries = []
    attentions = [("SelfAttention", "self_attention")] + [("EncDecAttention", "cross_attention")] * cross
    for place, (foreign, ours) in enumerate(attentions):
        for short, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            entries += dense(f"{name}.{place}.{foreign}.{short}", f"{path}/{ours}/{part}", bias=False)
        entries += norm(f"{name}.{place}.layer_norm", f"{path}/{ours}_norm", bias=False)
    last = f"{name}.{len(attentions)}"
    parts = {"wi_0": "gate", "wi_1": "up", "wo": "down"} if config.gated else {"wi": "up", "wo": "down"}
    for foreign, ours in parts.items():
        entries += dense(f"{last}.DenseReluDense.{foreign}", f"{path}/feed_forward/{ours}", bias=False)
    return [*entries, *norm(f"{last}.layer_norm", f"{path}/feed_forward_norm", bias=False)]


def _aliases(config: ModelConfig) -> dict[str, str]:
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return dict.fromkeys(names + (["lm_head.weight"] if config.tie_embeddings == "all" else []), "shared.weight")


T5 = Family(model_types=("t5", "mt5"), read=_read, write=_write, entries=_entries, aliases=_aliases,
            unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",))
