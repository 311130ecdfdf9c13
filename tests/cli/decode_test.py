"""The decode command: a line out for each line in, whatever the lines are."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tfm
from tfm.cli.decode import main, read_lines
from tfm.cli.decode_modes import WINDOW
from tfm.inference import score_pairs


@pytest.fixture
def decode(tiny_run, capsys, monkeypatch):
    """(exit code, stdout, stderr) of the command on these bytes."""

    def run(data: bytes, *options: str, model=tiny_run):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        length = () if "--score" in options else ("--max-length", "4")
        code = main([str(model), *length, *options])
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


def test_the_n_best_say_more_where_asked(decode):
    _, out, _ = decode(b"a\nb\n", "--n-best", "2", "--beam-size", "3", "--token-scores", "--alpha", "0")
    for line in out.splitlines():
        _, _, score, tokens, *mark = line.split(" ||| ")
        assert mark in ([], ["unfinished"])
        values = [float(value) for value in tokens.split()]
        assert sum(values) == pytest.approx(float(score), abs=1e-3)
        assert len(values) == 4 or not mark


def test_alignments_are_pairs_of_words_that_exist(decode):
    _, out, _ = decode(b"one two\n\nthree\n", "--alignment", "--beam-size", "2")
    assert out.splitlines()[1].split(" ||| ") == ["", "", "0.0000"]
    for line, source in zip(out.splitlines()[::2], ("one two", "three"), strict=True):
        text, pairs, sure = line.split(" ||| ")
        assert [int(pair.split("-")[1]) for pair in pairs.split()] == list(range(len(pairs.split())))
        assert len(pairs.split()) <= max(1, len(text.split()))
        assert all(0 <= int(pair.split("-")[0]) < len(source.split()) for pair in pairs.split())
        assert 0 <= float(sure) <= 1


def test_a_model_drafts_for_itself_without_a_miss(decode, tiny_run):
    """The draft is the model: every guess holds, and the output is that of greedy search."""
    code, out, err = decode(b"one two\nthree\n", "--draft", str(tiny_run), "--draft-length", "2", "--batch-size", "1")
    assert code == 0
    drafted = next(line for line in err.splitlines() if "drafted tokens accepted" in line)
    assert "(100.0%)" in drafted
    assert out == decode(b"one two\nthree\n", "--beam-size", "1")[1]


def test_minimum_bayes_risk_gives_one_of_the_samples(decode):
    _, out, _ = decode(b"one two\n", "--mbr", "3", "--temperature", "1", "--seed", "4")
    assert out.count("\n") == 1
    assert out == decode(b"one two\n", "--mbr", "3", "--temperature", "1", "--seed", "4")[1]


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_narrow_weights_change_scores_little(decode, weights):
    score = [float(decode(b"one two\tthree\n", "--score", *more)[1]) for more in ((), ("--weights", weights))]
    assert score[0] != score[1]
    assert score[0] == pytest.approx(score[1], rel=0.02)


def test_scores_of_given_pairs(decode):
    code, out, err = decode(b"a\tb\nc\td\n", "--score")
    assert code == 0
    assert all(float(line) < 0 for line in out.splitlines())
    assert "perplexity" in err


@pytest.mark.parametrize("beams", [1, 3])
def test_the_score_before_a_line_is_that_of_its_ids(decode, tiny_run, beams):
    (line,) = decode(b"abc\n", "--scores", "--beam-size", str(beams), "--alpha", "0")[1].splitlines()
    bundle = tfm.load(tiny_run)
    row = bundle.source_ids("abc")
    (written,) = bundle.generate_ids([row], beam_size=beams, alpha=0.0, max_length=4)
    (forced,) = score_pairs(bundle.model, bundle.params, [row], [written], start_id=bundle.special.start_id)
    assert len(written) == 4
    assert float(line.split("\t")[0]) == pytest.approx(sum(forced), abs=2e-4)


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
    (b"a\n", ("--score", "--alignment"), ["--alignment", "--score"]),
    (b"a\n", ("--interactive", "--draft", "x"), ["--draft", "--interactive"]),
    (b"a\n", ("--interactive", "--lookup", "3"), ["lookup", "token by token"]),
    (b"a\n", ("--token-scores",), ["--token-scores", "--n-best"]),
    (b"a\n", ("--alignment", "--n-best", "2", "--beam-size", "2"), ["--alignment", "--n-best"]),
    (b"a\n", ("--draft-length", "3"), ["--draft-length", "--draft"]),
    (b"a\n", ("--mbr", "4"), ["mbr", "temperature"]),
    (b"a\n", ("--coverage", "0.2", "--beam-size", "1"), ["coverage", "beam_size"]),
    (b"a\n", ("--coverage", "0.2", "--groups", "2", "--beam-size", "2", "--n-best", "2"), ["coverage", "groups"]),
    (b"a\n", ("--diversity", "0.2"), ["diversity", "groups"]),
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


SCRIPT = Path(__file__).parents[2] / "decode.py"


COMMAND = [sys.executable, "-c", "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
           "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", str(SCRIPT)]
"""`python decode.py` that hears Ctrl-C: a shell lets its background commands, and what they start, ignore SIGINT."""


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_closed_standard_streams_are_named(tiny_run, capsys, monkeypatch, stream):
    monkeypatch.setattr(sys, stream, None)
    assert main([str(tiny_run)]) == 2
    assert "lines are read from standard input and written to standard output" in capsys.readouterr().err


@pytest.fixture
def running(tiny_run):
    """The command as a process of its own, one line at a time."""
    command = [*COMMAND, str(tiny_run), "--max-length", "4", "--beam-size", "1", "--batch-size", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_reader_that_goes_away_ends_the_command_quietly(running):
    """As `decode.py ... | head -1` does."""
    running.stdin.write(b"a\n" * 4 * WINDOW)
    running.stdin.flush()
    assert running.stdout.readline().endswith(b"\n")
    running.stdout.close()
    running.stdin.close()
    assert (running.wait(300), running.stderr.read()) == (0, b"")


def test_ctrl_c_keeps_what_is_done_and_is_one_line(running):
    running.stdin.write(b"a\n" * (WINDOW + 1))
    running.stdin.flush()
    written = [running.stdout.readline() for _ in range(WINDOW)]
    running.send_signal(signal.SIGINT)  # the input goes on
    assert (running.wait(300), running.stderr.read()) == (130, b"interrupted\n")
    assert all(line.endswith(b"\n") for line in written) and running.stdout.read() == b""


def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path):
    (tmp_path / "jax.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(300)\n")
    found = subprocess.run([*COMMAND, "run"], capture_output=True, timeout=300,
                           env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (found.returncode, found.stderr) == (130, b"interrupted\n")
