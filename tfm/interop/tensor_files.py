"""Files of named tensors: safetensors, read as views of a memory map and written, and torch's pickles on request."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tfm.config import require

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000
SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a Hugging Face checkpoint is a folder with a {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    require(isinstance(values, dict), str(path), values, "it must hold a JSON object")
    return values


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """The tensors of one file, as views of a memory map: nothing is read until it is used.

    Args:
        path: the file.

    Returns:
        name -> array; bfloat16 has JAX's NumPy type.

    Raises:
        ValueError: the file is damaged, or holds a type that NumPy and JAX lack.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"{path} is no whole safetensors file: its header would have {length} bytes of {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file: its header is not JSON ({error})") from error
    require(isinstance(header, dict), f"{path}: the header", header, "it must be an object")
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    tensors = {name: _view(data, name, entry, path) for name, entry in header.items()}
    _check_no_overlap({name: entry["data_offsets"] for name, entry in header.items()}, path)
    return tensors


def _check_no_overlap(spans: Mapping[str, list[int]], path: Path) -> None:
    ordered = sorted(spans, key=lambda name: spans[name])
    for name, following in itertools.pairwise(ordered):
        if spans[name][1] > spans[following][0]:
            raise ValueError(f"{path}: tensors {name} and {following} overlap: the file is damaged")


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _view(data: np.ndarray, name: str, entry: Any, path: Path) -> np.ndarray:
    if not (isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and _whole_numbers(entry.get("shape"))
            and _whole_numbers(entry.get("data_offsets")) and len(entry["data_offsets"]) == 2):
        raise ValueError(f"{path}: the header's entry of tensor {name} is {entry!r}, but it needs a dtype, a shape and "
                         "two data_offsets of whole numbers, 0 or above: the file is damaged")
    code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if code not in _DTYPES:
        raise ValueError(f"{path}: tensor {name} has type {code}, but only {', '.join(_DTYPES)} can be read")
    dtype = np.dtype(_DTYPES[code])
    if not begin <= end <= data.size or end - begin != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{path}: tensor {name} of shape {shape} has bytes {begin} to {end} of {data.size}: "
                         "the file is damaged or was not copied whole")
    return data[begin:end].view(dtype).reshape(shape)


def write_safetensors(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors in the order given; the file appears whole or not at all.

    Args:
        path: the file.
        tensors: name -> array. Each is fetched and written before the next.
    """
    path, offset = Path(path), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        end = offset + dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
        header[name] = {"dtype": _CODES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(np.asarray(tensor)).tobytes())
    draft.replace(path)


def open_tensors(folder: str | Path, *, allow_pickle: bool = False) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint folder: one safetensors file, or several with an index.

    Args:
        folder: with `model.safetensors` or `model.safetensors.index.json`.
        allow_pickle: also read `pytorch_model.bin` through torch's loader for weights only.

    Returns:
        name -> array, views of memory maps.

    Raises:
        FileNotFoundError: no such file.
        ValueError: there are only pickles, and they are not allowed; or the index and the files differ.
    """
    folder = Path(folder)
    if (folder / SAFETENSORS).is_file():
        return read_safetensors(folder / SAFETENSORS)
    if (folder / f"{SAFETENSORS}.index.json").is_file():
        return _read_shards(folder, SAFETENSORS, read_safetensors)
    pickles = [name for name in (PICKLE, f"{PICKLE}.index.json") if (folder / name).is_file()]
    if not pickles:
        raise FileNotFoundError(f"{folder} has no {SAFETENSORS} and no {SAFETENSORS}.index.json")
    if not allow_pickle:
        raise ValueError(f"{folder} has only {pickles[0]}, a pickle, which can run code when it is read: convert it to "
                         "safetensors, or pass allow_pickle=True to use torch's loader for weights only")
    return _read_pickle(folder / PICKLE) if pickles[0] == PICKLE else _read_shards(folder, PICKLE, _read_pickle)


def _read_shards(folder: Path, name: str, read: Any) -> dict[str, np.ndarray]:
    index = read_json(folder / f"{name}.index.json").get("weight_map")
    if not (isinstance(index, dict) and all(isinstance(file, str) for file in index.values())):
        raise ValueError(f"{folder}: {name}.index.json has no weight_map, which says what file a tensor is in")
    files = sorted(set(index.values()))
    absent = [file for file in files if Path(file).name != file or not (folder / file).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder}: {name}.index.json names {', '.join(absent)}, which is not there")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors.update(read(folder / file))
    if lost := sorted(set(index) - set(tensors)):
        raise ValueError(f"{folder}: {name}.index.json names tensors that its files lack: {', '.join(lost)}")
    return tensors


def _read_pickle(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{path} is a pickle, which needs torch to be read: pip install torch") from error
    mapped = zipfile.is_zipfile(path)  # as all are that were written since torch 1.6
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"torch's loader for weights only cannot read {path}: {str(error).splitlines()[0]}") from error
    if not (isinstance(loaded, dict) and all(isinstance(tensor, torch.Tensor) for tensor in loaded.values())):
        raise ValueError(f"{path} must hold a dict of tensors by their names, and nothing else")
    return {name: _from_torch(tensor) for name, tensor in loaded.items()}


def _from_torch(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.detach().numpy()
