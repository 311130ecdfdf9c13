"""`tfm show attention`: the files that it writes are those of the bundle's maps, and mistakes take one line."""

import json
import re

import jax
import numpy as np
import pytest

import tfm.cli.show
from tfm.bundle import Bundle, run_special
from tfm.cli.main import main
from tfm.config import Config, ModelConfig
from tfm.data.tokenizer import ByteTokenizer
from tfm.models import init_params

MODEL = ModelConfig(vocab_size=260, d_model=8, d_ff=8, num_heads=2, encoder_layers=2, decoder_layers=2)


@pytest.fixture
def bundle(monkeypatch, request):
    config, tokenizer = Config(getattr(request, "param", MODEL)), ByteTokenizer()
    bundle = Bundle(config, init_params(config.model, jax.random.key(0)), tokenizer, run_special(config, tokenizer))
    monkeypatch.setattr(tfm.cli.show, "load", lambda path, say: bundle)
    return bundle


def show(tmp_path, *arguments):
    return main(["show", "attention", "RUN", *arguments, "--output", str(tmp_path / "out")])


def test_all_layers(bundle, tmp_path, capsys):
    assert show(tmp_path, "ab", "xyz") == 0
    printed = capsys.readouterr().out.splitlines()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "attention.html", *(f"{part}_{what}.png" for part in ("encoder", "decoder", "cross")
                            for what in ("grid", "layer1_mean"))}
    assert str(tmp_path / "out" / "attention.html") == printed[-1]
    page = (tmp_path / "out" / "attention.html").read_text()
    cross = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])["views"][2]
    assert cross["rows"] == ["<s>", "x", "y", "z"] and cross["columns"] == ["a", "b", "</s>"]
    entropy = bundle.attention_maps("ab", "xyz").entropy("cross")
    np.testing.assert_allclose(cross["entropy"], entropy, atol=1e-4)
    assert f"cross layer 1: entropy of the heads {entropy[1][0]:.2f} {entropy[1][1]:.2f} nats" in printed


def test_one_layer_and_head(bundle, tmp_path):
    assert show(tmp_path, "ab", "xyz", "--layer", "0", "--head", "1") == 0
    assert (tmp_path / "out" / "cross_layer0_head1.png").exists()
    assert len(list((tmp_path / "out").iterdir())) == 7


@pytest.mark.parametrize(("arguments", "message"), [
    (["ab", "x", "--layer", "2"], "--layer is 2, but it must be 0 to 1"),
    (["ab", "x", "--head", "-1"], "--head is -1"), (["", "x"], "the source"), (["ab", "x", "--laier", "1"], "--layer")])
def test_mistakes(bundle, tmp_path, capsys, arguments, message):
    assert show(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("bundle", [ModelConfig(vocab_size=260, d_model=8, d_ff=8, num_heads=2, encoder_layers=0,
                                                decoder_layers=1)], indirect=True)
def test_a_decoder_takes_no_target(bundle, tmp_path, capsys):
    assert show(tmp_path, "ab", "x") == 2
    assert "only an encoder-decoder" in capsys.readouterr().err
    assert show(tmp_path, "ab") == 0
