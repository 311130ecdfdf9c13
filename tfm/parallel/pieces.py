"""Make the many arrays of a new state by small programs, one for all arrays that are made alike.

As one program, the initial state of the paper's base model takes XLA four seconds to compile, since every parameter has
a copy of the code that draws random numbers. But for their keys, most of these copies are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import Sharding

Known = dict[Any, Any]
"""The values of a program's variables, as far as they are known."""


def make_in_pieces(program: ClosedJaxpr, shardings: Sequence[Sharding], *arguments: jax.Array) -> list[jax.Array]:
    """Run a program piece by piece. A piece makes one result, from random keys, arguments and earlier results.

    Pieces with the same operations and sharding are one compiled program. The keys are found first, operation by
    operation; each result is made where it belongs, so that no array is ever made unsharded.

    Args:
        program: as `jax.make_jaxpr` gives it.
        shardings: of the results.
        *arguments: of the program.

    Returns:
        The program's results, bit for bit.

    Example:
        >>> draw = lambda: [jax.random.normal(key, (2, 3)) for key in jax.random.split(jax.random.key(0), 4)]
        >>> made = make_in_pieces(jax.make_jaxpr(draw)(), [jax.sharding.SingleDeviceSharding(jax.devices()[0])] * 4)
        >>> bool((made[3] == draw()[3]).all())
        True
    """
    jaxpr = program.jaxpr
    known: Known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arguments], strict=True))
    maker = _makers(jaxpr)
    pieces = _pieces(jaxpr, maker)
    _find_keys(jaxpr, maker, pieces, known)
    programs: dict[Hashable, Callable[..., jax.Array]] = {}
    results = []
    for piece, sharding in zip(pieces, shardings, strict=True):
        inputs = [_data(known[variable]) for variable in piece.inputs]
        alike = piece.operations(), sharding
        if alike not in programs:
            programs[alike] = jax.jit(piece.function(jaxpr, known), out_shardings=sharding)
        results.append(programs[alike](*inputs))
        if not isinstance(piece.result, Literal):
            known[piece.result] = results[-1]
    return results


@dataclass(frozen=True)
class _Piece:
    """The equations that make one variable of others."""

    result: Any
    inputs: list[Any]
    equations: list[Any]

    def operations(self) -> Hashable:
        """What is computed, whatever the variables are called."""
        numbers = {variable: number for number, variable in enumerate(self.inputs)}

        def number_of(atom: Any) -> Hashable:
            value = np.asarray(atom.val).tobytes() if isinstance(atom, Literal) else numbers[atom]
            return value, atom.aval

        computed = []
        for equation in self.equations:
            read = tuple(map(number_of, equation.invars))
            parameters = tuple((name, _comparable(value)) for name, value in equation.params.items())
            computed.append((equation.primitive, parameters, read))
            numbers |= {variable: len(numbers) + i for i, variable in enumerate(equation.outvars)}
        return tuple(computed), number_of(self.result)

    def function(self, jaxpr: Jaxpr, known: Mapping[Any, Any]) -> Callable[..., jax.Array]:
        """(what `_data` gives for each input) -> result."""
        implementations = [jax.random.key_impl(known[v]) if _is_key(v) else None for v in self.inputs]
        run = jaxpr_as_fun(_closed(jaxpr, self.inputs, [self.result], self.equations))

        def make(*data: Any) -> jax.Array:
            values = [x if name is None else jax.random.wrap_key_data(x, impl=name)
                      for x, name in zip(data, implementations, strict=True)]
            return run(*values)[0]

        return make


def _pieces(jaxpr: Jaxpr, maker: Mapping[Any, int]) -> list[_Piece]:
    """A piece for each result; it begins at keys, at the program's arguments and at results before it."""
    pieces, earlier = [], set[Any]()
    for result in jaxpr.outvars:
        inputs, equations = _needed_for([result], jaxpr, maker, lambda v: _is_key(v) or v in earlier)
        pieces.append(_Piece(result, inputs, equations))
        if not isinstance(result, Literal):
            earlier.add(result)
    return pieces


def _find_keys(jaxpr: Jaxpr, maker: Mapping[Any, int], pieces: Sequence[_Piece], known: Known) -> None:
    """Add the random keys that pieces begin with to what is known."""
    keys = list(dict.fromkeys(v for piece in pieces for v in piece.inputs if v not in known and _is_key(v)))
    inputs, equations = _needed_for(keys, jaxpr, maker, known.__contains__)
    run = jaxpr_as_fun(_closed(jaxpr, inputs, keys, equations))
    known.update(zip(keys, run(*(known[variable] for variable in inputs)), strict=True))


def _needed_for(results: Sequence[Any], jaxpr: Jaxpr, maker: Mapping[Any, int],
                is_given: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """Of the variables that are given, those that results are made of; and the equations that make them."""
    inputs: dict[Any, None] = {}
    needed: set[int] = set()
    open_variables = list(reversed(results))
    while open_variables:
        variable = open_variables.pop()
        if isinstance(variable, Literal):
            continue
        if variable not in maker or is_given(variable):
            inputs[variable] = None
        elif maker[variable] not in needed:
            needed.add(maker[variable])
            open_variables += reversed(jaxpr.eqns[maker[variable]].invars)
    return list(inputs), [jaxpr.eqns[i] for i in sorted(needed)]


def _makers(jaxpr: Jaxpr) -> dict[Any, int]:
    """Variable -> number of the equation that makes it."""
    return {variable: i for i, equation in enumerate(jaxpr.eqns) for variable in equation.outvars}


def _closed(jaxpr: Jaxpr, inputs: Sequence[Any], results: Sequence[Any], equations: Sequence[Any]) -> ClosedJaxpr:
    part: Any = jaxpr
    return ClosedJaxpr(part.replace(constvars=[], invars=list(inputs), outvars=list(results), eqns=list(equations)), [])


def _comparable(parameter: Any) -> Hashable:
    """A parameter of an operation; one that has no hash is like itself alone."""
    try:
        hash(parameter)
    except TypeError:
        return id(parameter)
    return parameter


def _is_key(variable: Any) -> bool:
    return jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.prng_key)


def _data(value: Any) -> Any:
    """A random key as numbers of this process, which every process has; anything else as it is."""
    return np.asarray(jax.random.key_data(value)) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else value
