"""What accelerators can do, from their makers' data sheets, for estimates.

NVIDIA: the data sheets of Tesla P100 and V100, A100, H100 and H200; where a sheet has numbers with sparsity, half of
them, and of NVLink's bandwidth in both directions half. Between nodes: the network cards of the DGX systems, shared by
eight. Google: the pages "TPU v5e", "TPU v5p" and "TPU v6e" of the Cloud TPU documentation; half of the bidirectional
bandwidth between chips, and a chip's share of its pod's data centre network.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tfm.config import require


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are peaks without sparsity, in a second; network rates are for one direction."""

    name: str
    half_flops: float
    """FLOPs in bfloat16 (V100, P100: float16)."""
    single_flops: float
    """FLOPs of float32 arrays at JAX's default precision: TF32 where there is one, bfloat16 passes on TPUs."""
    memory: float
    """Bytes."""
    memory_rate: float
    """Bytes."""
    near_rate: float
    """Bytes sent to devices of the same node or pod."""
    far_rate: float
    """Bytes sent to other nodes or pods."""
    node: int
    """Devices of a node or pod."""
    sustained: float | None = None
    """FLOPs that Vaswani et al. (2017) reckon with (section 5.2 and the footnote of Table 2)."""


DEVICES = {
    "p100": Device("NVIDIA P100 SXM2 16 GB", 21.2e12, 10.6e12, 16e9, 732e9, 80e9, 12.5e9, 8, sustained=9.5e12),
    "v100": Device("NVIDIA V100 SXM2 32 GB", 125e12, 15.7e12, 32e9, 900e9, 150e9, 12.5e9, 8),
    "a100": Device("NVIDIA A100 SXM 80 GB", 312e12, 156e12, 80e9, 2.039e12, 300e9, 25e9, 8),
    "h100": Device("NVIDIA H100 SXM", 989e12, 494e12, 80e9, 3.35e12, 450e9, 50e9, 8),
    "h200": Device("NVIDIA H200 SXM", 989e12, 494e12, 141e9, 4.8e12, 450e9, 50e9, 8),
    "v5e": Device("Google TPU v5e", 197e12, 197e12, 16e9, 819e9, 200e9, 3.125e9, 256),
    "v5p": Device("Google TPU v5p", 459e12, 459e12, 95e9, 2.765e12, 600e9, 6.25e9, 8960),
    "v6e": Device("Google TPU v6e", 918e12, 918e12, 32e9, 1.64e12, 400e9, 12.5e9, 256),
}
"""Name on the command line -> device."""


def find_device(name: str) -> Device:
    """The device of a name.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> find_device("h100").memory
        80000000000.0
    """
    require(name in DEVICES, "--device", name, f"it must be one of {', '.join(DEVICES)}")
    return DEVICES[name]


KINDS = {"P100": "p100", "V100": "v100", "A100": "a100", "H100": "h100", "H200": "h200", "TPU v5 lite": "v5e",
         "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v6": "v6e"}
"""Part of the name that JAX gives to a device -> name of its data sheet here; the first that fits."""


def peak_flops(device: Any, dtype: str) -> tuple[float, str]:
    """FLOPs a second of matrix products on a device of this process, and where the number is from.

    Args:
        device: one of `jax.devices()`.
        dtype: float32 or bfloat16.

    Returns:
        the rate, and "data sheet", or "measured" for a device without one.
    """
    for part, name in KINDS.items():
        if part in device.device_kind:
            sheet = DEVICES[name]
            return (sheet.single_flops if dtype == "float32" else sheet.half_flops), "data sheet"
    return _measured_flops(device, dtype), "measured"


def _measured_flops(device: Any, dtype: str, *, size: int = 2048, runs: int = 7) -> float:
    """FLOPs a second of a product of two square matrices, the fastest of a few runs."""
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def sustained_flops(seconds: float, devices: int, rate: float) -> float:
    """FLOPs of a training run as Vaswani et al. (2017) count them: time x devices x sustained FLOPs of one.

    Example:
        >>> base = sustained_flops(12 * 3600, 8, DEVICES["p100"].sustained)
        >>> big = sustained_flops(3.5 * 86400, 8, DEVICES["p100"].sustained)
        >>> f"{base:.1e} {big:.1e}"
        '3.3e+18 2.3e+19'

    Reference: Vaswani et al. (2017), Table 2 and its footnote.
    """
    return seconds * devices * rate
