from __future__ import annotations

import transformers

SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 20, "max_position_embeddings": 64}


def test_llama(check_parity):
    check_parity(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)))


def test_gemma(check_parity):
    config, _ = check_parity(transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)))
    assert config.norm_unit_offset and config.tie_embeddings == "all"
