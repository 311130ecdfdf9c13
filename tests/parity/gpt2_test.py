"""GPT-2 against torch."""

from __future__ import annotations

import pytest
import transformers

SIZES = {"vocab_size": 41, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 20, "n_positions": 11}


def test_language_model(check_parity):
    check_parity(transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)))


@pytest.mark.slow
def test_unscaled_scores_and_an_output_of_its_own(check_parity):
    foreign = transformers.GPT2Config(**SIZES, scale_attn_weights=False, activation_function="relu",
                                      tie_word_embeddings=False)
    config, _ = check_parity(transformers.GPT2LMHeadModel(foreign))
    assert config.attention_scale == 1.0 and config.tie_embeddings == "none"
