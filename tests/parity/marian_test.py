"""Marian against torch, with one table and with two."""

from __future__ import annotations

import transformers

SIZES = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 14, "max_position_embeddings": 11,
         "pad_token_id": 3, "eos_token_id": 0, "forced_eos_token_id": 0, "decoder_start_token_id": 3,
         "scale_embedding": True, "activation_function": "swish"}


def test_shared_embeddings(check_parity):
    config, _ = check_parity(transformers.MarianMTModel(transformers.MarianConfig(vocab_size=41, **SIZES)), pad=3)
    assert config.logit_bias and config.tie_embeddings == "all"


def test_two_vocabularies(check_parity):
    foreign = transformers.MarianConfig(vocab_size=41, decoder_vocab_size=31, share_encoder_decoder_embeddings=False,
                                        **SIZES)
    config, _ = check_parity(transformers.MarianMTModel(foreign), pad=3)
    assert config.tie_embeddings == "decoder" and (config.source_vocab_size, config.vocab_size) == (41, 31)
