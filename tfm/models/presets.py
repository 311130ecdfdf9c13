"""The published models as configs: numbers with their source, and one `tiny` for tests.

Every preset takes `vocab_size` and any field of `ModelConfig` as a change.
"""

from __future__ import annotations

from typing import Any

from tfm.config import AttentionPattern, ModelConfig


def _make(defaults: dict[str, Any], vocab_size: int, changes: dict[str, Any]) -> ModelConfig:
    return ModelConfig(vocab_size=vocab_size, **{**defaults, **changes})


def transformer_base(vocab_size: int = 37000, **changes: Any) -> ModelConfig:
    """The base model of Vaswani et al. (2017), Table 3; 37,000 is the vocabulary of its English-German runs.

    Example:
        >>> transformer_base().d_model
        512
    """
    return _make({"max_positions": 1024}, vocab_size, changes)


def transformer_big(vocab_size: int = 37000, **changes: Any) -> ModelConfig:
    """The big model of Vaswani et al. (2017), Table 3 (dropout 0.3: English-German)."""
    return _make({"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout_rate": 0.3, "max_positions": 1024},
                 vocab_size, changes)


def tiny(vocab_size: int = 64, **changes: Any) -> ModelConfig:
    """An encoder-decoder small enough for tests."""
    return _make({"d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}, vocab_size,
                 changes)


def _bert(width: int, layers: int) -> dict[str, Any]:
    return {"d_model": width, "d_ff": 4 * width, "num_heads": width // 64, "encoder_layers": layers,
            "decoder_layers": 0, "position": "learned", "max_positions": 512, "token_types": 2,
            "embedding_norm": True, "norm_epsilon": 1e-12, "activation": "gelu", "attention_bias": True,
            "attention_output_bias": True, "attention_dropout_rate": 0.1, "scale_embeddings": False,
            "logit_bias": True, "token_head": True, "pooler": True, "embedding_init": "normal",
            "kernel_init": "normal"}


def bert_base(vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """BERT-base (Devlin et al., 2019, section 3)."""
    return _make(_bert(768, 12), vocab_size, changes)


def bert_large(vocab_size: int = 30522, **changes: Any) -> ModelConfig:
    """BERT-large (Devlin et al., 2019, section 3)."""
    return _make(_bert(1024, 24), vocab_size, changes)


def gpt2(vocab_size: int = 50257, **changes: Any) -> ModelConfig:
    """GPT-2, the smallest (Radford et al., 2019, Table 2)."""
    return _make({"d_model": 768, "d_ff": 3072, "num_heads": 12, "encoder_layers": 0, "decoder_layers": 12,
                  "position": "learned", "max_positions": 1024, "norm_position": "pre", "norm_epsilon": 1e-5,
                  "activation": "gelu_tanh", "attention_bias": True, "attention_output_bias": True,
                  "attention_dropout_rate": 0.1, "scale_embeddings": False, "embedding_init": "normal",
                  "kernel_init": "normal"}, vocab_size, changes)


def _t5(width: int, d_ff: int, layers: int, heads: int) -> dict[str, Any]:
    return {"d_model": width, "d_ff": d_ff, "num_heads": heads, "head_dim": 64, "encoder_layers": layers,
            "decoder_layers": layers, "norm": "rms", "norm_position": "pre", "position": "t5",
            "feed_forward_bias": False, "activation_dropout_rate": 0.1, "attention_dropout_rate": 0.1,
            "attention_scale": 1.0, "scale_embeddings": False, "logit_scale": width**-0.5}


def t5_small(vocab_size: int = 32128, **changes: Any) -> ModelConfig:
    """T5-small (Raffel et al., 2020, section 3.1.2 and appendix)."""
    return _make(_t5(512, 2048, 6, 8), vocab_size, changes)


def t5_base(vocab_size: int = 32128, **changes: Any) -> ModelConfig:
    """T5-base (Raffel et al., 2020)."""
    return _make(_t5(768, 3072, 12, 12), vocab_size, changes)


def bart_base(vocab_size: int = 50265, **changes: Any) -> ModelConfig:
    """BART-base (Lewis et al., 2020, section 2)."""
    return _make({"d_model": 768, "d_ff": 3072, "num_heads": 12, "position": "learned", "position_offset": 2,
                  "max_positions": 1024, "embedding_norm": True, "norm_epsilon": 1e-5, "activation": "gelu",
                  "attention_bias": True, "attention_output_bias": True, "scale_embeddings": False,
                  "logit_bias": True, "embedding_init": "normal", "kernel_init": "normal"}, vocab_size, changes)


def marian(vocab_size: int = 58101, **changes: Any) -> ModelConfig:
    """Marian's transformer-base as the OPUS-MT models have it (Junczys-Dowmunt et al., 2018; Tiedemann, 2020)."""
    return _make({"max_positions": 512, "sinusoidal_layout": "half", "norm_epsilon": 1e-5, "activation": "silu",
                  "attention_bias": True, "attention_output_bias": True, "logit_bias": True}, vocab_size, changes)


def _llama(width: int, d_ff: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {"d_model": width, "d_ff": d_ff, "num_heads": heads, "num_kv_heads": kv_heads, "encoder_layers": 0,
            "decoder_layers": layers, "norm": "rms", "norm_position": "pre", "norm_epsilon": 1e-5,
            "position": "rotary", "activation": "silu", "gated": True, "feed_forward_bias": False,
            "scale_embeddings": False, "tie_embeddings": "none", "dropout_rate": 0.0, "embedding_init": "normal",
            "kernel_init": "normal"}


def llama(vocab_size: int = 32000, **changes: Any) -> ModelConfig:
    """Llama 2 7B (Touvron et al., 2023, Table 1 and appendix A.2.1)."""
    return _make({**_llama(4096, 11008, 32, 32, 32), "max_positions": 4096}, vocab_size, changes)


def mistral(vocab_size: int = 32000, **changes: Any) -> ModelConfig:
    """Mistral 7B (Jiang et al., 2023, Table 1)."""
    window = (AttentionPattern("window", window=4096),)
    return _make({**_llama(4096, 14336, 32, 32, 8), "max_positions": 32768, "attention_pattern": window}, vocab_size,
                 changes)
