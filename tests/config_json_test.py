"""A config written and read, and what is wrong with one."""

import dataclasses
import json

import pytest

from tfm.config import AttentionPattern, Config, DataConfig, ModelConfig, OptimizerConfig, RotaryScaling
from tfm.config_json import config_diff, config_from_dict, config_to_dict, load_config, nearest, save_config

CONFIG = Config(
    ModelConfig(vocab_size=100, position="rotary", rotary_scaling=RotaryScaling("llama3", 8.0),
                attention_pattern=(AttentionPattern(), AttentionPattern("longformer", global_tokens=(0, 3)))),
    DataConfig(source="text", train=("a.en", "a.de")), OptimizerConfig(clip_norm=1.0))


def test_written_and_read_is_the_same(tmp_path):
    save_config(CONFIG, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == CONFIG
    assert json.loads((tmp_path / "config.json").read_text())["data"]["train"] == ["a.en", "a.de"]


@pytest.mark.parametrize("part, field, value, message", [
    ("model", "num_heds", 4, r"unknown config field model\.num_heds: did you mean model\.num_heads\?"),
    ("optimizer", "warmup", 4, r"unknown config field optimizer\.warmup: did you mean optimizer\.warmup_steps\?"),
    ("model", "zzz", 4, r"unknown config field model\.zzz$"),
    ("model", "d_model", "wide", r"model\.d_model is 'wide', but it must be of type int"),
    ("model", "d_model", True, r"model\.d_model is True"),
    ("model", "norm", "batch", r"model\.norm is 'batch', but it must be one of 'layer', 'rms'"),
    ("model", "num_heads", None, r"model\.num_heads is None"),
    ("data", "train", "a.en", r"data\.train is 'a.en', but it must be a list"),
    ("data", "train", [1], r"data\.train\[0\] is 1"),
])
def test_what_is_wrong_is_named(part, field, value, message):
    values = config_to_dict(CONFIG)
    values[part][field] = value
    with pytest.raises(ValueError, match=message):
        config_from_dict(values)


def test_missing_field_and_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"no field model\.vocab_size"):
        config_from_dict({"model": {}})
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(tmp_path / "config.json")


def test_whole_numbers_are_read_as_floats():
    assert isinstance(config_from_dict({"model": {"vocab_size": 5, "norm_epsilon": 1}}).model.norm_epsilon, float)


def test_differences():
    other = CONFIG.replace(model=dataclasses.replace(CONFIG.model, rotary_scaling=None),
                           data=dataclasses.replace(CONFIG.data, train=("b.en", "a.de")))
    found = config_diff(CONFIG, other)
    assert found["data.train"] == (["a.en", "a.de"], ["b.en", "a.de"])
    assert found["model.rotary_scaling.kind"] == ("llama3", None)
    assert config_diff(CONFIG, CONFIG) == {}


@pytest.mark.parametrize("name, expected", [
    ("--model.num-heds", "--model.num-heads"), ("--model.dmodel", "--model.d-model"), ("--qqq.www", None)])
def test_nearest(name, expected):
    assert nearest(name, ["--model.num-heads", "--model.d-model", "--data.train"]) == expected
