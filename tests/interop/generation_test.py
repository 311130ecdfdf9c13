"""Generation settings out of config.json and generation_config.json."""

from __future__ import annotations

import functools
import json

import pytest
import transformers

from tfm.config import DecodeConfig
from tfm.foreign import left_to_the_caller, special_fields
from tfm.generation import GenerationOptions
from tfm.interop import load_generation_settings
from tfm.interop.generation import settings_attributes, settings_from
from tfm.models import presets

MARIAN = {"model_type": "marian", "is_encoder_decoder": True, "bad_words_ids": [[7]], "decoder_start_token_id": 7,
          "eos_token_id": 0, "forced_eos_token_id": 0, "num_beams": 6, "pad_token_id": 7}


def test_the_newer_file_wins_and_the_older_fills_up(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MARIAN))
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 4, "eos_token_id": [0, 5]}))
    settings = load_generation_settings(tmp_path)
    assert settings.num_beams == 4 and settings.eos_ids == (0, 5)
    assert settings.decoder_start_id == 7 and settings.bad_words == ((7,),) and settings.forced_eos_ids == (0,)


def test_t5_starts_with_padding_where_nothing_is_said():
    assert settings_from({"model_type": "t5", "pad_token_id": 0, "eos_token_id": 1}).decoder_start_id == 0


def test_a_decoder_alone_has_no_forced_first_token():
    assert settings_from({"model_type": "mbart", "forced_bos_token_id": 9}).forced_bos_id == 9
    assert settings_from({"model_type": "gpt2", "forced_bos_token_id": 9}).forced_bos_id is None


def test_the_older_flag_of_bart_forces_its_first_token(tmp_path):
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(
        vocab_size=11, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=8))
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "force_bos_token_to_be_generated": True}))
    theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).generation_config
    assert theirs.forced_bos_token_id == 0 and load_generation_settings(tmp_path).forced_bos_id == 0
    (tmp_path / "config.json").write_text(json.dumps({**values, "force_bos_token_to_be_generated": False}))
    assert load_generation_settings(tmp_path).forced_bos_id is None


def test_lengths_count_the_first_input_of_a_decoder_or_the_prompt():
    settings = settings_from({"is_encoder_decoder": True, "min_length": 5, "max_length": 9})
    assert (settings.min_length, settings.max_length, settings.max_total) == (4, 8, None)
    settings = settings_from({"min_length": 5, "max_length": 9})
    assert (settings.min_total, settings.max_total, settings.max_length) == (5, 9, None)
    settings = settings_from({"min_new_tokens": 5, "max_new_tokens": 9, "min_length": 7, "max_length": 20})
    assert (settings.min_length, settings.min_total, settings.max_length, settings.max_total) == (5, 0, 9, None)
    assert settings_from({"is_encoder_decoder": True, "min_length": 5, "min_new_tokens": 0}).min_length == 0


@pytest.mark.parametrize("name, value", [("num_beam_groups", 2), ("encoder_no_repeat_ngram_size", 3),
                                         ("forced_decoder_ids", [[1, 5]]), ("stop_strings", ["."])])
def test_what_is_not_carried_out_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        settings_from({name: value})


def test_what_nobody_knows_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"new_trick": 2}))
    with pytest.raises(ValueError, match="has new_trick = 2, which is not known"):
        load_generation_settings(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("name, value, needed", [
    ("eos_token_id", "x", "a token's id"), ("eos_token_id", [2, -1], "a token's id"), ("num_beams", "4", "a whole"),
    ("bad_words_ids", [5], "a list of lists of ids"), ("suppress_tokens", 3, "a list of ids"),
    ("early_stopping", "always", "true, false or 'never'"), ("length_penalty", [1.0], "a number"),
])
def test_values_of_a_wrong_kind_are_named(tmp_path, file, name, value, needed):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{tmp_path / file}: {name} is .*, but it must be {needed}"):
        load_generation_settings(tmp_path)


def test_an_id_of_minus_one_is_none():
    settings = settings_from({"pad_token_id": -1, "eos_token_id": -1, "bos_token_id": 1, "length_penalty": -1.0})
    assert (settings.pad_id, settings.eos_ids, settings.bos_id, settings.length_penalty) == (None, (), 1, -1.0)


def test_sampling_is_named():
    asked = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert "temperature=0.6, top_p=0.9" in left_to_the_caller(settings_from(asked))
    assert left_to_the_caller(settings_from({**asked, "do_sample": False})) == ""


def test_rules_become_defaults_of_the_bundle():
    rules = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3,
             "min_length": 56, "max_length": 142, "repetition_penalty": 1.5}
    found = special_fields(presets.tiny(), settings_from({**MARIAN, **rules}), None)
    assert dict(found["defaults"]) == {"beam_size": 4, "length_penalty": 2.0, "early_stopping": True,
                                       "renormalize": False, "no_repeat_ngram": 3, "min_length": 55, "max_length": 141,
                                       "repetition_penalty": 1.5}


def test_a_clash_with_what_the_caller_asks_for_says_whose_the_numbers_are():
    own = {"min_length": 19, "max_length": 30, "beam_size": 4}
    fill = functools.partial(GenerationOptions.filled, decode=DecodeConfig(), beam_size=1)
    assert fill(GenerationOptions(max_length=5), own=own).min_length == 5
    with pytest.raises(ValueError, match=r"min_length is 40, .* \(generation_config.json.*\) say max_length=30"):
        fill(GenerationOptions(min_length=40), own=own)
    with pytest.raises(ValueError, match="say max_length=9, min_length=19"):
        fill(GenerationOptions(), own={**own, "max_length": 9})


@pytest.mark.parametrize("pair", [True, False])
def test_settings_come_back_as_they_went(pair):
    values = {**MARIAN, "is_encoder_decoder": pair, "model_type": "marian" if pair else "llama", "num_beams": 3,
              "suppress_tokens": [3, 4], "length_penalty": 0.0, "early_stopping": "never", "min_length": 4,
              "max_length": 30, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "do_sample": True, "top_k": 5,
              "renormalize_logits": True}
    settings = settings_from(values)
    assert settings_from({**settings_attributes(settings, pair=pair), "model_type": values["model_type"]}) == settings
