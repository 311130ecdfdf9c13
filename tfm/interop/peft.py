"""Low-rank adapters as the `peft` package reads them: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfm.config import ModelConfig, require
from tfm.interop.checkpoint import flatten, unstacked
from tfm.interop.families import family_of_config
from tfm.interop.table import Entry
from tfm.interop.tensor_files import write_safetensors

Arrays = Mapping[str, Any]


def to_peft(config: ModelConfig, params: Any, path: str | Path, *, base: str = "") -> None:
    """Write the adapters of a model; its other weights are those of `base`.

    Where one foreign matrix holds several of ours (GPT-2's queries, keys and values), its adapter has the rank of all
    of them together, with zeros where one has nothing to say about another.

    Args:
        config: of a model with adapters that one of the families can be.
        params: its parameters.
        path: the folder, made where it is missing.
        base: name or folder of the checkpoint that the adapters belong to.

    Raises:
        ValueError: the model has no adapters, or no family computes what it does without them.

    Reference: Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models".
    """
    require(config.lora_rank > 0, "model.lora_rank", 0, "there are no adapters to write")
    config, params = unstacked(config, params)
    plain, path = dataclasses.replace(config, lora_rank=0), Path(path)
    family, ours = family_of_config(plain), flatten(params)
    inward = family.model_types[0] == "gpt2"  # its matrices are [in, out]
    bare = plain.is_encoder_only and not plain.token_head  # a model without a head has names without a prefix
    tensors, ranks = {}, {}
    for entry in family.entries(plain):
        if (found := _adapter(entry, ours, config.lora_rank, inward)) is None:
            continue
        module = entry.name.removesuffix(".weight")
        module = module.removeprefix(family.prefix) if bare else module
        ranks[module] = len(found[0])
        for name, value in zip(("lora_A", "lora_B"), found, strict=True):
            tensors[f"base_model.model.{module}.{name}.weight"] = value
    path.mkdir(parents=True, exist_ok=True)
    write_safetensors(path / "adapter_model.safetensors", tensors)
    values = _settings(config, ranks, inward, base)
    (path / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _adapter(entry: Entry, ours: Arrays, rank: int, inward: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """A [r, in] and B [out, r] of one foreign matrix, r being the rank of all adapters in it; None: it has none."""
    stems = [path.removesuffix("/kernel") for path in entry.paths]
    adapted = [stem for stem in stems if f"{stem}/lora_a" in ours]
    if not adapted:
        return None
    down = np.concatenate([np.asarray(ours[f"{stem}/lora_a"]) for stem in adapted], axis=1)
    ups = [np.zeros((down.shape[1], ours[f"{stem}/kernel"].shape[1]), down.dtype) for stem in stems]
    for i, stem in enumerate(adapted):
        ups[stems.index(stem)][i * rank:(i + 1) * rank] = np.asarray(ours[f"{stem}/lora_b"])
    joined = np.asarray(entry.layout.join(ups))
    return np.ascontiguousarray(down.T), np.ascontiguousarray(joined.T if inward else joined)


def _settings(config: ModelConfig, ranks: Mapping[str, int], inward: bool, base: str) -> dict[str, Any]:
    kind = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM" if config.is_decoder_only else \
        "FEATURE_EXTRACTION"
    rank = config.lora_rank
    several = {module: found for module, found in ranks.items() if found != rank}
    return {
        "peft_type": "LORA", "task_type": kind, "base_model_name_or_path": base, "inference_mode": True, "r": rank,
        "lora_alpha": config.lora_alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": inward,
        "target_modules": list(ranks), "modules_to_save": None, "rank_pattern": several,
        "alpha_pattern": {module: config.lora_alpha * found / rank for module, found in several.items()},
    }
