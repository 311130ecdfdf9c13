"""Llama 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024), Mistral, Qwen 2 and 3, and Gemma: one table, with
differences in a few fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Any

from tfm.config import AttentionPattern, ModelConfig, require
from tfm.interop.attributes import Attributes, activation_name
from tfm.interop.family import Family
from tfm.interop.rope import read_rotary, write_rotary
from tfm.interop.table import Entry, dense, embedding, norm

_FULL = AttentionPattern()


def _read_common(attributes: Attributes, **fields: Any) -> ModelConfig:
    """What the families share; `fields` are those that differ, `tied` the default of tie_word_embeddings."""
    width, heads = attributes.take("hidden_size"), attributes.take("num_attention_heads")
    head_dim = attributes.take("head_dim", default=width // heads)
    attributes.skip("pretraining_tp", "is_llama_config")
    for name in ("rope_interleaved", "use_mrope"):
        attributes.expect(name, False, because="pairs of dimensions i and i + D/2 rotate by one position")
    tied = attributes.take("tie_word_embeddings", default=fields.pop("tied", False))
    return ModelConfig(**{
        "vocab_size": attributes.take("vocab_size"), "d_model": width, "d_ff": attributes.take("intermediate_size"),
        "num_heads": heads, "num_kv_heads": attributes.take("num_key_value_heads", default=heads),
        "head_dim": head_dim, "encoder_layers": 0, "decoder_layers": attributes.take("num_hidden_layers"),
        "norm": "rms", "norm_position": "pre", "norm_epsilon": attributes.take("rms_norm_eps", default=1e-6),
        **read_rotary(attributes, head_dim), "gated": True, "feed_forward_bias": False, "dropout_rate": 0.0,
        "attention_dropout_rate": attributes.take("attention_dropout", default=0.0),
        "tie_embeddings": "all" if tied else "none", "scale_embeddings": False, "embedding_init": "normal",
        "kernel_init": "normal", "init_std": attributes.take("initializer_range", default=0.02), **fields})


def _read_llama(attributes: Attributes, names: Set[str]) -> ModelConfig:
    bias = attributes.take("attention_bias", default=False)
    return _read_common(attributes, activation=attributes.activation("hidden_act", default="silu"),
                        attention_bias=bias, attention_output_bias=bias,
                        feed_forward_bias=attributes.take("mlp_bias", default=False))


def _read_mistral(attributes: Attributes, names: Set[str]) -> ModelConfig:
    # a config that leaves the window out has the first Mistral's, and one that says null has none
    window = attributes.take("sliding_window", default=None if "sliding_window" in attributes else 4096)
    pattern = _FULL if window is None else AttentionPattern("window", window=window)
    return _read_common(attributes, activation=attributes.activation("hidden_act", default="silu"),
                        attention_pattern=(pattern,))


def _read_qwen2(attributes: Attributes, names: Set[str]) -> ModelConfig:
    return _read_common(attributes, activation=attributes.activation("hidden_act", default="silu"),
                        attention_bias=True, attention_pattern=_qwen_pattern(attributes))


def _read_qwen3(attributes: Attributes, names: Set[str]) -> ModelConfig:
    bias = attributes.take("attention_bias", default=False)
    return _read_common(attributes, activation=attributes.activation("hidden_act", default="silu"), qk_norm=True,
                        attention_bias=bias, attention_output_bias=bias, attention_pattern=_qwen_pattern(attributes))


def _qwen_pattern(attributes: Attributes) -> tuple[AttentionPattern, ...]:
    """Full layers below `max_window_layers` and windows from there on, or as `layer_types` says."""
    layers, first = attributes.take("num_hidden_layers"), attributes.take("max_window_layers", default=28)
    window = attributes.take("sliding_window", default=None if "sliding_window" in attributes else 4096)
    used = attributes.take("use_sliding_window", default=False) and window is not None
    kinds = ["sliding_attention" if used and i >= first else "full_attention" for i in range(layers)]
    kinds = attributes.take("layer_types", default=kinds)
    known = {"full_attention": _FULL}
    if window is not None:
        known["sliding_attention"] = AttentionPattern("window", window=window)
    for kind in kinds:
        require(kind in known, "layer_types", kind, f"it must be one of {', '.join(known)}")
    require(len(kinds) == layers, "the length of layer_types", len(kinds), f"num_hidden_layers is {layers}")
    pattern = tuple(known[kind] for kind in kinds)
    return pattern[:1] if len(set(pattern)) == 1 else pattern


def _read_gemma(attributes: Attributes, names: Set[str]) -> ModelConfig:
    # The published configs say "gelu" where the models were trained with the approximation.
    activation = attributes.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    bias = attributes.take("attention_bias", default=False)
    attributes.expect("use_bidirectional_attention", None, False, because="the table is that of a causal model")
    fields: dict[str, Any] = {"norm_unit_offset": True, "scale_embeddings": True, "tied": True}
    return _read_common(attributes, activation="gelu_tanh" if activation == "gelu" else activation,
                        attention_bias=bias, attention_output_bias=bias, **fields)


def _write_common(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    rotary = write_rotary(dataclasses.replace(config, rotary_dim=None))  # foreign ones rotate whole heads only
    return {
        "model_type": model_type, "architectures": [architecture], "vocab_size": config.vocab_size,
        "hidden_size": config.d_model, "intermediate_size": config.d_ff, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads, "head_dim": config.resolved_head_dim,
        "num_hidden_layers": config.decoder_layers, "rms_norm_eps": config.norm_epsilon, **rotary,
        "hidden_act": activation_name(config.activation), "attention_dropout": config.attention_dropout_rate,
        "tie_word_embeddings": config.tie_embeddings == "all", "initializer_range": config.init_std,
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {**_write_common(config, "llama", "LlamaForCausalLM"), "attention_bias": config.attention_bias,
            "mlp_bias": config.feed_forward_bias}


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    pattern = config.pattern_of(0)
    return {**_write_common(config, "mistral", "MistralForCausalLM"),
            "sliding_window": pattern.window if pattern.kind == "window" else None}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    patterns = [config.pattern_of(i) for i in range(config.decoder_layers)]
    windows = [pattern.window for pattern in patterns if pattern.kind == "window"]
    return {"use_sliding_window": bool(windows), "sliding_window": windows[0] if windows else None,
            "max_window_layers": patterns.index(AttentionPattern("window", window=windows[0])) if windows else 0,
            "layer_types": ["sliding_attention" if p.kind == "window" else "full_attention" for p in patterns]}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {**_write_common(config, "qwen2", "Qwen2ForCausalLM"), **_write_windows(config)}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_common(config, "qwen3", "Qwen3ForCausalLM"), **_write_windows(config),
            "attention_bias": config.attention_bias}


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    return {**_write_common(config, "gemma", "GemmaForCausalLM"), "attention_bias": config.attention_bias}


def _entries(config: ModelConfig) -> list[Entry]:
    entries = embedding("model.embed_tokens", "token_embedding")
    for i in range(config.decoder_layers):
        name, path = f"model.layers.{i}", f"decoder/layers_{i}"
        entries += norm(f"{name}.input_layernorm", f"{path}/self_attention_norm", bias=False)
        for short, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            bias = config.attention_output_bias if short == "o" else config.attention_bias
            entries += dense(f"{name}.self_attn.{short}_proj", f"{path}/self_attention/{part}", bias=bias)
            if config.qk_norm and short in "qk":
                entries += norm(f"{name}.self_attn.{short}_norm", f"{path}/self_attention/{part}_norm", bias=False)
        entries += norm(f"{name}.post_attention_layernorm", f"{path}/feed_forward_norm", bias=False)
        for part in ("gate", "up", "down"):
            entries += dense(f"{name}.mlp.{part}_proj", f"{path}/feed_forward/{part}", bias=config.feed_forward_bias)
    entries += norm("model.norm", "decoder/final_norm", bias=False)
    return [*entries, *embedding("lm_head", "output")] if config.tie_embeddings == "none" else entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    return {} if config.tie_embeddings == "none" else {"lm_head.weight": "model.embed_tokens.weight"}


def _family(model_type: str, read: Any, write: Any) -> Family:
    return Family(model_types=(model_type,), read=read, write=write, entries=_entries, aliases=_aliases,
                  prefix="model.", unused=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",))


LLAMA = _family("llama", _read_llama, _write_llama)
MISTRAL = _family("mistral", _read_mistral, _write_mistral)
QWEN2 = _family("qwen2", _read_qwen2, _write_qwen2)
QWEN3 = _family("qwen3", _read_qwen3, _write_qwen3)
GEMMA = _family("gemma", _read_gemma, _write_gemma)
