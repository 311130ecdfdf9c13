"""safetensors against the package of that name; shards; pickles only on request."""

from __future__ import annotations

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from tfm.interop.tensor_files import open_tensors, read_safetensors, write_safetensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64), "d": torch.zeros(0, 4), "e": torch.tensor([True, False]),
    "f": torch.tensor([0.25], dtype=torch.float16),
}


def as_float(tensor):
    return tensor.to(torch.float64).numpy()


def test_reads_what_the_package_writes_without_copying(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    read = read_safetensors(tmp_path / "x.safetensors")
    assert set(read) == set(TENSORS) and read["b"].dtype == jnp.bfloat16
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(read[name].astype(np.float64), as_float(tensor), err_msg=name)
    assert not read["a"].flags.writeable and not read["a"].flags.owndata


def test_writes_what_the_package_reads(tmp_path):
    arrays = {"w": np.arange(4.0, dtype=np.float32).reshape(2, 2).T, "b": jnp.array([0.5, 3.0], jnp.bfloat16)}
    write_safetensors(tmp_path / "x.safetensors", arrays)
    read = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(read["w"].numpy(), arrays["w"])
    np.testing.assert_array_equal(as_float(read["b"]), np.array([0.5, 3.0]))
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("cut", [4, 20, -1])
def test_a_file_that_was_cut_is_refused(tmp_path, cut):
    save_file(TENSORS, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        read_safetensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("header, message", [
    ([1], "the header is"),
    ({"a": 3}, "the header's entry of tensor a is 3, but it needs a dtype"),
    ({"a": {}}, "tensor a is {}, but it needs a dtype"),
    ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "tensor a is"),
    ({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}, "tensor a is"),
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}, "tensor a is"),
    ({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, "was not copied whole"),
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
      "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "tensors a and b overlap"),
])
def test_a_header_of_nonsense_is_refused_as_the_package_does(tmp_path, header, message):
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(tmp_path / "x.safetensors", "np"):
        pass
    with pytest.raises(ValueError, match=r"x\.safetensors: " + ".*" + message):
        read_safetensors(tmp_path / "x.safetensors")


def test_shards_and_an_index_that_lies(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    assert set(open_tensors(tmp_path)) == {"a", "b"}
    index.write_text(json.dumps({"weight_map": {**names, "c": "model-2.safetensors"}}))
    with pytest.raises(ValueError, match="names tensors that its files lack: c"):
        open_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {**names, "c": "../model-3.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"model-3\.safetensors"):
        open_tensors(tmp_path)


def test_pickles_are_refused_unless_asked_for_and_never_run_code(tmp_path):
    torch.save({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="allow_pickle=True"):
        open_tensors(tmp_path)
    read = open_tensors(tmp_path, allow_pickle=True)
    np.testing.assert_array_equal(read["a"], TENSORS["a"].numpy())
    assert read["b"].dtype == jnp.bfloat16

    torch.save({"a": torch.nn.Parameter(TENSORS["a"])}, tmp_path / "pytorch_model.bin",
               _use_new_zipfile_serialization=False)  # as before torch 1.6
    np.testing.assert_array_equal(open_tensors(tmp_path, allow_pickle=True)["a"], TENSORS["a"].numpy())
    (tmp_path / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"cannot read .*pytorch_model\.bin"):
        open_tensors(tmp_path, allow_pickle=True)

    torch.save({"state_dict": {"a": TENSORS["a"]}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold a dict of tensors"):
        open_tensors(tmp_path, allow_pickle=True)

    class Harm:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    torch.save({"a": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        open_tensors(tmp_path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_tensors_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("content, message", [("{", r"index\.json is not JSON"), ("[]", "must hold a JSON object"),
                                              ("{}", "has no weight_map"),
                                              ('{"weight_map": {"a": 3}}', "has no weight_map")])
def test_a_damaged_index_is_named(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        open_tensors(tmp_path)
