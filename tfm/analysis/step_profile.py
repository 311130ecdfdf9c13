"""Which part of the model a training step's time goes to, from a profiler's trace and the compiled program's names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm.analysis.hlo import Instruction, Program, parse_program

PARTS = (("optimizer", r"^optimizer$"), ("output and loss", r"^loss$|token_head"),
         ("norms", r"norm$"), ("attention projections", r"^(query|key|value|output|project_memory)$"),
         ("attention", r"attention$"), ("feed-forward", r"^feed_forward$"), ("embeddings", r"embedding"))
"""(part, pattern of a scope's name); of the scopes around an operation the innermost that fits counts."""
CONTAINERS = ("while", "call", "conditional", "async-start", "async-done", "tuple")
"""Their time is that of the instructions within."""
OTHER = "other"

Times = dict[tuple[str, str], float]
"""(part, "forward", "backward" or "update") -> seconds."""


def step_profile(trace: Path, programs: Sequence[str], steps: int) -> Times:
    """Seconds of a step by part and direction, summed over the threads or streams that worked at the same time.

    Args:
        trace: an `.xplane.pb` file, as `jax.profiler.trace` writes it.
        programs: texts of the compiled programs that ran, as `compiled.as_text()` gives them.
        steps: steps in the trace.

    Returns:
        (part, direction) -> seconds a step.
    """
    names: dict[str, tuple[str, str] | None] = {}
    for text in programs:
        for name, place in instruction_places(parse_program(text)).items():
            names.setdefault(name, place)
    total: Counter[tuple[str, str]] = Counter()
    for name, seconds in _events(trace):
        place = names.get(name)
        if place is not None:
            total[place] = total[place] + seconds / steps  # type: ignore[assignment]
    return dict(total)


def instruction_places(program: Program) -> dict[str, tuple[str, str] | None]:
    """Name of each instruction -> (part, direction), or None for one that only holds others."""
    places: dict[str, tuple[str, str] | None] = {}
    for computation in program.computations.values():
        for name, instruction in computation.instructions.items():
            places[name] = None if instruction.opcode in CONTAINERS else place_of(_scope(program, instruction))
    return places


def place_of(scope: str) -> tuple[str, str]:
    """(part, direction) of an operation, from the path of named scopes around it.

    Example:
        >>> place_of("jit(step)/transpose(jvp(Encoder))/layers_0/feed_forward/up/dot_general")
        ('feed-forward', 'backward')
        >>> place_of("jit(step)/jvp(Encoder)/layers_0/self_attention/self_attention.attend/exp")
        ('attention', 'forward')
    """
    direction = "backward" if "transpose(" in scope else "forward"
    for name in reversed(re.sub(r"\w+\(|\)", "", scope).split("/")[:-1]):
        for part, pattern in PARTS:
            if re.search(pattern, name):
                return part, "update" if part == "optimizer" else direction
    return OTHER, direction


def profile_rows(times: Times) -> list[tuple[str, str]]:
    """A table: part -> milliseconds by direction and share, the dearest first.

    Example:
        >>> profile_rows({("norms", "forward"): 0.001, ("attention", "backward"): 0.003})
        [('attention', '3.0 ms (75.0 %): backward 3.0'), ('norms', '1.0 ms (25.0 %): forward 1.0')]
    """
    whole = sum(times.values())
    parts: dict[str, dict[str, float]] = {}
    for (part, direction), seconds in sorted(times.items()):
        parts.setdefault(part, {})[direction] = 1e3 * seconds
    rows = []
    for part, directions in sorted(parts.items(), key=lambda item: -sum(item[1].values())):
        total = sum(directions.values())
        split = ", ".join(f"{name} {directions[name]:.1f}" for name in ("forward", "backward", "update")
                          if name in directions)
        rows.append((part, f"{total:.1f} ms ({total / whole / 10:.1f} %): {split}"))
    return rows


def _scope(program: Program, instruction: Instruction) -> str:
    """The path of names around an instruction; of a fusion, the commonest one of what is fused."""
    scope = _op_name(instruction.text)
    called = re.search(r"\bcalls=%?([\w.-]+)", instruction.text)
    if called is None:
        return scope
    inner: Mapping[str, Any] = program.computations[called[1]].instructions
    products = [_op_name(i.text) for i in inner.values() if i.opcode in ("dot", "convolution")]
    scopes = Counter(products or [name for name in (scope, *(_op_name(i.text) for i in inner.values()))
                                  if place_of(name)[0] != OTHER])
    return scopes.most_common(1)[0][0] if scopes else scope


def _op_name(text: str) -> str:
    found = re.search(r'op_name="([^"]*)"', text)
    return found[1] if found else ""


def _events(trace: Path) -> Iterator[tuple[str, float]]:
    """(instruction, seconds) of every run of an instruction on any thread or stream."""
    from jax.profiler import ProfileData

    for plane in ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None:
                    yield str(name), event.duration_ns / 1e9
