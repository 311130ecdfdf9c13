"""`tfm plan CONFIG --mesh ... --device ...`: memory, time and cost of training before anything is bought or run."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from tfm.analysis.devices import find_device, sustained_flops
from tfm.analysis.plan import Plan, compiled_mesh, make_plan
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import Config, require
from tfm.models import build, init_params
from tfm.models.adapters import trainable
from tfm.parallel.mesh import make_mesh, parse_mesh, use_mesh
from tfm.parallel.rules import batch_sharding, batch_shards, state_shardings
from tfm.training.loss import make_loss
from tfm.training.optimizer import make_optimizer, make_schedule
from tfm.training.run_folder import resolve_config
from tfm.training.step import init_state, make_train_step

MOST_DEVICES = 1024
"""Devices that one host process can stand for."""


@dataclass(frozen=True)
class PlanOptions:
    """Compile the training step for a mesh on this machine, and say what each device needs. Allocates nothing."""

    config_file: tyro.conf.Positional[Path]
    """Python file whose get_config() gives the config."""
    config: Annotated[Config, tyro.conf.arg(name="")]
    """The config of the file, with the options below put in."""
    mesh: str = "data=1"
    """Devices by axis, such as data=64,fsdp=16,tensor=4."""
    device: str = "h100"
    """p100, v100, a100, h100, h200, v5e, v5p or v6e."""
    length: int | None = None
    """Tokens of a row, of each side. Default: data.max_length."""
    tokens: float | None = None
    """Target tokens to train on. Default: those of train.steps."""
    price: float = 2.0
    """Price of one device for one hour."""
    hours: float | None = None
    """A known training time: also count FLOPs as the paper does, time x devices x sustained rate."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: show_plan(parse(PlanOptions, arguments, prog="tfm plan")))


def show_plan(options: PlanOptions) -> int:
    """Compile, and print the plan; give the exit code."""
    device, mesh = find_device(options.device), parse_mesh(options.mesh)
    require(-1 not in mesh.values(), "--mesh", options.mesh, "a plan needs every size: there are no devices to fill up")
    for name in ("length", "tokens", "price", "hours"):
        value = getattr(options, name)
        require(value is None or value > 0, f"--{name}", value, "it must be above 0")
    started = time.perf_counter()
    config = planned_config(options.config)
    rows, length = step_shape(config, mesh, options.length)
    small = compiled_mesh(mesh, MOST_DEVICES)
    use_host_devices(math.prod(small.values()))
    state, batch, compiled = compile_step(config, small, rows * small["data"] // mesh["data"], length)
    plan = make_plan(config, small, device, state, batch, compiled)
    flops, model_flops = (n * mesh["data"] // small["data"] for n in (plan.flops, plan.model_flops))
    plan = dataclasses.replace(plan, mesh=mesh, rows=rows, flops=flops, model_flops=model_flops)
    console = Console(highlight=False)
    for table in (_memory(plan), _time(plan), _bill(plan, options)):
        console.print(table)
    if plan.mesh != small:
        console.print(f"compiled for data={small['data']}: a device's program is the same for more copies")
    for line in plan.advice():
        console.print(f"to make it fit: {line}")
    console.print(f"compiled in {time.perf_counter() - started:.0f} s by the CPU's compiler: in bfloat16 "
                  "its temporaries and memory traffic are up to twice an accelerator's", soft_wrap=True)
    return 0


def planned_config(config: Config) -> Config:
    """The config as a run resolves it, but for the size of a trained vocabulary, and the classes where it names none.

    Example:
        >>> from tfm.config import DataConfig, ModelConfig
        >>> encoder = ModelConfig(vocab_size=9, encoder_layers=1, decoder_layers=0, token_head=True)
        >>> planned = planned_config(Config(encoder, DataConfig(task="classify"))).model
        >>> planned.num_classes, planned.token_head
        (2, False)
    """
    classes = max(config.model.num_classes, 2)
    return resolve_config(config, config.model.vocab_size, config.data.labels or [*map(str, range(classes))])


def step_shape(config: Config, mesh: dict[str, int], length: int | None = None) -> tuple[int, int]:
    """Rows of a step over all devices, and tokens of a row.

    Example:
        >>> from tfm.config import DataConfig, ModelConfig
        >>> config = Config(ModelConfig(vocab_size=9), DataConfig(max_length=100, tokens_per_batch=1000))
        >>> step_shape(config, {"data": 4, "fsdp": 1})
        (12, 100)
    """
    length = length or config.data.max_length
    shards = mesh["data"] * mesh["fsdp"] * config.optimizer.accumulate
    return -(-max(config.data.tokens_per_batch // length, 1) // shards) * shards, length


def use_host_devices(count: int) -> None:
    """Let this process's CPU stand for `count` devices; must come before JAX's first computation.

    Raises:
        ValueError: JAX has started with fewer.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        require(len(jax.devices()) >= count, "the number of devices", len(jax.devices()),
                f"the mesh needs {count}, and JAX has started already")


def compile_step(config: Config, mesh: dict[str, int], rows: int, length: int) -> tuple[Any, dict[str, Any], Any]:
    """The training step compiled for a mesh of this process's devices, from shapes alone.

    Args:
        config: of the experiment.
        mesh: axis -> size.
        rows: sequences of a step, over all devices.
        length: tokens of each.

    Returns:
        (abstract state, abstract batch, compiled program).
    """
    devices = make_mesh(mesh, jax.devices()[: math.prod(mesh.values())])
    require(rows % batch_shards(devices) == 0, "rows", rows, f"they are split over {batch_shards(devices)} devices")
    model = build(config.model)
    optimizer = make_optimizer(config.optimizer, make_schedule(config))
    shapes = jax.eval_shape(lambda: init_state(lambda key: init_params(config.model, key), optimizer,
                                               config.train.seed, ema=config.optimizer.ema_decay is not None,
                                               trainable=trainable(config.model)))
    shardings = state_shardings(shapes, devices)
    state = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, shardings)
    batch = {name: jax.ShapeDtypeStruct((rows, length)[:axes], dtype, sharding=batch_sharding(devices))
             for name, (axes, dtype) in _batch_types(config).items()}
    loss = make_loss(model, config.model, smoothing=config.optimizer.label_smoothing)
    step = make_train_step(loss, optimizer, accumulate=config.optimizer.accumulate,
                           ema_decay=config.optimizer.ema_decay, trainable=trainable(config.model))
    with use_mesh(devices):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        return state, batch, jitted.lower(state, batch).compile()


def _batch_types(config: Config) -> dict[str, tuple[int, Any]]:
    """Array of a batch -> (number of its axes, type)."""
    ids, mask, axes = (2, jnp.int32), (2, jnp.bool_), 1 if config.model.num_classes else 2
    common = {"labels": (axes, jnp.int32), "weights": (axes, jnp.float32)}
    if config.model.is_encoder_decoder:
        return {"source": ids, "source_mask": mask, "target": ids, "target_mask": mask, **common}
    return {"tokens": ids, "mask": mask, **common}


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for cells in rows:
        table.add_row(*cells)
    return table


def _memory(plan: Plan) -> Table:
    memory, axes = plan.memory, ",".join(f"{name}={size}" for name, size in plan.mesh.items() if size > 1) or "data=1"
    rows = [("parameters", memory.parameters), ("optimizer state", memory.optimizer), ("batch", memory.batch),
            ("gradients, activations, temporaries", memory.temporaries), ("all", memory.total),
            (f"{plan.device.name} has", int(plan.device.memory))]
    cells = [(name, f"{size / 1e9:,.3f} GB") for name, size in rows]
    return _table(f"memory of each of {plan.devices:,} devices ({axes})",
                  [*cells, ("fits", "yes" if plan.fits else "NO")])


def _time(plan: Plan) -> Table:
    sent = [(f"  {kind}, sent by a device", f"{size / 1e9:,.3f} GB") for kind, size in plan.sent_by_kind().items()]
    return _table("one step, at the peak rates of the data sheets", [
        ("rows x tokens", f"{plan.rows:,} x {plan.length:,}"), ("FLOPs", f"{plan.flops:.4g}"),
        ("compute", _duration(plan.compute_seconds)), ("memory traffic", _duration(plan.memory_seconds)),
        ("network", _duration(plan.network_seconds)), *sent,
        ("step, all overlapping", f"{_duration(plan.seconds)}, MFU {plan.mfu(plan.seconds):.0%}"),
        ("step, nothing overlapping", f"{_duration(plan.serial_seconds)}, MFU {plan.mfu(plan.serial_seconds):.0%}")])


def _bill(plan: Plan, options: PlanOptions) -> Table:
    steps = float(options.config.train.steps)
    if options.tokens is not None:
        steps = math.ceil(options.tokens / (plan.rows * plan.length))
    rows: list[tuple[str, ...]] = [("steps", f"{steps:,.0f}"), ("FLOPs", f"{plan.flops * steps:.2g}")]
    for name, seconds in (("all overlapping", plan.seconds), ("nothing overlapping", plan.serial_seconds)):
        hours = seconds * steps / 3600
        rows.append((name, f"{hours / 24:,.2f} days, {hours * plan.devices * options.price:,.0f} "
                     f"at {options.price:g} a device-hour"))
    if options.hours is not None:
        rate = plan.device.sustained or plan.peak
        counted = sustained_flops(options.hours * 3600, plan.devices, rate)
        rows.append((f"FLOPs as the paper counts: {options.hours:g} h x {plan.devices} x {rate / 1e12:g} TFLOPS",
                     f"{counted:.1e}, of which the model's products are {plan.flops * steps / counted:.0%}"))
    return _table("the whole training", rows)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
