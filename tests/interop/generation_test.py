"""Generation settings out of config.json and generation_config.json."""

from __future__ import annotations

import json

import pytest

from tfm.interop import load_generation_settings
from tfm.interop.generation import settings_attributes, settings_from

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


def test_min_length_counts_the_first_input_of_a_decoder():
    assert settings_from({"is_encoder_decoder": True, "min_length": 5}).min_length == 4
    assert settings_from({"min_new_tokens": 5}).min_length == 5


@pytest.mark.parametrize("name, value", [("num_beam_groups", 2), ("encoder_no_repeat_ngram_size", 3),
                                         ("forced_decoder_ids", [[1, 5]])])
def test_what_is_not_carried_out_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        settings_from({name: value})


def test_settings_come_back_as_they_went():
    settings = settings_from({**MARIAN, "num_beams": 1, "suppress_tokens": [3, 4]})
    assert settings_from({**settings_attributes(settings), "model_type": "marian"}) == settings
