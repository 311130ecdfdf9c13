"""Checks that the dataclasses of a config share."""

from __future__ import annotations

import functools
import typing
from typing import Any, Literal


def require(condition: bool, field_name: str, value: object, expected: str) -> None:
    """Raise the ValueError that a user can act on: which field, which value, what would be right."""
    if not condition:
        raise ValueError(f"{field_name} is {value!r}, but {expected}")


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


@functools.cache
def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """The values that each closed-choice field of a dataclass may have."""
    hints = typing.get_type_hints(kind)
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}


def require_choices(owner: str, instance: object) -> None:
    """Each field typed as a Literal has one of its values."""
    kind: Any = type(instance)
    for name, allowed in _choices(kind).items():
        value = getattr(instance, name)
        require(value in allowed, f"{owner}.{name}", value, f"it must be one of {', '.join(allowed)}")
