"""What a compiled program moves, read from its text: bytes of each kind of collective, and of memory traffic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2,
          "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota",
        "partition-id", "replica-id", "after-all", "all-reduce-done", "all-gather-done", "collective-permute-done"}
"""Instructions that move nothing themselves."""

BRANCHES = "to_apply|calls|true_computation|false_computation|branch_computations"

MOVES = {"copy", "bitcast", "transpose", "reshape"}
"""Instructions that change no value."""

_NARROW = re.compile(r" = (?:bf16|f16)\[")
_KERNEL = re.compile(r'op_name="[^"]*attend/[^"]*while/(?:body|cond)')
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")


@dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    opcode: str
    size: float
    """Bytes of the result."""
    operands: tuple[str, ...]
    text: str


@dataclass
class Computation:
    """A named list of instructions, the last marked root being its result."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @cached_property
    def is_kernel(self) -> bool:
        """Whether this is the body of a loop of attention."""
        named = [x.text for x in self.instructions.values() if "op_name=" in x.text]
        return 2 * sum(1 for text in named if _KERNEL.search(text)) > len(named)


@dataclass(frozen=True)
class Collective:
    """One communication: how often it runs, and what it moves each time."""

    kind: str
    size: float
    """Bytes of the result on one device."""
    group: int
    """Devices that take part together."""
    span: int
    """Distance between the first and the last of them, in the order of the mesh, and 1."""
    count: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends over all runs, if the devices of a group form a ring.

        all-reduce: 2 (g - 1) / g of the result; all-gather and all-to-all: (g - 1) / g; reduce-scatter: (g - 1) times
        the result, which is one part of g; collective-permute: the result.
        """
        others = self.group - 1
        share = {"all-reduce": 2 * others / self.group, "all-gather": others / self.group,
                 "all-to-all": others / self.group, "reduce-scatter": float(others), "collective-permute": 1.0}
        return share[self.kind] * self.size * self.count


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        computations: name -> computation.
        runs: name -> how often a computation that is no part of a fusion runs. A loop of unknown length counts once.
    """

    computations: Mapping[str, Computation]
    runs: Mapping[str, int]

    def collectives(self) -> list[Collective]:
        """Every communication between devices, as an accelerator has it; that of a device with itself is left out.

        The CPU's compiler sends in 32 bits what the program has in 16, and all of a sum of which each device then takes
        its part: these count in 16 bits, and as a reduce-scatter.
        """
        found = []
        for name, instruction in self._executed():
            kind, group = instruction.opcode.removesuffix("-start"), _first_group(instruction.text)
            if kind not in COLLECTIVES or len(group) < 2:
                continue
            where = self.computations[name]
            size = instruction.size / (2 if instruction.opcode.endswith("-start") else 1)
            size *= self._narrowing(where, instruction)
            taken = self._taken_in_parts(where, instruction) if kind == "all-reduce" else 0.0
            for form, share in (("reduce-scatter", taken / len(group)), (kind, 1.0 - taken)):
                if share:
                    span = max(group) - min(group) + 1
                    found.append(Collective(form, size * share, len(group), span, self.runs[name]))
        return found

    def traffic(self) -> float:
        """Bytes that instructions read from and write to memory, if each fusion reads and writes once.

        The loops inside attention are left out: on an accelerator their blocks do not leave the chip.
        """
        return sum(self.runs[name] * self._moved(self.computations[name], instruction)
                   for name, instruction in self._executed()
                   if instruction.opcode not in FREE and not self.computations[name].is_kernel)

    def _narrowing(self, where: Computation, collective: Instruction) -> float:
        """Share of the bytes that are left where values that were 16 bits wide until just before are sent so."""
        sizes = [(where.instructions[name].size, self._was_narrow(where, name)) for name in collective.operands
                 if name in where.instructions]
        whole = sum(size for size, _ in sizes)
        return sum(size / 2 if narrow else size for size, narrow in sizes) / whole if whole else 1.0

    def _was_narrow(self, where: Computation, name: str) -> bool:
        instruction = self._source(where, name)
        if instruction is not None and instruction.opcode == "fusion":
            inner = self.computations[_called(instruction.text, "calls")[0]]
            return self._was_narrow(inner, inner.root)
        if instruction is None or instruction.opcode != "convert" or _NARROW.search(instruction.text):
            return False
        before = where.instructions.get(instruction.operands[0])
        return before is not None and _NARROW.search(before.text) is not None

    def _source(self, where: Computation, name: str, through: frozenset[str] = frozenset(MOVES)) -> Instruction | None:
        """The instruction that made a value, before it was only moved."""
        instruction = where.instructions.get(name)
        while instruction is not None and instruction.opcode in through:
            instruction = where.instructions.get(instruction.operands[0])
        return instruction

    def _taken_in_parts(self, where: Computation, reduced: Instruction) -> float:
        """Share of the bytes of a sum of which each device uses a slice alone."""
        elements = [user for user in _users(where, reduced.name) if user.opcode == "get-tuple-element"]
        parts = elements or [reduced]
        taken = sum(part.size for part in parts if self._is_only_sliced(where, part.name))
        return taken / sum(part.size for part in parts)

    def _is_only_sliced(self, where: Computation, name: str) -> bool:
        users = _users(where, name)
        return bool(users) and all(self._slices(where, user, name) for user in users)

    def _slices(self, where: Computation, user: Instruction, name: str) -> bool:
        if user.opcode in MOVES:
            return self._is_only_sliced(where, user.name)
        if user.opcode == "fusion":
            inner = self.computations[_called(user.text, "calls")[0]]
            number = f" parameter({user.operands.index(name)})"
            return any(number in x.text and self._is_only_sliced(inner, x.name) for x in inner.instructions.values())
        return user.opcode == "dynamic-slice" and user.operands[0] == name

    def _executed(self) -> Iterator[tuple[str, Instruction]]:
        for name in self.runs:
            for instruction in self.computations[name].instructions.values():
                yield name, instruction

    def _moved(self, where: Computation, instruction: Instruction) -> float:
        sizes = [where.instructions[name].size if name in where.instructions else 0.0 for name in instruction.operands]
        if instruction.opcode == "dynamic-slice":
            return 2 * instruction.size
        if instruction.opcode == "dynamic-update-slice":
            return 2 * sizes[1]
        if instruction.opcode == "fusion":
            return self._fusion_moved(instruction, sizes)
        return instruction.size + sum(sizes)

    def _fusion_moved(self, instruction: Instruction, sizes: list[float]) -> float:
        """A fusion reads of an operand only the slices that it takes, and writes only the slice that it updates."""
        called = _called(instruction.text, "calls")
        inner = self.computations[called[0]]
        total, moved = instruction.size, frozenset({*MOVES, "convert"})
        update, in_place = self._source(inner, inner.root, moved), None
        if update is not None and update.opcode == "dynamic-update-slice":
            total *= inner.instructions[update.operands[1]].size / update.size
            whole = self._source(inner, update.operands[0], moved)
            in_place = None if whole is None else whole.name
        for name, parameter in inner.instructions.items():
            if parameter.opcode != "parameter" or name == in_place:
                continue
            users = [user for user in inner.instructions.values() if name in user.operands]
            if users and all(user.opcode in ("dynamic-slice", "gather") for user in users):
                total += sum(user.size for user in users)
            else:
                total += parameter.size
        return total


def parse_program(text: str) -> Program:
    """Read the text of a compiled program, as `compiled.as_text()` gives it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> text = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text()
        >>> parse_program(text).collectives()
        []
    """
    computations: dict[str, Computation] = {}
    entry, current = "", Computation()
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], Computation())
            entry = header[2] if header[1] else entry
            continue
        found = _INSTRUCTION.match(line)
        if found:
            operands = tuple(re.findall(r"%([\w.-]+)", _arguments(found[5])))
            current.instructions[found[2]] = Instruction(found[2], found[4], _size(found[3]), operands, line)
            current.root = found[2] if found[1] else current.root
    runs: dict[str, int] = {}
    _count_runs(computations, entry, 1, runs)
    return Program(computations, runs)


def _count_runs(computations: Mapping[str, Computation], name: str, times: int, runs: dict[str, int]) -> None:
    runs[name] = runs.get(name, 0) + times
    for instruction in computations[name].instructions.values():
        if instruction.opcode == "while":
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.text)
            for called in _called(instruction.text, "body|condition"):
                _count_runs(computations, called, times * (int(turns[1]) if turns else 1), runs)
        elif instruction.opcode in ("call", "conditional", "async-start"):
            for called in _called(instruction.text, BRANCHES):
                _count_runs(computations, called, times, runs)


def _users(where: Computation, name: str) -> list[Instruction]:
    return [user for user in where.instructions.values() if name in user.operands]


def _called(text: str, names: str) -> list[str]:
    found = re.findall(rf"\b(?:{names})=(?:\{{([^}}]*)\}}|(%?[\w.-]+))", text)
    return [name.strip().lstrip("%") for several, one in found for name in (several or one).split(",")]


def _arguments(rest: str) -> str:
    """What stands before the parenthesis that closes an instruction's operands."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:i]
    return rest


def _size(shape: str) -> float:
    """Bytes of a shape such as f32[8,128]{1,0} or a tuple of shapes."""
    return sum(WIDTHS.get(kind, 0) * math.prod(int(n) for n in dims.split(",") if n)
               for kind, dims in _SHAPE.findall(shape))


def _first_group(text: str) -> list[int]:
    """Numbers of the devices of one group, from any of the ways in which groups are written."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", text)
    if listed:
        return [int(number) for number in listed[1].split(",")]
    grid = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if grid:
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in grid.groups())
        numbers = np.arange(math.prod(dims or ())).reshape(dims)
        return numbers.transpose(order).reshape(shape)[0].tolist()
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text)
    if named:
        axes = re.findall(r"'([^']+)'=(\d+)", named[1])
        chosen = re.findall(r"'([^']+)'", named[2])
        numbers = np.arange(math.prod(int(size) for _, size in axes)).reshape([int(size) for _, size in axes])
        return numbers[tuple(slice(None) if name in chosen else 0 for name, _ in axes)].ravel().tolist()
    return [0]
