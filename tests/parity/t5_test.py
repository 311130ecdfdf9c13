"""T5 and its version 1.1 against torch."""

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
