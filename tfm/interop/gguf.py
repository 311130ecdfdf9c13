"""GGUF files in: weights dequantised, rotated rows put back in order, config and tokenizer from the file's metadata.

A file is renamed into what the table of its family reads, so there is no second table. Needs the extra `gguf`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfm.config import ModelConfig, RotaryScaling, require
from tfm.interop.checkpoint import load_params
from tfm.interop.families import read_config
from tfm.interop.generation import GenerationSettings
from tfm.ops.positions import scaled_frequencies

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_ATTRIBUTES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps", "vocab_size": "vocab_size",
}
_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_FACTORS = "rope_freqs.weight"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def from_gguf(path: str | Path, *, dtype: Any = None, sharding: Any = None) -> tuple[ModelConfig, Any]:
    """Read a GGUF file of a Llama or Qwen model.

    Args:
        path: the file.
        dtype: of parameters and activations; None: float32.
        sharding: as for `from_huggingface`.

    Returns:
        The config, and the parameters for `tfm.build(config)`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another architecture, metadata that are not known, or tensors that do not fit.
    """
    reader = open_gguf(path)
    metadata = read_metadata(reader)
    check_metadata(metadata, str(path))
    tensors = _Tensors(reader, metadata)
    config, family = read_config(foreign_config(metadata, set(tensors)), set(tensors), str(path))
    if tensors.rope_factors is not None:
        if config.rotary_scaling is not None:
            raise ValueError(f"{path}: rope.scaling.type is {config.rotary_scaling.kind!r}, but the tensor {_FACTORS} "
                             "divides RoPE's frequencies, too, and only one of them is supported")
        scaling = frequency_scaling(tensors.rope_factors, config)
        config = dataclasses.replace(config, rotary_scaling=scaling)
    dtype = np.float32 if dtype is None else dtype
    return load_params(config, family, tensors, str(path), dtype=dtype, sharding=sharding)


def open_gguf(path: str | Path) -> Any:
    """The reader of the `gguf` package, which memory-maps the file."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError('a .gguf file needs the package gguf: pip install "tfm[gguf]"') from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is no whole GGUF file: {error}") from error


def read_metadata(reader: Any) -> dict[str, Any]:
    """The key-value pairs of a file."""
    return {name: field.contents() for name, field in reader.fields.items()}


def check_metadata(metadata: Mapping[str, Any], where: str) -> None:
    """Refuse what the file says beside its architecture and this reader does not know.

    Raises:
        ValueError: a part of a model, adapters, metadata that are not known, or none where every model has some.
    """
    _check_needed(metadata, where)
    require(metadata.get("general.type", "model") == "model", f"{where}: general.type", metadata.get("general.type"),
            "it must be 'model'")
    require(metadata.get("split.count", 0) <= 1, f"{where}: split.count", metadata.get("split.count"),
            "the file is one of several: merge them with llama.cpp's gguf-split first")
    known = ("GGUF.", "general.", "quantize.", "split.", "tokenizer.", f"{metadata['general.architecture']}.")
    if unknown := sorted(name for name in metadata if not name.startswith(known)):
        raise ValueError(f"{where} has metadata that are not known: {', '.join(unknown)}")


def _check_needed(metadata: Mapping[str, Any], where: str) -> None:
    """Refuse a file without what the rest of the metadata and the tensors are read by."""
    architecture = metadata.get("general.architecture")
    require(architecture in _ARCHITECTURES, f"{where}: general.architecture", architecture,
            f"it must be one of {', '.join(_ARCHITECTURES)}")
    require("tokenizer.ggml.tokens" in metadata, f"{where}: tokenizer.ggml.tokens", None, "it must list the vocabulary")
    for short in ("embedding_length", "attention.head_count"):
        name = f"{architecture}.{short}"
        value = metadata.get(name)
        require(isinstance(value, int) and value > 0, f"{where}: {name}", value, "it must be a whole number above 0")


def frequency_scaling(factors: np.ndarray, config: ModelConfig) -> RotaryScaling:
    """What the tensor `rope_freqs` of Llama 3.1 and later stands for: divisors of RoPE's frequencies.

    Args:
        factors: [pairs of dimensions].
        config: of the model, without them.

    Returns:
        Llama 3's own scaling where the divisors follow from it, or else the divisors as they are.
    """
    pairs = (config.rotary_dim or config.resolved_head_dim) // 2
    require(factors.shape == (pairs,), "the shape of rope_freqs", factors.shape, f"it must be ({pairs},)")
    llama3 = RotaryScaling("llama3", float(max(factors.max(), 1.0)), 8192)
    kinds: tuple[Any, ...] = (None, llama3)
    plain, scaled = (scaled_frequencies(2 * pairs, config.position_base, kind)[0] for kind in kinds)
    if np.allclose(np.asarray(plain) / np.asarray(scaled), factors, rtol=1e-4):
        return llama3
    return RotaryScaling("factors", factors=tuple(float(factor) for factor in factors))


def foreign_config(metadata: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The metadata as a Hugging Face config; what has no counterpart there stays, so that it is refused."""
    architecture = metadata["general.architecture"]
    values: dict[str, Any] = {"model_type": _ARCHITECTURES[architecture], "tie_word_embeddings":
                              "lm_head.weight" not in names, "vocab_size": len(metadata["tokenizer.ggml.tokens"])}
    scaling = _rope_scaling(metadata, architecture)
    if scaling is not None:
        values["rope_scaling"] = scaling
    for name, value in metadata.items():
        if name.startswith(f"{architecture}.") and not name.startswith(f"{architecture}.rope.scaling."):
            short = name.removeprefix(f"{architecture}.")
            values[_ATTRIBUTES.get(short, name)] = value
    width = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
    for name in ("rope.dimension_count", "attention.value_length"):
        found = values.pop(f"{architecture}.{name}", width)
        require(found == width, f"{architecture}.{name}", found, f"only the whole head, {width}, is supported")
    return values


def _rope_scaling(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any] | None:
    """The settings `rope.scaling.*` as a foreign config has them."""
    prefix = f"{architecture}.rope.scaling."
    found = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    kind = found.pop("type", "linear" if found.get("factor") else "none")  # so does llama.cpp
    found.pop("finetuned", None)  # says how the model came about
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    require(kind in ("none", "linear", "yarn"), f"{prefix}type", kind, "it must be none, linear or yarn")
    for name, value in found.items():
        require(name in names, prefix + name, value, f"only {', '.join(names)} are known")
    if kind == "none":
        return None
    kept = ("factor",) if kind == "linear" else tuple(names)
    return {"rope_type": kind, **{names[name]: found[name] for name in kept if name in found}}


def gguf_generation_settings(metadata: Mapping[str, Any]) -> GenerationSettings:
    """The special ids in a file's metadata."""
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    ends = dict.fromkeys([eos, *(metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))])
    return GenerationSettings(eos_ids=tuple(i for i in ends if i is not None),
                              pad_id=metadata.get("tokenizer.ggml.padding_token_id"),
                              bos_id=metadata.get("tokenizer.ggml.bos_token_id"))


class _Tensors(Mapping[str, np.ndarray]):
    """The tensors by the names of the table, dequantised one at a time when they are asked for."""

    def __init__(self, reader: Any, metadata: Mapping[str, Any]) -> None:
        architecture = metadata["general.architecture"]
        self._tensors = {_table_name(tensor.name): tensor for tensor in reader.tensors}
        factors = self._tensors.pop(_FACTORS, None)
        self.rope_factors = None if factors is None else np.asarray(factors.data, np.float32).reshape(-1)
        heads = metadata[f"{architecture}.attention.head_count"]
        self._heads = {"q_proj": heads, "k_proj": metadata.get(f"{architecture}.attention.head_count_kv", heads)}
        self._permuted = architecture == "llama"

    def __getitem__(self, name: str) -> np.ndarray:
        import gguf

        tensor = self._tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = np.asarray(values, np.float32).reshape([int(n) for n in reversed(tensor.shape)])
        heads = self._heads.get(name.split(".")[-2])
        return unpermute(values, heads) if self._permuted and heads else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key matrix in which pairs 2i, 2i + 1 of a head rotate, put back so that i, i + D/2 do.

    Example:
        >>> unpermute(np.array([0, 2, 1, 3]), num_heads=1).tolist()
        [0, 1, 2, 3]
    """
    by_pair = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(rows.shape)


def _table_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _NAMES:
        return f"model.layers.{match[1]}.{_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
