"""What a training step needs on each device of a mesh, and how long it takes at best: read from a compiled program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from tfm.analysis.costs import training_flops
from tfm.analysis.devices import Device
from tfm.analysis.hlo import Collective, parse_program
from tfm.config import Config


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    optimizer: int
    """Optimizer state, and the moving average of the parameters where there is one."""
    batch: int
    temporaries: int
    """Gradients, activations kept for the backward pass, and scratch space."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.optimizer + self.batch + self.temporaries


@dataclass(frozen=True)
class Plan:
    """One training step on a mesh, at best.

    Attributes:
        mesh: axis -> size.
        device: the accelerator.
        rows: sequences of a step, over all devices.
        length: tokens of each (of each side of a text pair).
        flops: of a step over all devices, by `training_flops`, recomputation (remat) included.
        model_flops: the same without recomputation.
        memory: of one device.
        collectives: every communication of one device.
        traffic: bytes that one device reads from and writes to its memory.
        half: whether products run in 16 bits.
    """

    mesh: Mapping[str, int]
    device: Device
    rows: int
    length: int
    flops: int
    model_flops: int
    memory: Memory
    collectives: tuple[Collective, ...]
    traffic: float
    half: bool

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, with 8 % left for the runtime and fragmentation."""
        return self.memory.total <= 0.92 * self.device.memory

    @property
    def peak(self) -> float:
        """FLOPs that a device can do in a second."""
        return self.device.half_flops if self.half else self.device.single_flops

    @property
    def compute_seconds(self) -> float:
        """Time of the products at the peak rate."""
        return self.flops / self.devices / self.peak

    @property
    def memory_seconds(self) -> float:
        """Time of the memory traffic at the peak rate."""
        return self.traffic / self.device.memory_rate

    @property
    def network_seconds(self) -> float:
        """Time of the communication at the peak rates; a group that leaves its node goes at the slow one."""
        return sum(c.sent / (self.device.near_rate if c.span <= self.device.node else self.device.far_rate)
                   for c in self.collectives)

    @property
    def seconds(self) -> float:
        """Time of a step if compute, memory and network overlap wholly: a lower bound."""
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

    @property
    def serial_seconds(self) -> float:
        """Time of a step if nothing overlaps."""
        return self.compute_seconds + self.memory_seconds + self.network_seconds

    def sent_by_kind(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by kind of collective."""
        sums: dict[str, float] = {}
        for collective in self.collectives:
            sums[collective.kind] = sums.get(collective.kind, 0.0) + collective.sent
        return sums

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilisation at so many seconds a step (Chowdhery et al., 2022, appendix B)."""
        return self.model_flops / self.devices / self.peak / seconds

    def advice(self) -> list[str]:
        """What to change where the step does not fit, the cheapest first."""
        if self.fits:
            return []
        memory, advice = self.memory, []
        if memory.temporaries > memory.parameters + memory.optimizer:
            advice += ["--optimizer.accumulate higher: smaller micro-batches need fewer activations",
                       "--model.remat full: keep no activations inside layers",
                       "more devices on data or fsdp: fewer rows on each"]
        advice.append("more devices on fsdp: parameters, gradients and optimizer state are split over it")
        advice.append("more devices on tensor, within a node: parameters and activations are split over it")
        if not self.half:
            advice.append("--model.dtype bfloat16: activations of half the size")
        return advice


def make_plan(config: Config, mesh: Mapping[str, int], device: Device, state: Any, batch: Any, compiled: Any) -> Plan:
    """Read a plan out of a compiled training step.

    Args:
        config: of the experiment.
        mesh: axis -> size, of the mesh that is planned.
        device: the accelerator.
        state: abstract train state with shardings: its fields are `params`, `opt_state`, `ema`.
        batch: name -> abstract array with sharding.
        compiled: the step compiled for that mesh.
    """
    program = parse_program(compiled.as_text())
    stats = compiled.memory_analysis()
    memory = Memory(shard_bytes(state.params), shard_bytes((state.opt_state, state.ema)), shard_bytes(dict(batch)),
                    stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)
    rows, length = next(iter(batch.values())).shape
    flops, model_flops = (sum(training_flops(model, rows, length).values())
                          for model in (config.model, replace(config.model, remat="none")))
    return Plan(dict(mesh), device, rows, length, flops, model_flops, memory, tuple(program.collectives()),
                program.traffic(), config.model.dtype != "float32")


def shard_bytes(tree: Any) -> int:
    """Bytes that one device holds of abstract arrays with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled_mesh(mesh: Mapping[str, int], most: int) -> dict[str, int]:
    """The mesh to compile for: the same, with fewer copies on `data` where it has more than `most` devices.

    The program of one device is the same for any number of copies, as long as each has the same rows.

    Raises:
        ValueError: the other axes alone have more than `most` devices.

    Example:
        >>> compiled_mesh({"data": 64, "fsdp": 16, "tensor": 4, "sequence": 1}, 2048)
        {'data': 32, 'fsdp': 16, 'tensor': 4, 'sequence': 1}
    """
    rest = math.prod(size for name, size in mesh.items() if name != "data")
    if rest > most:
        raise ValueError(f"the axes beside data have {rest} devices, but at most {most} can be planned on one machine")
    return {name: min(size, most // rest) if name == "data" else size for name, size in mesh.items()}
