"""What a run cost: the table at its end, and the profile of a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from tfm.analysis.costs import training_flops
from tfm.analysis.devices import peak_flops
from tfm.analysis.step_profile import profile_rows, step_profile
from tfm.config import Config
from tfm.parallel.processes import batch_part
from tfm.training.loop import Run
from tfm.training.meter import Meter
from tfm.training.trace import Trace


def summary_rows(run: Run) -> list[tuple[str, str]]:
    """(name, value) rows: time of a step, waiting for input, padding, and the share of the devices' peak."""
    meter, (_, parts) = run.meter, batch_part(run.mesh)
    if not meter.steps:
        return []
    rate = model_flops(run.config, meter) * parts / meter.seconds
    devices = run.mesh.devices.flatten()
    peak, source = peak_flops(devices[0], run.config.model.dtype)
    if devices[0].platform != "cpu":
        peak *= devices.size  # host devices share the cores
    return [("time of a step", f"{1e3 * meter.seconds / meter.steps:,.0f} ms, mean of {meter.steps:,}"),
            ("speed", f"{meter.tokens / meter.seconds:,.0f} tokens/s, padding not counted"),
            ("padding", f"{1 - meter.tokens / (meter.positions * parts):.1%} of the positions"),
            ("waiting for input", f"{meter.waited / meter.seconds:.1%} of the time"),
            ("model FLOPs", f"{rate / 1e9:,.0f} GFLOP/s, MFU {rate / peak:.0%} of {peak / 1e9:,.0f} ({source})")]


def model_flops(config: Config, meter: Meter) -> int:
    """FLOPs of forward and backward passes over all steps, padding included, recomputation not."""
    model, total = replace(config.model, remat="none"), 0
    for shape, steps in meter.shapes.items():
        target = shape[2] if len(shape) == 3 else None
        total += steps * sum(training_flops(model, shape[0], shape[1], target_length=target).values())
    return total


def trace_rows(trace: Trace, programs: Sequence[jax.stages.Compiled]) -> list[tuple[str, str]]:
    """(part of the model, time) rows of a traced step; empty where the run ended before the trace did."""
    files = trace.files()
    if not files:
        return []
    return profile_rows(step_profile(files[-1], [program.as_text() or "" for program in programs], trace.steps))
