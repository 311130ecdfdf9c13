"""The device mesh: named axes over which batches, parameters and long sequences are spread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor", "sequence")
"""data: copies of the model; fsdp: parameters split, too; tensor: heads and inner widths; sequence: positions."""

RESERVED = {"expert": "expert", "stage": "pipeline"}
"""Axes that no rule uses yet: experts would be split by a rule of `tfm.parallel.rules`, stages by the stacks."""


def parse_mesh(spec: str) -> dict[str, int]:
    """Sizes of the axes named in a specification such as `data=2,fsdp=4`.

    Args:
        spec: comma-separated `axis=size`; one size may be -1: all devices that are left. Empty: `data=-1`.

    Returns:
        axis -> size, for every axis of `AXES`; those not named have size 1.

    Raises:
        ValueError: an unknown or repeated axis, a size that is not a whole number above 0 or -1, two sizes of -1.

    Example:
        >>> parse_mesh("data=2,fsdp=4")
        {'data': 2, 'fsdp': 4, 'tensor': 1, 'sequence': 1}
    """
    sizes: dict[str, int] = {}
    for part in (spec or "data=-1").split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name in RESERVED:
            raise ValueError(f"mesh axis {name} is reserved: {RESERVED[name]} parallelism is not there yet")
        if name not in AXES:
            raise ValueError(f"mesh has no axis {name!r}: choose from {', '.join(AXES)}, as in data=2,fsdp=4")
        if name in sizes:
            raise ValueError(f"mesh names the axis {name} twice: {spec}")
        if not (number == "-1" or (number.isdecimal() and int(number) > 0)):
            raise ValueError(f"mesh axis {name} has the size {number!r}: it must be above 0, or -1 for the rest")
        sizes[name] = int(number)
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh {spec} has -1 twice: only one axis can take the devices that are left")
    return {name: sizes.get(name, 1) for name in AXES}


def make_mesh(spec: str | Mapping[str, int] = "", devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a specification over the given devices, all of which must be used.

    Args:
        spec: as for `parse_mesh`, or its result.
        devices: None: every device of every process.

    Returns:
        Mesh with the axes `AXES`.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.

    Example:
        >>> dict(make_mesh("data=1", jax.devices()[:1]).shape)
        {'data': 1, 'fsdp': 1, 'tensor': 1, 'sequence': 1}
    """
    sizes = {name: 1 for name in AXES} | dict(parse_mesh(spec) if isinstance(spec, str) else spec)
    devices = list(jax.devices()) if devices is None else list(devices)
    named = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and len(devices) % named == 0:
        sizes = {name: len(devices) // named if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        text = ",".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
        raise ValueError(f"mesh {text or 'data=1'} does not fit {len(devices)} devices: sizes must multiply to that")
    shape = tuple(sizes[name] for name in AXES)
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Make a mesh the current one, which `constrain` reads; None: none."""
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield
