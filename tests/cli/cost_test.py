"""`tfm cost` prints the figures of `tfm.analysis.costs`."""

from pathlib import Path

import pytest

from tfm.cli.main import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "wmt14_base.py")


def test_tables_and_picture(tmp_path, capsys, monkeypatch):
    from matplotlib.image import imread

    monkeypatch.setenv("COLUMNS", "150")
    code = main(["cost", CONFIG, "--length", "131072", "--batch", "1", "--dtype", "bf16", "--plot",
                 str(tmp_path / "costs.png")])
    printed = capsys.readouterr().out
    assert code == 0
    for number in ("34.3597", "66,978,048", "128.3", "8,590,000,128", "63,045,632",
                   f"{2 * 6 * 131072 * 512 * 2:,}", f"{131072**2 * 512:.4g}"):
        assert number in printed, number
    assert imread(tmp_path / "costs.png").std() > 0.05


@pytest.mark.parametrize(("arguments", "message"), [(["--length", "0"], "--length is 0"),
                                                    (["--dtype", "fp7"], "fp7"), (["--bach", "2"], "--batch")])
def test_mistakes(capsys, arguments, message):
    assert main(["cost", CONFIG, *arguments]) == 2
    assert message in capsys.readouterr().err
