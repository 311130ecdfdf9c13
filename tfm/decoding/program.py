"""How programs are compiled, those of a decoding above all."""

from collections.abc import Callable
from typing import Any

import jax

WIDE = {"xla_cpu_prefer_vector_width": 512}
"""Lets a CPU that has vectors of 512 bits use them; by default LLVM stops at 256. Exponentials and a product of one row
gain most."""


def compiler_options() -> dict[str, int] | None:
    """Options of the outermost `jax.jit` for the default backend; None: none.

    Example:
        >>> attend = jax.jit(jax.nn.softmax, compiler_options=compiler_options())
        >>> float(attend(jax.numpy.zeros(4)).sum())
        1.0
    """
    return WIDE if jax.default_backend() == "cpu" else None


class Program:
    """`jax.jit` for the outermost function of a decoding, with options for the device that it runs on.

    Args:
        function: as for `jax.jit`.
        options: those of `jax.jit`.

    Example:
        >>> double = Program(lambda x: 2 * x)
        >>> float(double(1.5)), double.compiled
        (3.0, 1)
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._plain: Any = jax.jit(function, **options)
        self._wide: Any = jax.jit(function, compiler_options=WIDE, **options)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return (self._wide if jax.default_backend() == "cpu" else self._plain)(*arguments, **named)

    @property
    def compiled(self) -> int:
        """How many programs were compiled so far, one for each shape of the arguments."""
        return self._plain._cache_size() + self._wide._cache_size()
