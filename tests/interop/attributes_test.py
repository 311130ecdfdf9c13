"""No attribute of a foreign config is passed over in silence."""

from __future__ import annotations

import dataclasses

import pytest

from tfm.interop.families import family_of_config, read_config
from tfm.models import presets

BERT = {"model_type": "bert", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
        "num_hidden_layers": 1, "max_position_embeddings": 8}
LLAMA = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2,
         "num_hidden_layers": 1, "max_position_embeddings": 8}


def test_an_unknown_attribute_is_named():
    with pytest.raises(ValueError, match="has new_attention = 'sparse', which no table"):
        read_config({**BERT, "new_attention": "sparse"}, set())


@pytest.mark.parametrize("changes, message", [
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ({"is_decoder": True}, "is_decoder is True"),
    ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"hidden_size": None}, "has no hidden_size"),
    ({"model_type": "mamba"}, "model_type is 'mamba', but it must be one of bert, roberta"),
    ({"hidden_size": "16"}, "config.json: hidden_size is '16', but it must be a whole number above 0"),
    ({"num_attention_heads": 2.5}, r"config.json: num_attention_heads is 2\.5"),
    ({"num_hidden_layers": -1}, "config.json: num_hidden_layers is -1"),
    ({"layer_norm_eps": "1e-6"}, "config.json: layer_norm_eps is '1e-6', but it must be a number above 0"),
    ({"layer_norm_eps": float("nan")}, "config.json: layer_norm_eps is nan"),
    ({"hidden_dropout_prob": 1.5}, r"config.json: hidden_dropout_prob is 1\.5"),
    ({"hidden_act": ["gelu"]}, r"config.json: hidden_act is \['gelu'\], but it must be a text"),
    ({"num_attention_heads": 3}, "config.json: model.num_heads is 3"),
])
def test_values_that_no_table_reproduces_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config({**BERT, **changes}, set())


@pytest.mark.parametrize("scaling, message", [
    ({"type": "longrope", "factor": 2.0}, "rope_scaling.rope_type is 'longrope'"),
    ({"rope_type": "linear", "factor": 2.0, "mystery": 1}, "rope_scaling.mystery is 1"),
    ("linear", "config.json: rope_scaling is 'linear', but it must be an object"),
    ({"rope_type": "linear", "factor": "2"}, "config.json: rope_scaling.factor is '2', but it must be a number"),
    ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is None, but rope_type 'llama3' needs it"),
])
def test_unknown_kinds_of_rope_scaling_are_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        read_config({**LLAMA, "rope_scaling": scaling}, set())


def test_old_and_new_spellings_of_rope_mean_the_same():
    old, _ = read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, set())
    new, _ = read_config({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}, set())
    assert old == new and old.position_base == 5e5 and old.rotary_scaling.factor == 4.0


@pytest.mark.parametrize("changes", [
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
])
def test_a_part_of_a_head_is_refused_where_whole_heads_rotate(changes):
    """transformers passes over the attribute in a Llama, so the tensors are those of another model than it says."""
    with pytest.raises(ValueError, match=r"config.json: partial_rotary_factor is 0.5, but .* whole heads"):
        read_config({**LLAMA, **changes}, set())
    assert read_config({**LLAMA, "partial_rotary_factor": 1.0}, set())[0].rotary_dim is None


def test_no_llama_is_written_for_a_model_that_rotates_a_part_of_its_heads():
    config, _ = read_config(LLAMA, set())
    with pytest.raises(ValueError, match=r"no Hugging Face model .* model.rotary_dim=2"):
        family_of_config(dataclasses.replace(config, rotary_dim=2))


def test_a_base_changed_by_hand_is_not_overlooked():
    """A reader of transformers 4 takes the outer one, and one of transformers 5 the inner one."""
    written = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert read_config({**written, "rope_theta": 10000}, set())[0].position_base == 1e4
    with pytest.raises(ValueError, match=r"rope_theta is 500000.0, but rope_parameters.rope_theta is 10000.0"):
        read_config({**written, "rope_theta": 5e5}, set())


def test_a_scaling_added_by_hand_is_not_overlooked():
    """As model cards advise, to a config that transformers 5 has written; transformers then takes what was added."""
    added = {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    both, _ = read_config({**added, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}, set())
    assert both.rotary_scaling.factor == 4.0 and both.position_base == 5e5
    with pytest.raises(ValueError, match=r"rope_scaling.factor is 4.0, but rope_parameters.factor is None beside it"):
        read_config({**added, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, set())


def test_a_kind_for_each_layer():
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="the length of layer_types is 2, but num_hidden_layers is 3"):
        read_config({**LLAMA, "model_type": "qwen3", "num_hidden_layers": 3, "layer_types": kinds}, set())


@pytest.mark.parametrize("preset, expected", [
    (presets.bert_base, "bert"), (presets.gpt2, "gpt2"), (presets.t5_small, "t5"), (presets.bart_base, "bart"),
    (presets.marian, "marian"), (presets.llama, "llama"), (presets.mistral, "mistral"),
])
def test_presets_are_what_they_are_called(preset, expected):
    assert family_of_config(preset()).model_types[0] == expected


def test_a_model_that_no_family_computes_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"the nearest, gpt2, differs in model.position='alibi' \(there 'learned'\)"):
        family_of_config(presets.gpt2(position="alibi"))


PUBLISHED = {
    "bert of 2020": {
        **BERT, "is_encoder_decoder": False, "is_decoder": False, "eos_token_ids": None, "xla_device": None,
        "pruned_heads": {}, "use_bfloat16": False, "output_past": True, "torchscript": False, "do_sample": False},
    "vicuna": {**LLAMA, "max_sequence_length": 2048, "pad_token_id": 0},
    "bert-base-multilingual": {
        **BERT, "architectures": ["BertForMaskedLM"], "directionality": "bidi", "pooler_fc_size": 768,
        "pooler_type": "first_token_transform", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
        "initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 0, "gradient_checkpointing": False},
    "SmolLM2": {
        **LLAMA, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "pretraining_tp": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {}}, "attention_bias": False, "mlp_bias": False},
    "opus-mt": {
        "model_type": "marian", "activation_function": "swish", "add_bias_logits": False,
        "add_final_layer_norm": False, "bad_words_ids": [[10]], "classif_dropout": 0.0, "d_model": 8,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "decoder_layers": 1, "decoder_layerdrop": 0.0,
        "decoder_start_token_id": 10, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "encoder_layers": 1,
        "id2label": {"0": "LABEL_0"}, "max_length": 512, "max_position_embeddings": 512, "normalize_before": False,
        "normalize_embedding": False, "num_beams": 6, "num_hidden_layers": 1, "scale_embedding": True,
        "static_position_embeddings": True, "vocab_size": 11},
    "t5-small": {
        "model_type": "t5", "d_ff": 16, "d_kv": 4, "d_model": 8, "decoder_start_token_id": 0, "dropout_rate": 0.1,
        "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-6,
        "n_positions": 512, "num_heads": 2, "num_layers": 1, "output_past": True, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {}}, "vocab_size": 11},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_configs_say_is_known(name):
    config, _ = read_config(PUBLISHED[name], set())
    assert config.d_model == 8 and config.vocab_size == 11


def test_a_window_left_out_is_that_of_transformers_and_null_is_none():
    """`transformers.MistralConfig().sliding_window` is 4096."""
    mistral = {**LLAMA, "model_type": "mistral"}
    left_out, null = (read_config(values, set())[0].pattern_of(0) for values in
                      (mistral, {**mistral, "sliding_window": None}))
    assert (left_out.kind, left_out.window) == ("window", 4096)
    assert null.kind == "full"


def test_windows_of_no_width_are_none_in_qwen():
    qwen = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}
    assert read_config(qwen, set())[0].pattern_of(0).window == 4096
    qwen["sliding_window"] = None
    assert read_config(qwen, set())[0].pattern_of(0).kind == "full"
    layers = ["sliding_attention"] * LLAMA["num_hidden_layers"]
    with pytest.raises(ValueError, match="layer_types is 'sliding_attention', but it must be one of full_attention"):
        read_config({**qwen, "layer_types": layers}, set())
