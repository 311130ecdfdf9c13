"""Config files and typed options: `configs/x.py --model.num-heads 4`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import re
import runpy
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from tfm.config import Config, DataConfig, DecodeConfig, ModelConfig, OptimizerConfig, TrainConfig
from tfm.config_checks import require_file
from tfm.config_json import nearest

T = TypeVar("T")
FRAME, RULE = " │╭╮╰╯|+", " │─╭╮╰╯|-+"
"""What tyro draws boxes with: in Unicode, or in ASCII where stderr cannot show that."""
VALUES = ((r"invalid literal for int\(\) with base 10: (.+)", "a whole number"),
          (r"could not convert string to float: (.+)", "a number"),
          (r"no type matching {None}\|INT could be instantiated from \[(.+)\]\.", "a whole number, or None"),
          (r"no type matching {None}\|FLOAT could be instantiated from \[(.+)\]\.", "a number, or None"))
"""What tyro says of a value that it cannot read -> what would be right."""
PARTS = (ModelConfig, DataConfig, OptimizerConfig, TrainConfig, DecodeConfig)


def load_config_file(path: str | Path) -> Config:
    """The config that `get_config()` of a Python file gives.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a folder, or a file with an error, without `get_config`, or with one that gives something else; the
            message names it.
    """
    path = Path(path)
    require_file(path, "config file")
    try:
        config = runpy.run_path(str(path))["get_config"]()
    except KeyError as error:
        if error.args != ("get_config",):
            raise ValueError(f"{path}: {error!r}") from error
        raise ValueError(f"{path} defines no get_config()") from error
    except TypeError as error:
        raise ValueError(f"{path}: {_name_unknown_field(str(error))}") from error
    except Exception as error:
        raise ValueError(f"{path}: {error}" if isinstance(error, ValueError) else f"{path}: {error!r}") from error
    if not isinstance(config, Config):
        raise ValueError(f"{path}: get_config() gives {type(config).__name__}, but it must give a tfm.Config")
    return config


def parse(kind: type[T], argv: Sequence[str], *, prog: str) -> T:
    """The options of a command as a dataclass, typed and checked.

    Args:
        kind: dataclass whose docstring says what the command does, with a documented field for each option. Where it
            has the fields `config_file` and `config`, `config` starts from the file that is named first.
        argv: arguments after the command's name.
        prog: name of the command, for the help.

    Returns:
        instance of `kind`.

    Raises:
        ValueError: unknown options (with the nearest known name) and values that do not fit.
        SystemExit: after `--help`.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    default: Any = None
    if "config" in {field.name for field in fields}:
        values = {field.name: _default_of(field) for field in fields}
        default = kind(**values | {"config": _starting_config(argv)})
    settings = (tyro.conf.AvoidSubcommands,)
    if {"-h", "--help"} & set(argv):
        return tyro.cli(kind, prog=prog, args=list(argv), default=default, config=settings)
    with _one_line(_option_names(kind)):
        return tyro.cli(kind, prog=prog, args=list(argv), default=default, config=settings)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


def _starting_config(argv: Sequence[str]) -> Config:
    """The config of the first .py file among the arguments; for --help without one, the defaults."""
    files = [argument for argument in argv if argument.endswith(".py")]
    if files:
        return load_config_file(files[0])
    if {"-h", "--help"} & set(argv):
        return Config(ModelConfig(vocab_size=37000))
    raise ValueError("no config file is named: give one, such as configs/quickstart.py")


def _option_names(kind: Any, prefix: str = "") -> list[str]:
    """Names of all options, such as --model.num-heads."""
    names = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        flat = any(getattr(extra, "name", None) == "" for extra in getattr(hint, "__metadata__", ()))
        inner = typing.get_args(hint)[0] if flat else hint
        name = "" if flat else f"{prefix}{field.name}".replace("_", "-")
        parts = [part for part in typing.get_args(inner) if dataclasses.is_dataclass(part)]
        if dataclasses.is_dataclass(inner):
            names += _option_names(inner, f"{name}." if name else "")
        elif parts:
            names += _option_names(parts[0], f"{name}.0." if typing.get_origin(inner) is tuple else f"{name}.")
        else:
            names.append(f"--{name}")
    return names


@contextlib.contextmanager
def _one_line(known: Sequence[str]) -> Iterator[None]:
    """tyro's boxed message about a mistake as a ValueError of one line."""
    box, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(box):
            yield
    except SystemExit as error:
        raise ValueError(_message(box.getvalue(), known)) from error
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width


def _message(box: str, known: Sequence[str]) -> str:
    lines = ["" if set(line) <= set(RULE) else line.strip(FRAME) for line in box.splitlines()[1:]]
    body = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines))
    text = re.sub(r"^Error parsing (config\.\w+|\w+Options|--\S+): (?=(\w+\.\w+|--\S+) is )", "", " ".join(body))
    unknown = re.match(r"Unrecognized options: (--[^\s,=]+)", text)
    if unknown:
        return f"unknown option {unknown[1]}{_instead(unknown[1], known)}"
    for said, right in VALUES:
        wrong = re.fullmatch(rf"Error parsing (--\S+): {said}", text)
        if wrong:
            return f"{wrong[1]} is {wrong[2]}, but it must be {right}"
    missing = re.match(r"Missing from .*?: (--\S+)", text)
    return f"the option {missing[1]} is missing" if missing else text


def _instead(option: str, known: Sequence[str]) -> str:
    """What to write in place of an unknown option."""
    if option in known:
        return f": the config file has no {option.removeprefix('--').rpartition('.')[0].replace('-', '_')} to change"
    inner = [name for name in known if name.startswith(f"{option}.")]
    if inner:
        return f": there are {', '.join(inner)}"
    near = nearest(option, list(known))
    return f": did you mean {near}?" if near else ""


def _name_unknown_field(message: str) -> str:
    """A dataclass's "unexpected keyword argument", with the nearest field."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    kinds = {kind.__name__: kind for kind in (Config, *PARTS)}
    if found is None or found[1] not in kinds:
        return message
    near = nearest(found[2], [field.name for field in dataclasses.fields(kinds[found[1]])])
    return f"{found[1]} has no field {found[2]}" + (f": did you mean {near}?" if near else "")
