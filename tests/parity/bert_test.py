from __future__ import annotations

import transformers


def small(**changes):
    return transformers.BertConfig(**{"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2,
                                      "num_attention_heads": 3, "intermediate_size": 20,
                                      "max_position_embeddings": 11, "type_vocab_size": 3, **changes})


def test_masked_lm(check_parity):
    config, _ = check_parity(transformers.BertForMaskedLM(small(hidden_act="gelu_new")), token_types=True)
    assert config.token_head and not config.pooler
