"""BART and mBART against torch, with an encoder and a decoder of different sizes."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from tfm.interop import from_huggingface

SIZES = {"vocab_size": 41, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 14, "max_position_embeddings": 11,
         "scale_embedding": True}


def test_bart(check_parity):
    config, _ = check_parity(transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES)), pad=1)
    assert config.norm_position == "post" and config.logit_bias


@pytest.mark.parametrize("shape", [(2, 41), (0, 41), (41,), ()])
def test_a_bias_of_the_logits_that_is_not_one_row_is_refused(shape, tmp_path):
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES))
    model.final_logits_bias = torch.zeros(shape)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"final_logits_bias: it has shape {re.escape(str(shape))}, but one row"):
        from_huggingface(tmp_path)


def test_mbart(check_parity):
    config, _ = check_parity(transformers.MBartForConditionalGeneration(transformers.MBartConfig(**SIZES)), pad=1)
    assert config.norm_position == "pre" and config.embedding_norm
