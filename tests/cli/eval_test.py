"""The eval command: its figures are those of sacrebleu on the files that it writes."""

import json
import math

import pytest
import sacrebleu

from tfm.cli.eval import main


def test_figures_agree_with_sacrebleu_on_the_written_files(tiny_run, tmp_path, capsys):
    assert main([str(tiny_run), "--limit", "3", "--beam-size", "1", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    read = {name: (tmp_path / f"{name}.txt").read_text().splitlines() for name in ("translations", "references")}
    assert len(read["references"]) == 3
    assert figures["bleu"] == pytest.approx(sacrebleu.corpus_bleu(read["translations"], [read["references"]]).score)
    assert figures["chrf"] == pytest.approx(sacrebleu.corpus_chrf(read["translations"], [read["references"]]).score)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["tokens"] == sum(min(len(line.encode()) + 1, 100) for line in read["references"])
    assert figures["bleu_signature"] in out


def test_mistakes_are_one_line_and_exit_code_2(tiny_run, tmp_path, capsys):
    for arguments, word in (([str(tmp_path)], "no run folder"), ([str(tiny_run), "--average", "9"], "average"),
                            ([str(tiny_run), "--limit", "0"], "--limit")):
        capsys.readouterr()
        assert main(arguments) == 2
        err = capsys.readouterr().err.strip()
        assert word in err
        assert len(err.splitlines()) == 1
