"""Hugging Face checkpoints in and out: arrays by the tables, configs by the families."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.config import ModelConfig, require
from tfm.interop.families import family_of_config, family_of_type, read_config
from tfm.interop.family import Family
from tfm.interop.table import Entry
from tfm.interop.tensor_files import SAFETENSORS, open_tensors, read_json, write_safetensors
from tfm.models import init_params
from tfm.models.adapters import merge_adapters
from tfm.models.scanned import unstack_layers

_DTYPES = ("float32", "bfloat16", "float16")
_CHUNK = 1 << 18  # numbers looked at together, so that they stay in the cache


def from_huggingface(path: str | Path, *, dtype: Any = None, sharding: Any = None,
                     allow_pickle: bool = False) -> tuple[ModelConfig, Any]:
    """Read a Hugging Face checkpoint.

    Args:
        path: a folder with `config.json` and safetensors files, which are memory-mapped.
        dtype: of parameters and activations; None keeps the type that the file has.
        sharding: one `jax.sharding.Sharding` for all parameters, or a tree of them; every device then reads its part
            only. None puts all on the default device.
        allow_pickle: read `pytorch_model.bin` with torch's loader for weights only where there is nothing better.

    Returns:
        The config, and the parameters for `tfm.build(config)`.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: an attribute of the config that is not known, tensors that are missing or left over, a wrong shape,
            or a value that is NaN or infinite.

    Example:
        >>> import tempfile
        >>> from tfm.models import presets
        >>> config = presets.gpt2(11, d_model=8, d_ff=16, num_heads=2, decoder_layers=1, max_positions=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     to_huggingface(config, init_params(config, jax.random.key(0)), folder)
        ...     config, params = from_huggingface(folder)
        >>> config.d_model, params["decoder"]["final_norm"]["scale"].shape
        (8, (8,))
    """
    values = read_json(Path(path) / "config.json")
    tensors = open_tensors(path, allow_pickle=allow_pickle)
    config, family = read_config(values, set(tensors), str(Path(path) / "config.json"))
    return load_params(config, family, tensors, str(path), dtype=dtype, sharding=sharding)


def to_huggingface(config: ModelConfig, params: Any, path: str | Path, *, extra: dict[str, Any] | None = None) -> None:
    """Write a model as a Hugging Face checkpoint: `config.json` and `model.safetensors`.

    Args:
        config: of a model that one of the families can be.
        params: its parameters; adapters are merged.
        path: the folder, made where it is missing.
        extra: further attributes of the foreign config, such as `eos_token_id`.

    Raises:
        ValueError: no family computes what this model does; the message names what differs from the nearest.
    """
    config, params = unstacked(*merge_adapters(config, params))
    family, path = family_of_config(config), Path(path)
    path.mkdir(parents=True, exist_ok=True)
    values = {**family.write(config), "torch_dtype": config.param_dtype, **(extra or {})}
    write_safetensors(path / SAFETENSORS, dict(export_params(config, params, family)))
    (path / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_params(config: ModelConfig, family: Family, tensors: Mapping[str, Any], where: str, *, dtype: Any = None,
                sharding: Any = None) -> tuple[ModelConfig, Any]:
    """Foreign tensors as parameters of `config`, which comes back with their type."""
    names = set(tensors)
    stored = {family.table_name(name, names): name for name in tensors}
    entries = family.entries(config)
    _resolve_aliases(family.aliases(config), tensors, stored, where)
    _check_names(family, entries, stored, where)
    if dtype is None:
        dtype = jnp.result_type(*{tensors[stored[entry.name]].dtype for entry in entries})
    kind = jnp.dtype(dtype).name
    require(kind in _DTYPES, "dtype", kind, f"it must be one of {', '.join(_DTYPES)}")
    config = dataclasses.replace(config, dtype=kind, param_dtype=kind)
    shapes = flatten(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    shardings = sharding if sharding is None or isinstance(sharding, jax.sharding.Sharding) else flatten(sharding)
    params: dict[str, Any] = {}
    for entry in entries:
        for place, part in _parts(entry, tensors[stored[entry.name]], shapes, where):
            target = shardings[place] if isinstance(shardings, dict) else shardings
            # an infinite bias on the logits rules a token out; anywhere else it makes NaN
            check = functools.partial(_check_numbers, name=f"{where}: tensor {entry.name}",
                                      finite=place != "output/bias")
            params[place] = _place(part, jnp.dtype(kind), target, check)
    if lost := sorted(set(shapes) - set(params)):
        raise ValueError(f"{where}: the table of {family.model_types[0]} gives no value to {', '.join(lost)}")
    return config, unflatten(params)


def export_params(config: ModelConfig, params: Any, family: Family) -> Iterator[tuple[str, Any]]:
    """Our parameters as foreign tensors, one after the other."""
    ours = flatten(params)
    entries = family.entries(config)
    known = {place for entry in entries for place in entry.paths}
    if known != set(ours):
        raise ValueError(f"params do not fit the config: {', '.join(sorted(known ^ set(ours)))} "
                         "are in one of them only")
    by_name = {entry.name: entry for entry in entries}
    sources = dict(zip(by_name, by_name, strict=True))
    if family.copies_untied and config.tie_embeddings in ("inputs", "none"):
        sources |= family.aliases(config)
    for name, source in sources.items():
        entry = by_name[source]
        yield name, entry.layout.join([ours[place] for place in entry.paths])


def mapping(config: ModelConfig, params: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """(foreign tensor, our parameter, our shape) for every parameter that `to_huggingface` would write."""
    config, params = unstacked(*merge_adapters(config, params))
    ours = flatten(params)
    return [(entry.name, place, tuple(ours[place].shape)) for entry in family_of_config(config).entries(config)
            for place in entry.paths]


def unused_tensors(path: str | Path) -> list[str]:
    """Tensors of a checkpoint folder that `from_huggingface` passes over: buffers, and heads without a counterpart."""
    names = set(open_tensors(path, allow_pickle=True))
    family = family_of_type(read_json(Path(path) / "config.json")["model_type"])
    return sorted(name for name in names
                  if any(re.fullmatch(pattern, family.table_name(name, names)) for pattern in family.unused))


def flatten(tree: Any) -> dict[str, Any]:
    """A nested dict as path -> leaf.

    Example:
        >>> flatten({"a": {"b": 1}})
        {'a/b': 1}
    """
    return {"/".join(str(key.key) for key in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for place, leaf in leaves.items():
        *parents, last = place.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def unstacked(config: ModelConfig, params: Any) -> tuple[ModelConfig, Any]:
    """The model with a subtree for each layer."""
    if not config.scan_layers:
        return config, params
    return dataclasses.replace(config, scan_layers=False), unstack_layers(params, config)


def _resolve_aliases(aliases: Mapping[str, str], tensors: Mapping[str, Any], stored: dict[str, str],
                     where: str) -> None:
    """Take copies of tied tensors out of `stored`; each must equal the tensor that the table knows, or be it."""
    for alias, name in aliases.items():
        if alias not in stored:
            continue
        original = stored.pop(alias)
        if name not in stored:
            stored[name] = original
        elif not np.array_equal(tensors[original], tensors[stored[name]]):
            raise ValueError(f"{where}: tensors {original} and {stored[name]} differ, but the model that is read has "
                             "one parameter for both")


def _check_names(family: Family, entries: list[Entry], stored: dict[str, str], where: str) -> None:
    needed = {entry.name for entry in entries}
    missing = sorted(needed - set(stored))
    extra = sorted(stored[name] for name in set(stored) - needed
                   if not any(re.fullmatch(pattern, name) for pattern in family.unused))
    if missing or extra:
        found = [f"tensors are missing: {', '.join(missing)}"] * bool(missing)
        found += [f"tensors are left over: {', '.join(extra)}"] * bool(extra)
        raise ValueError(f"{where}: {'; '.join(found)}")


def _parts(entry: Entry, tensor: Any, shapes: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The parameters in one foreign tensor, with their shapes checked."""
    try:
        parts = entry.layout.split(tensor)
    except ValueError as error:
        raise ValueError(f"{where}: tensor {entry.name}: {error}") from error
    for place, part in zip(entry.paths, parts, strict=True):
        if place not in shapes or part.shape != shapes[place].shape:
            needed = shapes[place].shape if place in shapes else "none"
            raise ValueError(f"{where}: tensor {entry.name} of shape {tuple(tensor.shape)} gives {place} the shape "
                             f"{part.shape}, but the config needs {needed}")
        yield place, part


def _place(part: Any, dtype: Any, sharding: Any, check: Callable[[np.ndarray], None]) -> jax.Array:
    def read(index: Any) -> np.ndarray:
        with np.errstate(over="ignore"):
            values = np.array(part[index], dtype)
        check(values)
        return values

    return jnp.asarray(read(...)) if sharding is None else jax.make_array_from_callback(part.shape, sharding, read)


def _check_numbers(values: np.ndarray, *, name: str, finite: bool) -> None:
    """Refuse NaN and, on request, infinity: as whole numbers, the bits of floats without their signs rank infinity
    above all numbers and NaN above infinity.
    """
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    bits, rest = values.ravel("K").view(unsigned), np.iinfo(unsigned).max >> 1
    infinity = int(np.array(np.inf, values.dtype).view(unsigned))
    largest = max((int((bits[i:i + _CHUNK] & unsigned.type(rest)).max()) for i in range(0, bits.size, _CHUNK)),
                  default=0)
    if largest > infinity or (finite and largest == infinity):
        raise ValueError(f"{name} has a value that is {'NaN' if largest > infinity else 'infinite'} in {values.dtype}: "
                         "the model can compute nothing with it")
