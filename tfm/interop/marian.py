"""Marian (Junczys-Dowmunt et al., 2018): the translation models of OPUS-MT."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes
from tfm.interop.bart import read_sizes, stack_entries, write_sizes
from tfm.interop.family import Family
from tfm.interop.table import ROW, Entry, embedding


def _read(attributes: Attributes, names: Set[str]) -> ModelConfig:
    for name, value in (("normalize_before", False), ("add_final_layer_norm", False), ("normalize_embedding", False),
                        ("static_position_embeddings", True)):
        attributes.expect(name, value, because="Marian's models have no other form")
    attributes.skip("extra_pos_embeddings")  # sinusoids have no table
    sizes = read_sizes(attributes)
    source_size = attributes.take("vocab_size")
    target_size = attributes.take("decoder_vocab_size", default=source_size)
    shared = attributes.take("share_encoder_decoder_embeddings", default=True)
    tied = attributes.take("tie_word_embeddings", default=True)
    ties = {(True, True): "all", (True, False): "inputs", (False, True): "decoder", (False, False): "none"}
    return ModelConfig(**{
        **sizes, "vocab_size": target_size, "source_vocab_size": None if shared else source_size,
        "position": "sinusoidal", "sinusoidal_layout": "half", "tie_embeddings": ties[shared, tied],
        "logit_bias": "final_logits_bias" in names})


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_sizes(config), "model_type": "marian", "architectures": ["MarianMTModel"],
            "pad_token_id": None,  # or readers take 58100, which a smaller vocabulary lacks
            "vocab_size": config.source_vocab_size or config.vocab_size, "decoder_vocab_size": config.vocab_size,
            "share_encoder_decoder_embeddings": config.tie_embeddings in ("all", "inputs"),
            "tie_word_embeddings": config.tie_embeddings in ("all", "decoder"), "static_position_embeddings": True}


def _entries(config: ModelConfig) -> list[Entry]:
    if config.tie_embeddings in ("all", "inputs"):
        entries = embedding("model.shared", "token_embedding")
    else:
        entries = [*embedding("model.encoder.embed_tokens", "source_embedding"),
                   *embedding("model.decoder.embed_tokens", "target_embedding")]
    entries += [*stack_entries(config, "encoder"), *stack_entries(config, "decoder")]
    if config.logit_bias:
        entries.append(Entry("final_logits_bias", ("output/bias",), ROW))
    return [*entries, *embedding("lm_head", "output")] if config.tie_embeddings in ("inputs", "none") else entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    if config.tie_embeddings == "decoder":
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    if config.tie_embeddings == "none":
        return {}
    names = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
    return dict.fromkeys(names + (["lm_head.weight"] if config.tie_embeddings == "all" else []), "model.shared.weight")


MARIAN = Family(
    model_types=("marian",), read=_read, write=_write, entries=_entries, aliases=_aliases, prefix="model.",
    copies_untied=True, unused=(r"model\.(encoder|decoder)\.embed_positions\.weight",))
