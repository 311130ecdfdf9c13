"""FLOPs of matrix products as a traced program has them: the check on closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def matmul_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """FLOPs of every matrix product in a function, loops of known length multiplied out.

    Unlike a compiler's analysis it counts the body of a scan as often as it runs, and nothing but products. Of a
    `cond` the dearest branch counts; a `while` loop without a known number of turns counts once.

    Args:
        function: of arrays.
        *arguments: arrays, or `jax.ShapeDtypeStruct`s: nothing is run or allocated.

    Returns:
        2 for each multiply-add.

    Example:
        >>> x, y = jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4, 5), "float32")
        >>> matmul_flops(lambda x, y: x @ y, x, y)
        120
    """
    return _flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def _flops(jaxpr: core.Jaxpr) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    inner = [_flops(jaxpr) for jaxpr in _inner_jaxprs(equation.params)]
    if equation.primitive.name == "cond":
        return max(inner)
    return sum(inner) * (equation.params["length"] if equation.primitive.name == "scan" else 1)


def _inner_jaxprs(value: Any) -> Iterator[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _inner_jaxprs(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner_jaxprs(item)
