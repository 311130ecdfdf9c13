"""Checks that the dataclasses of a config share."""

from __future__ import annotations

import functools
import math
import types
import typing
from pathlib import Path
from typing import Any, Literal

import numpy as np


def as_tuple(value: Any) -> Any:
    """A list as a tuple, and a single string as a tuple of one; anything else as it is."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def require(condition: bool, field_name: str, value: object, expected: str) -> None:
    """Raise the ValueError that a user can act on: which field, which value, what would be right."""
    if not condition:
        raise ValueError(f"{field_name} is {value!r}, but {expected}")


def require_file(path: Path, what: str) -> None:
    """Raise the error of a path that is no file to read: FileNotFoundError where nothing is there, else ValueError."""
    if not path.exists():
        raise FileNotFoundError(f"{what} {path} does not exist" + ("" if path.is_absolute() else f" in {Path.cwd()}"))
    if not path.is_file():
        raise ValueError(f"{what} {path} is {'a folder' if path.is_dir() else 'a pipe or device'}: a file is needed")


def require_positive(owner: str, instance: object, names: tuple[str, ...]) -> None:
    """Each of the fields is above 0, or None."""
    for name in names:
        value = getattr(instance, name)
        require(value is None or value > 0, f"{owner}.{name}", value, "it must be above 0")


def require_rates(owner: str, instance: object, names: tuple[str, ...]) -> None:
    """Each of the fields is a rate."""
    for name in names:
        value = getattr(instance, name)
        require(0.0 <= value < 1.0, f"{owner}.{name}", value, "a rate must lie in [0, 1)")


def require_types(owner: str, instance: object) -> None:
    """Each field has a value of its type, as a config read back from JSON must have; a float may be an int.

    NumPy's numbers become Python's.
    """
    kind: Any = type(instance)
    for name, hint in _hints(kind).items():
        value = getattr(instance, name)
        if isinstance(value, np.generic):
            value = value.item()
            object.__setattr__(instance, name, value)
        if not _has_type(value, hint):
            raise ValueError(f"{owner}.{name} is {value!r}, but it must be {_type_name(hint)}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _has_type(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_has_type(value, part) for part in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, inner[0]) for item in value)
    if origin is Literal:
        return True  # `require_choices` sees to it
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        finite = not isinstance(value, float) or math.isfinite(value)
        return isinstance(value, kinds) and not isinstance(value, bool) and finite
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return f"a tuple, of which each item is {_type_name(inner[0])}"
    if inner:
        return " or ".join(_type_name(part) for part in inner)
    names = {int: "a whole number", float: "a finite number", str: "a string", bool: "True or False",
             type(None): "None"}
    return names.get(hint, hint.__name__)


@functools.cache
def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """The values that each closed-choice field of a dataclass may have."""
    return {name: typing.get_args(hint) for name, hint in _hints(kind).items() if typing.get_origin(hint) is Literal}


def require_choices(owner: str, instance: object) -> None:
    """Each field typed as a Literal has one of its values."""
    kind: Any = type(instance)
    for name, allowed in _choices(kind).items():
        value = getattr(instance, name)
        require(value in allowed, f"{owner}.{name}", value, f"it must be one of {', '.join(allowed)}")
