"""BART and mBART against torch, with an encoder and a decoder of different sizes."""

from __future__ import annotations

import transformers

SIZES = {"vocab_size": 41, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 14, "max_position_embeddings": 11,
         "scale_embedding": True}


def test_bart(check_parity):
    config, _ = check_parity(transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES)), pad=1)
    assert config.norm_position == "post" and config.logit_bias


def test_mbart(check_parity):
    config, _ = check_parity(transformers.MBartForConditionalGeneration(transformers.MBartConfig(**SIZES)), pad=1)
    assert config.norm_position == "pre" and config.embedding_norm
