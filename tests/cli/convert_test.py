"""`tfm convert`: there and back again, verified with torch, and the mistakes a user can make."""

from __future__ import annotations

import json
import shutil

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

import tfm
from tfm.cli.main import main


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["the cat sat on the mat"], vocab_size=270, special_tokens=["<|endoftext|>"])
    made.save_model(str(folder))
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=made.get_vocab_size(), n_embd=16, n_layer=2, n_head=2, n_positions=32,
                                     bos_token_id=0, eos_token_id=0, initializer_range=0.5)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_there_and_back_again(foreign, tmp_path, capsys):
    assert main(["convert", str(foreign), str(tmp_path / "run"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "transformer.h.*.mlp.c_fc.weight -> decoder/layers_*/feed_forward/up/kernel [16, 64]  (2 tensors)" in printed
    assert "logits differ from torch's by at most" in printed
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--verify"]) == 0
    old, new = load_file(foreign / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(old) == set(new) and all(torch.equal(old[name], new[name]) for name in old)
    bundles = [tfm.load(path) for path in (foreign, tmp_path / "run", tmp_path / "back")]
    rows = [bundle.source_ids("the mat on the cat") for bundle in bundles]
    assert rows[0] == rows[1] == rows[2]
    assert bundles[0].special == bundles[1].special == bundles[2].special
    new_ids = [bundle.generate_ids([row], max_length=5) for bundle, row in zip(bundles, rows, strict=True)]
    assert new_ids[0] == new_ids[1] == new_ids[2]


def test_verify_notices_a_wrong_tensor(foreign, tmp_path, capsys, monkeypatch):
    assert main(["convert", str(foreign), str(tmp_path / "copy"), "--to", "huggingface"]) == 0
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.bias"] += 0.5
    from tfm.cli import convert

    config, params = tfm.load(foreign).model, tfm.load(foreign).params
    assert convert.verify(config, params, tmp_path / "copy") < convert.TOLERANCE
    save_file(tensors, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    assert convert.verify(config, params, tmp_path / "copy") > convert.TOLERANCE


@pytest.mark.parametrize("file, content", [
    ("config.json", {"model_type": "gpt2", "n_embd": "16"}), ("generation_config.json", {"eos_token_id": "x"}),
    ("modules.json", [1]), ("added_tokens.json", {"a": "x"})])
def test_a_file_of_the_source_with_a_wrong_value_is_one_line(foreign, tmp_path, capsys, file, content):
    source = shutil.copytree(foreign, tmp_path / "source")
    (source / file).write_text(json.dumps(content))
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert str(source / file) in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments, message", [
    (["{}/none", "{}/out"], "does not exist"),
    (["{}/foreign", "{}/full"], "TARGET is"),
])
def test_mistakes_are_one_line(foreign, tmp_path, capsys, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "foreign").symlink_to(foreign)
    assert main(["convert", *[argument.format(tmp_path) for argument in arguments]]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
