"""The decode command: a line out for each line in, whatever the lines are."""

import io
import sys

import pytest

from tfm.cli.decode import main, read_lines


@pytest.fixture
def decode(tiny_run, capsys, monkeypatch):
    """(exit code, stdout, stderr) of the command on these bytes."""

    def run(data: bytes, *options: str, model=tiny_run):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(model), "--max-length", "4", *options])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("data", "lines"), [
    (b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"a\n\n \nb\r\n", 4), ("a\u2028b\n".encode(), 1), (b"\n\n", 2),
])
def test_as_many_lines_out_as_in(decode, data, lines):
    code, out, _ = decode(data)
    assert code == 0
    assert out.count("\n") == lines


def test_blank_lines_stay_blank_and_lines_do_not_depend_on_each_other(decode):
    _, out, _ = decode(b"one\n\ntwo\n", "--scores")
    first, blank, second = out.splitlines()
    assert blank == "\t"
    assert decode(b"two\none\n", "--scores", "--batch-size", "1")[1].splitlines() == [second, first]


def test_a_line_of_two_thousand_words_is_one_line(decode):
    assert decode(b"word " * 400 + b"\n", "--beam-size", "1")[1].count("\n") == 1


def test_n_best_lines_carry_their_number_and_score(decode):
    _, out, _ = decode(b"a\nb\n", "--n-best", "2", "--beam-size", "3")
    fields = [line.split(" ||| ") for line in out.splitlines()]
    assert [field[0] for field in fields] == ["0", "0", "1", "1"]
    assert all(float(field[2]) <= 0 for field in fields)


def test_scores_of_given_pairs(decode):
    code, out, err = decode(b"a\tb\nc\td\n", "--score")
    assert code == 0
    assert all(float(line) < 0 for line in out.splitlines())
    assert "perplexity" in err


def test_an_interactive_line_is_answered_by_the_same_text(decode):
    assert decode(b"abc\n", "--interactive")[1] == decode(b"abc\n", "--beam-size", "1")[1]


@pytest.mark.parametrize(("data", "options", "words"), [
    (b"a\nb\xffc\n", (), ["line 2", "0xff", "--replace-invalid"]),
    (b"a\n", ("--checkpoint", "7"), ["no checkpoint of step 7", "1, 2, 3"]),
    (b"a\n", ("--checkpoint", "last"), ["--checkpoint", "newest or best"]),
    (b"a\n", ("--beem-size", "2"), ["--beem-size", "--beam-size"]),
    (b"a\n", ("--top-k", "2"), ["top_k", "temperature"]),
    (b"a b\n", ("--score",), ["line 1", "tab"]),
    (b"a\n", ("--score", "--n-best", "2", "--beam-size", "2"), ["--n-best", "--score"]),
])
def test_mistakes_are_one_line_and_exit_code_2(decode, data, options, words):
    code, out, err = decode(data, *options)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert all(word in err for word in words), err
    assert "Traceback" not in out + err


def test_an_absent_run_is_one_line(decode, tmp_path):
    code, _, err = decode(b"a\n", model=tmp_path / "none")
    assert code == 2
    assert "does not exist" in err


def test_invalid_bytes_can_be_replaced():
    assert list(read_lines(io.BytesIO(b"a\xffb\n"), replace=True)) == ["a\ufffdb"]
