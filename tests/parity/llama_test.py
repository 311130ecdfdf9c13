"""Llama, Mistral, Qwen and Gemma against torch; every kind of RoPE scaling."""

from __future__ import annotations

import pytest
import transformers

SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 20, "max_position_embeddings": 64}

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
}


def test_llama(check_parity):
    foreign = transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3)
    check_parity(transformers.LlamaForCausalLM(foreign))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "llama3" else pytest.mark.slow)
                                  for kind in SCALINGS])
def test_rope_scalings(check_parity, kind):
    positions = 4 if kind == "dynamic" else 64  # so that rows are longer than those the model was made for
    foreign = transformers.LlamaConfig(**{**SIZES, "max_position_embeddings": positions},
                                       rope_parameters={"rope_theta": 500.0, **SCALINGS[kind]})
    config, _ = check_parity(transformers.LlamaForCausalLM(foreign))
    assert config.rotary_scaling.kind == kind and config.position_base == 500.0


def test_mistral(check_parity):
    config, _ = check_parity(transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=3)))
    assert config.attention_pattern[0].window == 3


@pytest.mark.slow
def test_qwen2_with_windows_in_its_last_layers(check_parity):
    foreign = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    config, _ = check_parity(transformers.Qwen2ForCausalLM(foreign))
    assert [config.pattern_of(i).kind for i in range(2)] == ["full", "window"]


def test_qwen3(check_parity):
    config, _ = check_parity(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)))
    assert config.qk_norm


def test_gemma(check_parity):
    config, _ = check_parity(transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)))
    assert config.norm_unit_offset and config.tie_embeddings == "all"
