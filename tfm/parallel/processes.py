"""Several processes as one program: start, who is who, values of the first one, waiting for all."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tfm.parallel.rules import batch_sharding, batch_shards

T = TypeVar("T")
HEARTBEAT_SECONDS = 60
"""A process from which nothing was heard for so long is lost, and ends the others with a message that names it."""
BARRIER_SECONDS = 3600
"""Longest time that one process waits for another to compile or to prepare the data."""
_barriers = itertools.count()


def start_processes(coordinator: str | None = None, num_processes: int | None = None,
                    process_id: int | None = None) -> None:
    """Join the other processes of this run, if there are any. Call it before anything else that uses a device.

    Args:
        coordinator: host:port of process 0. None: SLURM, Open MPI and TPU pods say it themselves; without one of them
            this process is alone.
        num_processes: number of processes; goes together with `coordinator`.
        process_id: number of this one, from 0.

    Raises:
        ValueError: only some of the three are given, or a process id that is not below their number.
    """
    given = [coordinator is not None, num_processes is not None, process_id is not None]
    if any(given) and not all(given):
        raise ValueError("--coordinator, --num-processes and --process-id go together: give all three or none")
    if not any(given) and not in_cluster():
        return
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"--process-id is {process_id}, but it must be from 0 to --num-processes - 1 = "
                         f"{num_processes - 1}")
    jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)


def together(command: Callable[[], int]) -> int:
    """Run a command of one of several processes: if it fails, this process ends at once.

    A clean end would wait for the others, which wait for this one; so they learn of it, and end as well.

    Args:
        command: gives the exit code; 0, 130 and 143 are no failure.
    """
    try:
        code = command()
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        code = 1
    if code not in (0, 130, 143) and jax.distributed.is_initialized():
        sys.stderr.flush()
        os._exit(code)
    return code


def in_cluster() -> bool:
    """Whether the environment says that this is one of several processes."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    counts = [os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
    kubernetes = "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    return len(hosts) > 1 or any(count.isdecimal() and int(count) > 1 for count in counts) or kubernetes


def is_first() -> bool:
    """Whether this process is the one that writes and reports."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Return when every process is here; it may take long, as when one compiles more slowly than another.

    Devices exchange nothing: their own time-outs are short.
    """
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        key = f"{name} {next(_barriers)}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * BARRIER_SECONDS)


def first_alone(work: Callable[[], T], name: str) -> T:
    """The result of some work that writes files: process 0 does it first, then the others find the files."""
    result = work() if is_first() else None
    wait_for_all(name)
    return work() if result is None else result


def from_first(value: float) -> float:
    """Process 0's value, on all processes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    halves = np.asarray([value], np.float64).view(np.uint32)
    return float(np.asarray(multihost_utils.broadcast_one_to_all(halves)).view(np.float64)[0])


@functools.cache
def batch_part(mesh: Mesh) -> tuple[int, int]:
    """(index, count): the rows of each batch are split into `count` parts, and this process feeds that one.

    Processes that share their rows, since another axis than `data` and `fsdp` goes across them, feed the same part.
    """
    shards = batch_shards(mesh)
    rows = batch_sharding(mesh).addressable_devices_indices_map((shards,)).values()
    local = {0 if index is None else index[0].start or 0 for index in rows}
    return min(local) // len(local), shards // len(local)


def whole_copy(tree: Any, mesh: Mesh) -> Any:
    """Arrays of a mesh as arrays of this process's first device. All processes must call it."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    copies = jax.jit(lambda x: x, out_shardings=jax.tree.map(lambda _: everywhere, tree))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), copies)
