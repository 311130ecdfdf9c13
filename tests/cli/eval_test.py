"""The eval command: its figures are those of sacrebleu on the files that it writes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu

from tfm.bundle import load
from tfm.cli.eval import EvalOptions, _generation, main


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


@pytest.mark.parametrize(("options", "word"), [
    (["--output", "FILE"], "FILE"), (["--beam-size", "0"], "beam_size is 0"), (["--alpha", "nan"], "alpha is nan")])
def test_mistakes_show_before_anything_is_measured(tiny_run, tmp_path, capsys, options, word):
    (tmp_path / "FILE").touch()
    options = [str(tmp_path / "FILE") if option == "FILE" else option for option in options]
    capsys.readouterr()
    assert main([str(tiny_run), "--limit", "1", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and word in err


def test_options_of_generation_go_with_translation():
    assert _generation(EvalOptions(Path("run"), alpha=0.5), "translate") == {"alpha": 0.5}
    with pytest.raises(ValueError, match=r"--beam-size is 4, but this run's task is causal_lm, not translate"):
        _generation(EvalOptions(Path("run"), beam_size=4), "causal_lm")


def test_only_the_files_of_the_measured_split_are_opened(tiny_run, tmp_path, capsys, monkeypatch):
    source, target = tmp_path / "test.en", tmp_path / "test.de"
    source.write_text("The child sleeps.\n", encoding="utf-8")
    target.write_text("Das Kind schläft.\n", encoding="utf-8")

    def of_text(*arguments, **options):
        bundle = load(*arguments, **options)
        data = replace(bundle.config.data, source="text", train=("gone.en", "gone.de"), valid=("no.en", "no.de"),
                       test=(str(source), str(target)))
        return replace(bundle, config=bundle.config.replace(data=data))

    monkeypatch.setattr("tfm.cli.eval.load", of_text)
    assert main([str(tiny_run), "--beam-size", "1"]) == 0
    assert f"{'tokens':18} {len('Das Kind schläft.'.encode()) + 1}\n" in capsys.readouterr().out
    assert main([str(tiny_run), "--split", "valid"]) == 2
    assert "no.en does not exist" in capsys.readouterr().err
