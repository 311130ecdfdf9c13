"""Every config file is whole, and every task trains and is measured from the command line."""

from pathlib import Path

import pytest

from tfm.cli.eval import main as evaluate
from tfm.cli.options import load_config_file
from tfm.cli.train import main as train
from tfm.models import count_params

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_file_gives_a_model_that_can_be_built(path):
    assert count_params(load_config_file(path).model) > 100_000


def test_the_papers_configs_have_the_papers_sizes():
    base, big = (load_config_file(path) for path in CONFIGS if path.stem.startswith("wmt14"))
    assert count_params(base.model) == 63_045_632
    assert round(count_params(big.model) / 1e6) in range(210, 216)
    assert base.data.tokens_per_batch == big.data.tokens_per_batch == 25_000
    assert (base.train.steps, big.train.steps) == (100_000, 300_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_small", "gpt_small", "llama_small", "t5_small_pretrain", "bart_small_pretrain",
                                  "classify_small"])
def test_a_family_trains_and_is_measured(name, tmp_path, capsys):
    (path,) = (path for path in CONFIGS if path.stem == name)
    tiny = ["--model.d-model", "32", "--model.d-ff", "32", "--data.generated-size", "300", "--data.max-length", "64",
            "--data.tokens-per-batch", "256", "--data.buckets", "1", "--data.tokenizer", "byte", "--train.steps", "2",
            "--train.eval-every", "2", "--model.head-dim", "16"]
    assert train([str(path), "--workdir", str(tmp_path / "run"), *tiny]) == 0
    capsys.readouterr()
    assert evaluate([str(tmp_path / "run"), "--limit", "4"]) == 0
    out = capsys.readouterr().out
    wanted = {"bert_small": "pseudo-perplexity", "classify_small": "macro F1", "gpt_small": "bits per byte",
              "llama_small": "bits per byte"}
    assert wanted.get(name, "exact") in out
