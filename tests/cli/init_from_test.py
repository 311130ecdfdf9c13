"""Fine-tuning from the command line: classification with adapters from a foreign encoder, and what does not fit."""

from __future__ import annotations

import dataclasses
import io
import json
import string
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tfm
from tfm import init_params, presets
from tfm.cli.eval import main as evaluate
from tfm.cli.init_from import Source, Start, differences, match, open_source, with_source
from tfm.cli.main import main as command
from tfm.cli.train import main as train
from tfm.interop import to_huggingface
from tfm.models.adapters import ADAPTED, split_params
from tfm.models.scanned import stack_layers
from tfm.parallel.mesh import make_mesh
from tfm.training.checkpoint import load_checkpoint_params

ENCODER = presets.bert_base(vocab_size=57, d_model=16, d_ff=32, num_heads=2, encoder_layers=2, max_positions=24)
CONFIG = """
from tfm import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig

def get_config():
    return Config(
        ModelConfig(vocab_size=1, decoder_layers=0, lora_rank=2, class_pooling="mean"),
        DataConfig(source="text", train="train.tsv", valid="valid.tsv", test=("test.txt", "test.labels"),
                   task="classify", max_length=16, tokens_per_batch=64, buckets=1),
        OptimizerConfig(name="adamw", schedule="constant", learning_rate=0.05, warmup_steps=0, weight_decay=0.01),
        TrainConfig(steps=40, eval_every=40, checkpoint_every=20, log_every=20, init_model="source"))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A BERT in a foreign folder, and texts in which one letter decides."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    to_huggingface(ENCODER, jax.jit(lambda: init_params(ENCODER, jax.random.key(1)))(), folder / "bert")
    letters = string.ascii_lowercase
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "bert" / "vocab.txt").write_text("\n".join(pieces))
    lines = ["x x b\tright", "\t", "x a x\twrong", "x x c\tright", "a x\twrong", "x d\tright", "e a\twrong"]
    (folder / "train.tsv").write_text("\n".join(lines * 4) + "\n")
    (folder / "valid.tsv").write_text("x f x\tright\n\t\nx x a\twrong\n")
    (folder / "test.txt").write_text("a x x\ng x\n")
    (folder / "test.labels").write_text("wrong\nright\n")
    (folder / "config.py").write_text(CONFIG)
    return folder


def arguments(work, run, *more):
    return [str(work / "config.py"), "--workdir", str(work / run), "--init-from", str(work / "bert"), *more]


@pytest.fixture(scope="module")
def run(work):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        assert train(arguments(work, "run")) == 0
    return work / "run"


def test_only_adapters_and_the_head_are_trained(work, run):
    params = load_checkpoint_params(run / "checkpoints" / "40")
    chosen, rest = split_params(params, ADAPTED)
    assert all(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(chosen)) and set(chosen) == {"encoder", "classifier"}
    before = tfm.load(work / "bert").params
    jax.tree.map(np.testing.assert_array_equal, rest, {name: before[name] for name in rest})
    kept = json.loads((run / "checkpoints" / "40" / "optimizer" / "_METADATA").read_text())["tree_metadata"]
    moments = [name for name in kept if "'mu'" in name]
    assert len(moments) == len(jax.tree.leaves(chosen)) and not any("'kernel'" in m and "encoder" in m for m in moments)


def test_eval_decode_and_bundle_agree_on_what_was_learnt(work, run, monkeypatch, capsys):
    monkeypatch.chdir(work)
    capsys.readouterr()
    assert evaluate([str(run)]) == 0
    out = capsys.readouterr().out
    assert "accuracy           1.0000" in out and "macro F1           1.0000" in out and "f1 of wrong" in out
    bundle = tfm.load(run)
    assert bundle.config.data.labels == ("right", "wrong") and bundle.model.lora_rank == 0
    assert bundle.classify(["x a", "", "h x"]) == ["wrong", "", "right"]
    probabilities = bundle.class_probabilities(["x a", "h x"])
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-5)
    stdin = io.TextIOWrapper(io.BytesIO(b"x a\n\nh x\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert command(["decode", str(run), "--scores"]) == 0
    assert capsys.readouterr().out == f"{probabilities[0, 1]:.4f}\twrong\n\t\n{probabilities[1, 0]:.4f}\tright\n"


def test_a_run_goes_on_without_what_it_started_from(work, run, monkeypatch, capsys):
    monkeypatch.chdir(work)
    (work / "bert").rename(work / "gone")
    try:
        assert train(arguments(work, "run", "--train.steps", "41")) == 0
        assert "going on from step 40" in capsys.readouterr().err
        assert train(arguments(work, "other")) == 2
        assert "does not exist" in capsys.readouterr().err
    finally:
        (work / "gone").rename(work / "bert")


@pytest.mark.parametrize("more, words", [
    (["--train.init-model", "config"], ["fit this model", "(32, 16) there and (2048, 512) here", "more. Fields",
                                        "model.d_model 512 (there 16)", "--train.init-model source"]),
    (["--data.tokenizer", "file", "--data.tokenizer-path", "x"], ["brings its own tokenizer"]),
    (["--data.test", "bad.tsv", "--data.valid", "bad.tsv"], ["line 2", "no tab"]),
    (["--data.valid", "unknown.tsv"], ["line 2 has the label 'new'", "right, wrong"]),
    (["--data.train", "one.tsv"], ["data.labels is ('right',)", "at least two"]),
    (["--data.task", "masked_lm", "--data.train", "test.txt", "--data.valid", "test.txt", "--data.test", "test.txt",
      "--model.lora-targets", "qvery"], ["model.lora_targets", "self_attention/query"]),
    (["--data.task", "causal_lm", "--data.train", "test.txt", "--data.valid", "test.txt", "--data.test", "test.txt"],
     ["data.task is 'causal_lm'", "its kind of model is decoder"]),
])
def test_mistakes_are_one_line(work, more, words, monkeypatch, capsys):
    monkeypatch.chdir(work)
    (work / "bad.tsv").write_text("a\tright\nb wrong\n")
    (work / "unknown.tsv").write_text("a\tright\nb\tnew\n")
    (work / "one.tsv").write_text("a b c\tright\n")
    assert train(arguments(work, "failed", *more)) == 2
    line = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(line) == 1
    for word in words:
        assert word in line[0]


def source_of(config, params):
    return Source("there", config, None, None, lambda mesh: params)


def test_layers_are_stacked_or_taken_apart_as_the_run_has_them():
    params = jax.jit(lambda: init_params(ENCODER, jax.random.key(0)))()
    stacked, mesh = dataclasses.replace(ENCODER, scan_layers=True), make_mesh("data=1", jax.devices()[:1])
    both = stack_layers(params, ENCODER)
    for theirs, given, ours, expected in ((ENCODER, params, stacked, both), (stacked, both, ENCODER, params)):
        source = source_of(theirs, given)
        start = Start(source, match(source, ours))
        assert not start.fit.new and not start.fit.left
        jax.tree.map(np.testing.assert_array_equal, start.params(ours, mesh), expected)


def test_what_is_new_and_what_is_left_is_listed():
    ours = dataclasses.replace(ENCODER, num_classes=3, token_head=False, logit_bias=False, lora_rank=1)
    source = source_of(ENCODER, None)
    rows = dict(Start(source, match(source, ours)).rows(ours))
    assert set(rows["new"].split(", ")) == {"classifier/bias", "classifier/kernel", *(
        f"encoder/layers_*/self_attention/{name}/lora_{part}" for name in ("query", "value") for part in "ab")}
    assert "token_head/kernel" in rows["left out"] and "encoder" not in rows["left out"]


def test_fields_that_shapes_do_not_tell_are_named():
    assert differences(dataclasses.replace(ENCODER, activation="relu", dropout_rate=0.5), ENCODER) == [
        "model.activation 'relu' (there 'gelu')"]


def test_the_vocabulary_is_that_of_the_source():
    config = tfm.Config(presets.tiny(9, dropout_rate=0.3), train=tfm.TrainConfig(init_from="x", init_model="source"))
    taken = with_source(config, presets.tiny(33, d_model=32)).model
    assert (taken.vocab_size, taken.d_model, taken.dropout_rate) == (33, 32, 0.3)
    kept = with_source(config.replace(train=tfm.TrainConfig(init_from="x")), presets.tiny(33, d_model=32)).model
    assert (kept.vocab_size, kept.d_model) == (33, 16)


def test_a_run_gives_parameters_and_tokenizer(tiny_run):
    source = open_source(tiny_run, print)
    bundle = tfm.load(tiny_run)
    assert source.tokenizer.to_bytes() == bundle.tokenizer.to_bytes() and source.generation is None
    params = Start(source, match(source, bundle.model)).params(bundle.model, make_mesh("data=1", jax.devices()[:1]))
    jax.tree.map(np.testing.assert_array_equal, params, bundle.params)
    assert open_source(tiny_run / "checkpoints" / "2", print).model == bundle.model
    half = dataclasses.replace(bundle.model, param_dtype="bfloat16")
    leaves = jax.tree.leaves(Start(source, match(source, half)).params(half, make_mesh("data=1", jax.devices()[:1])))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}
