"""T5, its version 1.1 and mT5 against torch."""

from __future__ import annotations

import torch
import transformers

SIZES = {"vocab_size": 41, "d_model": 24, "d_kv": 10, "num_heads": 3, "d_ff": 20, "num_layers": 2,
         "num_decoder_layers": 1, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
         "decoder_start_token_id": 0}


def test_tied(check_parity):
    config, _ = check_parity(transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)))
    assert config.tie_embeddings == "all" and config.logit_scale == 24**-0.5 and config.resolved_head_dim == 10


def test_version_1_1(check_parity):
    foreign = transformers.T5Config(**SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model = transformers.T5ForConditionalGeneration(foreign)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # as in the published files
    config, _ = check_parity(model)
    assert config.tie_embeddings == "inputs" and config.logit_scale == 1.0 and config.gated


def test_version_1_1_with_tied_embeddings(check_parity):
    foreign = transformers.T5Config(**SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    config, _ = check_parity(transformers.T5ForConditionalGeneration(foreign))  # newer software ties them all the same
    assert config.tie_embeddings == "all" and config.logit_scale == 1.0


def test_mt5(check_parity, tmp_path):
    model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**SIZES))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    config, _ = check_parity(model)
    assert config.tie_embeddings == "inputs" and config.logit_scale == 1.0 and config.gated
    source, target = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 8]])
    exported = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        found, expected = (m(source, decoder_input_ids=target).logits for m in (exported, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
