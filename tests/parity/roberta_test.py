"""RoBERTa against torch: positions begin after the row of padding."""

from __future__ import annotations

import transformers

SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 20, "max_position_embeddings": 11, "type_vocab_size": 1}


def test_masked_lm(check_parity):
    config, _ = check_parity(transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, pad_token_id=1)),
                             pad=1)
    assert (config.position_offset, config.max_positions) == (2, 9)
