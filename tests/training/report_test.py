"""What a person sees while training."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tfm.training.report import Reporter


@pytest.fixture
def terminal(monkeypatch):
    """What is written to a terminal of 80 columns, as its lines."""
    text = io.StringIO()
    monkeypatch.setattr("tfm.training.report.Console", lambda **how: Console(
        file=text, force_terminal=True, width=80, highlight=False))
    return lambda: re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()).replace("\r", "\n").split("\n")


def test_the_bar_keeps_its_steps_in_eighty_columns(terminal):
    reporter = Reporter(100_000)
    reporter.start(0)
    values = {"loss": 7.749, "learning_rate": 1.2e-4, "tokens_per_second": 19464.0}
    reporter.report(2000, values | {"valid_loss": 7.719, "bleu": 12.5})
    reporter.stop()
    lines = terminal()
    assert "step 2000  loss 7.749  lr 1.20e-04  tokens/s 19,464  valid loss 7.719  BLEU 12.50" in lines
    bars = [line for line in lines if line.startswith("step") and line.rstrip().endswith(("-:--:--", "…"))]
    assert bars and "2000/100000" in bars[-1] and bars[-1].rstrip().endswith("-:--:--")
