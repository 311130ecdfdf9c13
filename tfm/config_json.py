"""A config as JSON and back, and the differences of two configs."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any

from tfm.config import Config


def config_to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as nested dicts and lists, ready for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_from_dict(values: dict[str, Any], kind: type = Config, where: str = "") -> Any:
    """The dataclass that `config_to_dict` took apart; fields left out keep their defaults.

    Args:
        values: field -> value.
        kind: dataclass to make.
        where: path of the field that holds it, for messages.

    Returns:
        an instance of `kind`.

    Raises:
        ValueError: an unknown field (the message gives the nearest name), a missing one, or a value that does not fit.

    Example:
        >>> config_from_dict({"model": {"vocab_size": 10}}).model.vocab_size
        10
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'config'} is {values!r}, but it must be an object with fields")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise ValueError(unknown_field(f"{where}.{name}".lstrip("."), [f"{where}.{f}".lstrip(".") for f in fields]))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"config has no field {f'{where}.{name}'.lstrip('.')}: it has no default")
    made = {name: _read(value, hints[name], f"{where}.{name}".lstrip(".")) for name, value in values.items()}
    return kind(**made)


def save_config(config: Config, path: str | Path) -> None:
    """Write a config as indented JSON; the file is replaced in one step."""
    path = Path(path)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(config_to_dict(config), indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def load_config(path: str | Path) -> Config:
    """Read the config that `save_config` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not JSON, or fields that do not fit; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a run folder has a config.json")
    try:
        return config_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def config_diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ: dotted name -> (old value, new value).

    Example:
        >>> from tfm.config import ModelConfig
        >>> config_diff(Config(ModelConfig(vocab_size=10)), Config(ModelConfig(vocab_size=10, d_ff=64)))
        {'model.d_ff': (2048, 64)}
    """
    before, after = _flat(config_to_dict(old)), _flat(config_to_dict(new))
    names = [*before, *(name for name in after if name not in before)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def unknown_field(name: str, known: list[str]) -> str:
    """The message for a field that does not exist, with the nearest one that does."""
    near = nearest(name, known)
    return f"unknown config field {name}" + (f": did you mean {near}?" if near else "")


def nearest(name: str, known: list[str]) -> str | None:
    """The most similar of the known names; those under the same part, such as `model.`, come before others."""
    part, _, last = name.rpartition(".")
    family = [other for other in known if other.rpartition(".")[0] == part]
    names = {other.rpartition(".")[2]: other for other in family} or {other: other for other in known}
    found = difflib.get_close_matches(last if family else name, list(names), n=1, cutoff=0.5)
    return names[found[0]] if found else None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _read(value: Any, hint: Any, where: str) -> Any:
    """A JSON value as the type that a field asks for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return _require(type(None) in arguments, value, where, "it cannot be null")
        return _read(value, next(a for a in arguments if a is not type(None)), where)
    if dataclasses.is_dataclass(hint):
        return config_from_dict(value, typing.cast(type, hint), where)
    if origin is tuple:
        _require(isinstance(value, list), value, where, "it must be a list")
        return tuple(_read(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is typing.Literal:
        return _require(value in arguments, value, where, f"it must be one of {', '.join(map(repr, arguments))}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_kind = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    return _require(is_kind, value, where, f"it must be of type {hint.__name__}")


def _require(condition: bool, value: Any, where: str, expected: str) -> Any:
    if not condition:
        raise ValueError(f"{where} is {value!r}, but {expected}")
    return value
