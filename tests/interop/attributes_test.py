"""No attribute of a foreign config is passed over in silence."""

from __future__ import annotations

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
])
def test_values_that_no_table_reproduces_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config({**BERT, **changes}, set())


@pytest.mark.parametrize("scaling, message", [
    ({"type": "longrope", "factor": 2.0}, "rope_scaling.rope_type is 'longrope'"),
    ({"rope_type": "linear", "factor": 2.0, "mystery": 1}, "rope_scaling.mystery is 1"),
])
def test_unknown_kinds_of_rope_scaling_are_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        read_config({**LLAMA, "rope_scaling": scaling}, set())


def test_old_and_new_spellings_of_rope_mean_the_same():
    old, _ = read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, set())
    new, _ = read_config({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}, set())
    assert old == new and old.position_base == 5e5 and old.rotary_scaling.factor == 4.0


@pytest.mark.parametrize("preset, expected", [
    (presets.bert_base, "bert"), (presets.gpt2, "gpt2"), (presets.t5_small, "t5"), (presets.bart_base, "bart"),
    (presets.marian, "marian"), (presets.llama, "llama"), (presets.mistral, "mistral"),
])
def test_presets_are_what_they_are_called(preset, expected):
    assert family_of_config(preset()).model_types[0] == expected


def test_a_model_that_no_family_computes_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"the nearest, gpt2, differs in model.position='alibi' \(there 'learned'\)"):
        family_of_config(presets.gpt2(position="alibi"))
