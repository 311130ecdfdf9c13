"""Marian against torch, with one table and with two."""

from __future__ import annotations

import jax
import numpy as np
import torch
import transformers

from tfm import build, presets
from tfm.interop import to_huggingface
from tfm.models import init_params

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


def test_a_model_without_known_ids_is_read_by_transformers(tmp_path):
    config = presets.marian(41, d_model=24, d_ff=20, num_heads=2, encoder_layers=1, decoder_layers=1, max_positions=11)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    to_huggingface(config, params, tmp_path)
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    source, target = np.array([[3, 40, 7]], np.int32), np.array([[9, 40]], np.int32)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(source).long(), decoder_input_ids=torch.tensor(target).long()).logits
    np.testing.assert_allclose(build(config).apply({"params": params}, source, target), logits.numpy(), atol=2e-4)
