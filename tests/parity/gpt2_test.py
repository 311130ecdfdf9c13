from __future__ import annotations

import transformers


def small(**changes):
    return transformers.GPT2Config(**{"vocab_size": 41, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 20,
                                      "n_positions": 11, **changes})


def test_language_model(check_parity):
    check_parity(transformers.GPT2LMHeadModel(small()))
