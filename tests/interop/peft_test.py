"""Adapters in peft's format: its own formula for merging gives our merged weights."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tfm import init_params, presets
from tfm.interop import to_huggingface, to_peft
from tfm.models.adapters import ADAPTED, split_params

SIZES = {"d_model": 8, "d_ff": 12, "num_heads": 2, "decoder_layers": 2, "lora_rank": 2, "lora_alpha": 5.0}
MODELS = {
    "gpt2": presets.gpt2(11, **SIZES, max_positions=4, lora_targets=("query", "value", "down")),
    "llama": presets.llama(11, **SIZES, num_kv_heads=1, scan_layers=True, lora_targets=("query", "output", "gate")),
    "t5": presets.t5_small(11, **SIZES, encoder_layers=1, logit_scale=8**-0.5, lora_targets=("cross_attention/key",)),
}


def random_params(config):
    random, shapes = np.random.default_rng(0), jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)


@pytest.mark.parametrize("name", MODELS)
def test_pefts_formula_gives_the_merged_weights(name, tmp_path):
    config = MODELS[name]
    params = random_params(config)
    to_peft(config, params, tmp_path / "adapters", base="there")
    to_huggingface(config, params, tmp_path / "merged")
    to_huggingface(config.__class__(**{**vars(config), "lora_rank": 0}), split_params(params, ADAPTED)[1],
                   tmp_path / "base")
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    base, merged = (load_file(tmp_path / part / "model.safetensors") for part in ("base", "merged"))
    assert settings["peft_type"] == "LORA" and settings["base_model_name_or_path"] == "there"
    for module in settings["target_modules"]:
        down, up = (adapters.pop(f"base_model.model.{module}.lora_{part}.weight") for part in "AB")
        rank = settings["rank_pattern"].get(module, settings["r"])
        assert down.shape[0] == up.shape[1] == rank
        change = settings["alpha_pattern"].get(module, settings["lora_alpha"]) / rank * up @ down
        change = change.T if settings["fan_in_fan_out"] else change
        np.testing.assert_allclose(base[f"{module}.weight"] + change, merged[f"{module}.weight"], atol=1e-4)
        del base[f"{module}.weight"], merged[f"{module}.weight"]
    assert not adapters
    for tensor in base:  # the rest is as it was
        np.testing.assert_array_equal(base[tensor], merged[tensor])


def test_a_model_without_adapters_has_none_to_write(tmp_path):
    with pytest.raises(ValueError, match="there are no adapters to write"):
        to_peft(presets.tiny(), {}, tmp_path)
