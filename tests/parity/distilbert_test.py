"""DistilBERT against torch."""

from __future__ import annotations

import transformers

SIZES = {"vocab_size": 41, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "max_position_embeddings": 11}


def test_masked_lm(check_parity):
    config, _ = check_parity(transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**SIZES)))
    assert config.token_types == 0
