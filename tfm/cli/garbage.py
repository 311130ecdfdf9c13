"""Python's search for cyclic garbage, put off while a command starts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Do not search for cyclic garbage meanwhile.

    Imports and the tracing of a program make a great many objects that stay. To look through all of them again and
    again takes a fifth of that time.

    Example:
        >>> with no_collection():
        ...     gc.isenabled()
        False
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
