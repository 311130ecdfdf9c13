"""GPT-NeoX (Black et al., 2022) and Pythia."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes, activation_name
from tfm.interop.family import Family
from tfm.interop.rope import read_rotary, write_rotary
from tfm.interop.table import Entry, dense, embedding, heads_of_three, norm


def _read(attributes: Attributes, names: Set[str]) -> ModelConfig:
    width, heads = attributes.take("hidden_size"), attributes.take("num_attention_heads")
    bias = attributes.take("attention_bias", default=True)
    tied = attributes.take("tie_word_embeddings", default=False)
    return ModelConfig(
        vocab_size=attributes.take("vocab_size"), d_model=width, d_ff=attributes.take("intermediate_size"),
        num_heads=heads, encoder_layers=0, decoder_layers=attributes.take("num_hidden_layers"), norm_position="pre",
        norm_epsilon=attributes.take("layer_norm_eps", default=1e-5),
        parallel_residual=attributes.take("use_parallel_residual", default=True),
        **read_rotary(attributes, width // heads, share=0.25),
        activation=attributes.activation("hidden_act", default="gelu"), attention_bias=bias,
        attention_output_bias=bias, dropout_rate=attributes.take("hidden_dropout", default=0.0),
        attention_dropout_rate=attributes.take("attention_dropout", default=0.0), scale_embeddings=False,
        tie_embeddings="all" if tied else "none", embedding_init="normal", kernel_init="normal",
        init_std=attributes.take("initializer_range", default=0.02))


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = write_rotary(config)
    share = rotary["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": config.vocab_size,
        "hidden_size": config.d_model, "intermediate_size": config.d_ff, "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.decoder_layers, "layer_norm_eps": config.norm_epsilon,
        "use_parallel_residual": config.parallel_residual, **rotary, "rotary_pct": share,
        "rotary_emb_base": config.position_base, "hidden_act": activation_name(config.activation),
        "attention_bias": config.attention_bias, "hidden_dropout": config.dropout_rate,
        "attention_dropout": config.attention_dropout_rate, "tie_word_embeddings": config.tie_embeddings == "all",
        "initializer_range": config.init_std,
    }


def _entries(config: ModelConfig) -> list[Entry]:
    entries = embedding("gpt_neox.embed_in", "token_embedding")
    fused = heads_of_three(config.num_heads)
    for i in range(config.decoder_layers):
        name, path = f"gpt_neox.layers.{i}", f"decoder/layers_{i}"
        attention = [f"{path}/self_attention/{part}" for part in ("query", "key", "value")]
        entries += norm(f"{name}.input_layernorm", f"{path}/self_attention_norm")
        entries += norm(f"{name}.post_attention_layernorm", f"{path}/feed_forward_norm")
        for kind, ours in (("weight", "kernel"), ("bias", "bias"))[:1 + config.attention_bias]:
            entries.append(Entry(f"{name}.attention.query_key_value.{kind}",
                                 tuple(f"{part}/{ours}" for part in attention), fused))
        entries += dense(f"{name}.attention.dense", f"{path}/self_attention/output", bias=config.attention_output_bias)
        entries += dense(f"{name}.mlp.dense_h_to_4h", f"{path}/feed_forward/up")
        entries += dense(f"{name}.mlp.dense_4h_to_h", f"{path}/feed_forward/down")
    entries += norm("gpt_neox.final_layer_norm", "decoder/final_norm")
    return [*entries, *embedding("embed_out", "output")] if config.tie_embeddings == "none" else entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    return {} if config.tie_embeddings == "none" else {"embed_out.weight": "gpt_neox.embed_in.weight"}


GPT_NEOX = Family(
    model_types=("gpt_neox",), read=_read, write=_write, entries=_entries, aliases=_aliases, prefix="gpt_neox.",
    unused=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    renamed={"lm_head.weight": "embed_out.weight"})
