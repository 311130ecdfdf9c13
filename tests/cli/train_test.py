"""The train command: a whole small run, its options, and one line for every mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tfm.cli.main import main as tfm_main
from tfm.cli.options import load_config_file, parse
from tfm.cli.train import TrainOptions, main
from tfm.config import Config
from tfm.decoding.program import compiler_options


@pytest.fixture
def config_file(tiny_config):
    return str(tiny_config)


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    """A copy of the tiny run that may go on."""
    return shutil.copytree(tiny_run, tmp_path_factory.mktemp("run") / "new")


def fails(capsys, arguments, *words):
    """Exit code 2 and exactly one line on stderr, with these words."""
    capsys.readouterr()
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0]


def test_a_run_leaves_what_the_design_promises(run):
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "tokenizer.model", "checkpoints", "metrics.jsonl", "samples", "curves.png"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"loss", "tokens_per_second", "valid_loss", "bleu"} <= set(lines[2])
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["vocab_size"] > 256
    assert "translation" in (run / "samples" / "3.txt").read_text()


def test_more_steps_go_on_and_other_fields_are_refused(run, config_file, capsys):
    fails(capsys, [config_file, "--workdir", str(run), "--model.d-ff", "64"], str(run), "model.d_ff 32 -> 64")
    fails(capsys, [config_file, "--workdir", str(run), "--train.seed", "1"], "train.seed 0 -> 1")
    assert main([config_file, "--workdir", str(run), "--train.steps", "8", "--profile", "1"]) == 0
    err = capsys.readouterr().err
    assert "going on from step 3" in err
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 8
    for part in ("waiting for input", "MFU", "feed-forward", "optimizer", "trace in"):
        assert part in err, part
    assert next((run / "profile").rglob("perfetto_trace.json.gz")).stat().st_size > 100


def test_options_are_typed(config_file):
    options = parse(TrainOptions, [config_file, "--workdir", "x", "--data.source", "text", "--data.train", "a", "b",
                                   "--model.num-heads", "4", "--optimizer.clip-norm", "None", "--model.gated"],
                    prog="train.py")
    config = options.config
    assert (config.data.train, config.model.num_heads, config.model.gated) == (("a", "b"), 4, True)
    assert config.model.d_model == 16 and config.optimizer.clip_norm is None


@pytest.mark.parametrize("arguments, words", [
    (["--model.num-heds", "4"], ["--model.num-heds", "did you mean --model.num-heads?"]),
    (["--train.step=4"], ["--train.step", "did you mean --train.steps?"]),
    (["--model.num-heads", "3"], ["model.num_heads is 3", "d_model=16"]),
    (["--train.steps", "1e3"], ["error: --train.steps is '1e3', but it must be a whole number"]),
    (["--optimizer.learning-rate", "high"], ["error: --optimizer.learning-rate is 'high', but it must be a number"]),
    (["--model.num-kv-heads", "a"], ["error: --model.num-kv-heads is 'a', but it must be a whole number, or None"]),
    (["--model.attention-pattern", "window"], ["there are --model.attention-pattern.0.kind, --model.att"]),
    (["--model.attention-pattern.0.knd", "window"], ["did you mean --model.attention-pattern.0.kind?"]),
    (["--model.rotary-scaling.kind", "linear"], ["the config file has no model.rotary_scaling to change"]),
    (["--model.norm", "batch"], ["--model.norm", "batch", "layer"]),
    (["--mesh", "date=2"], ["date", "data"]),
    (["--mesh", "data=7"], ["mesh data=7", "devices"]),
    (["--data.source", "text"], ["data.train"]),
    (["--data.train", "a.en", "a.de"], ["data.train is ('a.en', 'a.de')", "data.source='text'"]),
    (["--data.source", "text", "--data.train", "no.en", "no.de"], [f"no.en does not exist in {Path.cwd()}"]),
    (["--data.source", "text", "--data.train", str(Path.cwd()), "no.de"], ["text file", "is a folder"]),
    (["--model.position", "learned", "--model.max-positions", "50"], ["max_length is 100", "max_positions=50"]),
    (["--model.param-dtype", "float16"], ["model.param_dtype is 'float16'", "adam", "float32 or bfloat16"]),
])
def test_mistakes_in_options(config_file, tmp_path, capsys, arguments, words):
    fails(capsys, [config_file, "--workdir", str(tmp_path / "run"), *arguments], *words)


@pytest.mark.parametrize("content, words", [
    ("x = 1", ["defines no get_config()"]),
    ("def get_config(): return 3", ["int", "tfm.Config"]),
    ("import tfm\ndef get_config(): return tfm.Config(tfm.ModelConfig(vocab_size=9, num_head=3))",
     ["ModelConfig has no field num_head", "did you mean num_heads?"]),
    ("import tfm\ndef get_config(): return tfm.Config(tfm.ModelConfig(vocab_size=9, d_model=10, num_heads=3))",
     ["model.num_heads is 3", "d_model=10"]),
    ("def get_config(:", ["SyntaxError"]),
    ("import nothing_of_the_sort", ["nothing_of_the_sort"]),
])
def test_mistakes_in_a_config_file(tmp_path, capsys, content, words):
    path = tmp_path / "wrong.py"
    path.write_text(content)
    fails(capsys, [str(path), "--workdir", str(tmp_path / "run")], "wrong.py", *words)


def test_missing_arguments(config_file, tmp_path, capsys):
    fails(capsys, [], "config file")
    fails(capsys, [config_file], "--workdir")
    fails(capsys, [str(tmp_path / "none.py"), "--workdir", "x"], "none.py", "does not exist")


def test_a_workdir_that_is_a_file(config_file, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    fails(capsys, [config_file, "--workdir", str(tmp_path / "file")], "file")


def test_two_commands_do_not_train_in_one_folder(run, config_file, capsys):
    """Another process holds the folder, and gives it up when it is killed."""
    code = (f"import sys, time; from pathlib import Path; from tfm.training.run_folder import RunLock; "
            f"lock = RunLock(Path({str(run)!r})); lock.take(); print('taken', flush=True); time.sleep(600)")
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    before = (run / "metrics.jsonl").read_bytes()
    try:
        assert other.stdout.readline() == "taken\n"
        for more in ([], ["--dry-run"]):
            fails(capsys, [config_file, "--workdir", str(run), *more], str(run), f"in use by process {other.pid}")
        assert (run / "metrics.jsonl").read_bytes() == before
    finally:
        other.kill()
        other.communicate()
    assert main([config_file, "--workdir", str(run)]) == 0


def test_a_vocabulary_that_the_text_cannot_fill(config_file, tmp_path, capfd):
    sides = [tmp_path / "a.en", tmp_path / "a.de"]
    for side in sides:
        side.write_text("a b c\n" * 9)
    arguments = ["--data.source", "text", "--data.train", *map(str, sides), "--data.tokenizer", "bpe"]
    assert main([config_file, "--workdir", str(tmp_path / "run"), *arguments]) == 2
    assert "vocab_size" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("fate, expected", [("skip", ["left out", "2 longer than data.max_length, 1 empty"]),
                                            ("cut", ["left out", "1 empty", "cut", "2 to data.max_length"])])
def test_texts_that_are_not_used_are_counted(config_file, tmp_path, capsys, fate, expected):
    for side in "ab":
        (tmp_path / side).write_text("a b c\n" * 9 + "\n" + "x" * 100 + "\n" + "y" * 300 + "\n")
    arguments = ["--data.source", "text", "--data.train", str(tmp_path / "a"), str(tmp_path / "b"), "--dry-run"]
    assert main([config_file, "--workdir", str(tmp_path / "run"), *arguments, "--data.too-long", fate]) == 0
    cells = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().err.splitlines()]
    assert [word for row in cells if set(row) & {"left out", "cut"} for word in row[1:3]] == expected


def test_help_documents_every_field(capsys):
    with pytest.raises(SystemExit) as done:
        parse(TrainOptions, ["--help"], prog="train.py")
    assert done.value.code == 0
    text = capsys.readouterr().out
    for part in ("model.num-heads", "data.train", "optimizer.clip-norm", "train.steps", "decode.alpha", "mesh"):
        assert f"--{part}" in text
    assert "Query heads H." in text


def test_dispatch(capsys):
    assert tfm_main([]) == 0 and "train" in capsys.readouterr().out
    assert tfm_main(["trian"]) == 2 and "did you mean train?" in capsys.readouterr().err
    assert tfm_main(["train", "none.py", "--workdir", "x"]) == 2


def test_root_script_gives_the_exit_code(tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, str(root / "train.py"), "none.py", "--workdir", "x"], capture_output=True,
                          text=True, cwd=root)
    assert done.returncode == 2 and done.stderr.startswith("error: config file none.py")


def test_a_config_file_gives_its_config(config_file):
    assert isinstance(load_config_file(config_file), Config)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_loss(run, config_file, tmp_path, remat):
    """A new run, with all that the command does before its first step."""
    assert main([config_file, "--workdir", str(tmp_path), "--model.remat", remat]) == 0
    plain, saving = ([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                     for folder in (run, tmp_path))
    losses = [row["loss"] for row in saving if "loss" in row]
    assert len(losses) == 3
    assert losses == pytest.approx([row["loss"] for row in plain if "loss" in row][:3], rel=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_both_steps_are_compiled_with_the_options_of_the_backend(config_file, tmp_path, monkeypatch, number):
    """The training and the evaluation step: an option that XLA does not know ends either."""
    made = [compiler_options()] * 2
    made[number] = {"xla_no_such_option": 1}
    monkeypatch.setattr("tfm.cli.train_parts.compiler_options", iter(made).__next__)
    monkeypatch.setattr("tfm.cli.train_parts.kept_programs", lambda *origin: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        main([config_file, "--workdir", str(tmp_path), "--train.steps", "1"])
