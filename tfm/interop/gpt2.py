"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes, activation_name
from tfm.interop.family import Family
from tfm.interop.table import SAME, Entry, columns, dense, embedding, norm


def _read(attributes: Attributes, names: Set[str]) -> ModelConfig:
    width = attributes.take("n_embd")
    dropout = attributes.take("resid_pdrop", default=0.1)
    attributes.expect("embd_pdrop", dropout, because="one dropout rate serves embeddings and layers (resid_pdrop)")
    attributes.expect("scale_attn_by_inverse_layer_idx", False, because="all layers scale their scores alike")
    attributes.skip("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
                    "summary_proj_to_labels", "summary_first_dropout")
    scaled = attributes.take("scale_attn_weights", default=True)
    return ModelConfig(
        vocab_size=attributes.take("vocab_size"), d_model=width, d_ff=attributes.take("n_inner", default=4 * width),
        num_heads=attributes.take("n_head"), encoder_layers=0, decoder_layers=attributes.take("n_layer"),
        norm_position="pre", norm_epsilon=attributes.take("layer_norm_epsilon", default=1e-5), position="learned",
        max_positions=attributes.take("n_positions"), activation=attributes.activation("activation_function",
                                                                                      default="gelu_new"),
        attention_bias=True, attention_output_bias=True, attention_scale=None if scaled else 1.0,
        dropout_rate=dropout, attention_dropout_rate=attributes.take("attn_pdrop", default=0.1),
        tie_embeddings="all" if attributes.take("tie_word_embeddings", default=True) else "none",
        scale_embeddings=False, embedding_init="normal", kernel_init="normal",
        init_std=attributes.take("initializer_range", default=0.02))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
        "n_embd": config.d_model, "n_inner": config.d_ff, "n_head": config.num_heads, "n_layer": config.decoder_layers,
        "layer_norm_epsilon": config.norm_epsilon, "n_positions": config.max_positions,
        "activation_function": activation_name(config.activation), "scale_attn_weights": config.attention_scale != 1.0,
        "resid_pdrop": config.dropout_rate, "embd_pdrop": config.dropout_rate,
        "attn_pdrop": config.attention_dropout_rate, "tie_word_embeddings": config.tie_embeddings == "all",
        "initializer_range": config.init_std,
    }


def _entries(config: ModelConfig) -> list[Entry]:
    entries = [*embedding("transformer.wte", "token_embedding"), *embedding("transformer.wpe", "decoder/positions")]
    fused = columns(*[config.num_heads * config.resolved_head_dim] * 3)
    for i in range(config.decoder_layers):
        name, path = f"transformer.h.{i}", f"decoder/layers_{i}"
        attention = [f"{path}/self_attention/{part}" for part in ("query", "key", "value")]
        entries += norm(f"{name}.ln_1", f"{path}/self_attention_norm")
        entries.append(Entry(f"{name}.attn.c_attn.weight", tuple(f"{part}/kernel" for part in attention), fused))
        entries.append(Entry(f"{name}.attn.c_attn.bias", tuple(f"{part}/bias" for part in attention), fused))
        entries += dense(f"{name}.attn.c_proj", f"{path}/self_attention/output", layout=SAME)
        entries += norm(f"{name}.ln_2", f"{path}/feed_forward_norm")
        entries += dense(f"{name}.mlp.c_fc", f"{path}/feed_forward/up", layout=SAME)
        entries += dense(f"{name}.mlp.c_proj", f"{path}/feed_forward/down", layout=SAME)
    entries += norm("transformer.ln_f", "decoder/final_norm")
    return [*entries, *embedding("lm_head", "output")] if config.tie_embeddings == "none" else entries


def _aliases(config: ModelConfig) -> dict[str, str]:
    return {} if config.tie_embeddings == "none" else {"lm_head.weight": "transformer.wte.weight"}


GPT2 = Family(model_types=("gpt2",), read=_read, write=_write, entries=_entries, aliases=_aliases,
              prefix="transformer.", unused=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",))
