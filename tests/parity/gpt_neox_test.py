"""GPT-NeoX against torch: parallel residuals, a part of each head rotated, queries, keys and values in one matrix."""

from __future__ import annotations

import pytest
import transformers

SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 20, "max_position_embeddings": 64}


def test_parallel(check_parity):
    config, _ = check_parity(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)))
    assert config.parallel_residual and config.rotary_dim == 2


@pytest.mark.slow
def test_sequential(check_parity):
    foreign = transformers.GPTNeoXConfig(**SIZES, use_parallel_residual=False, attention_bias=False)
    config, _ = check_parity(transformers.GPTNeoXForCausalLM(foreign))
    assert not config.parallel_residual
