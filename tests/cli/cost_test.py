"""`tfm cost` prints the figures of `tfm.analysis.costs`."""

import itertools
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


def test_the_lengths_under_a_picture_do_not_run_into_each_other(tmp_path):
    from unittest.mock import patch

    from matplotlib.figure import Figure

    from tfm import presets
    from tfm.analysis.cost_plots import plot_costs

    drawn = []
    with patch.object(Figure, "savefig", lambda self, path, **how: drawn.append(self)):
        plot_costs(presets.transformer_base(vocab_size=100), 512, tmp_path / "costs.png")
    figure = drawn[0]
    figure.canvas.draw()
    for axes in figure.axes:
        ticks = [*axes.xaxis.get_major_ticks(), *axes.xaxis.get_minor_ticks()]
        boxes = sorted((tick.label1.get_window_extent() for tick in ticks if tick.label1.get_text()),
                       key=lambda box: box.x0)
        assert len(boxes) > 2
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


@pytest.mark.parametrize(("arguments", "message"), [(["--length", "0"], "--length is 0"),
                                                    (["--dtype", "fp7"], "fp7"), (["--bach", "2"], "--batch"),
                                                    (["--plot", "costs"], "--plot is 'costs'"),
                                                    (["--plot", "costs.jpgg"], "--plot is 'costs.jpgg'")])
def test_mistakes(capsys, arguments, message):
    assert main(["cost", CONFIG, *arguments]) == 2
    assert message in capsys.readouterr().err
