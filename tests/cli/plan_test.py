"""`tfm plan` as a user runs it."""

import re
import subprocess
import sys

import pytest

from tfm.cli.main import main
from tfm.cli.plan import compile_step, planned_config
from tfm.config import Config, DataConfig, ModelConfig

CONFIG = """
from tfm import Config, DataConfig, ModelConfig

def get_config():
    return Config(ModelConfig(vocab_size=64, d_model=16, d_ff=32, num_heads=4, encoder_layers=0, decoder_layers=2),
                  DataConfig(max_length=32, tokens_per_batch=256, task="causal_lm"))
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.slow
def test_a_plan_for_more_devices_than_there_are(config_file):
    """64 devices; 1e9 tokens in steps of 64 x 32 at 3 a device-hour."""
    found = subprocess.run([sys.executable, "-m", "tfm", "plan", config_file, "--mesh", "data=16,fsdp=2,tensor=2",
                            "--device", "v5p", "--tokens", "1e9", "--price", "3", "--hours", "2"],
                           capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stderr
    printed = " ".join(found.stdout.split())
    assert "64 devices (data=16,fsdp=2,tensor=2)" in printed and "32 x 32" in printed
    assert f"{10**9 // 1024 + 1:,}" in printed and re.search(r"fits │ yes", printed)
    assert f"{2 * 3600 * 64 * 459e12:.1e}" in printed


@pytest.mark.parametrize(("model", "labels", "classes"), [
    ({}, (), 2), ({"num_classes": 4}, (), 4), ({}, ("a", "b", "c"), 3)])
def test_a_classification_is_planned_with_its_own_head(model, labels, classes):
    """As `tfm train` resolves the config; a label and a weight for each row, not for each token."""
    config = planned_config(Config(
        ModelConfig(vocab_size=64, d_model=16, d_ff=32, num_heads=4, encoder_layers=1, decoder_layers=0, **model),
        DataConfig(max_length=32, tokens_per_batch=256, task="classify", labels=labels)))
    state, batch, _ = compile_step(config, {"data": 1}, 8, 32)
    assert state.params["classifier"]["kernel"].shape == (16, classes)
    assert batch["tokens"].shape == (8, 32) and batch["labels"].shape == batch["weights"].shape == (8,)


def test_a_task_that_the_model_cannot_learn_is_refused_as_in_training(config_file, capsys):
    assert main(["plan", config_file, "--data.task", "translate"]) == 2
    assert "data.task is 'translate'" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--device", "h101"], "--device is 'h101', but it must be one of"), (["--mesh", "data=-1"], "every size"),
    (["--mesh", "dta=2"], "no axis 'dta'"), (["--price", "0"], "--price is 0"),
    (["--mesh", "tensor=4096"], "at most 1024")])
def test_mistakes(config_file, capsys, arguments, message):
    assert main(["plan", config_file, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
