from __future__ import annotations

import transformers

SIZES = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 14, "max_position_embeddings": 11,
         "pad_token_id": 3, "eos_token_id": 0, "forced_eos_token_id": 0, "decoder_start_token_id": 3}


def test_shared_embeddings(check_parity):
    foreign = transformers.MarianConfig(vocab_size=41, scale_embedding=True, activation_function="swish", **SIZES)
    config, _ = check_parity(transformers.MarianMTModel(foreign), pad=3)
    assert config.logit_bias and config.tie_embeddings == "all"
