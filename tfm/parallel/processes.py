"""Several processes as one program: how they start, which rows each feeds, how they end together."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tfm.parallel.exchange import is_first, wait_for_all
from tfm.parallel.rules import batch_sharding, batch_shards

LAST_SECONDS = 1.0
"""How much later process 0 ends when all fail: the others' connection ends with it."""


def start_processes(coordinator: str | None = None, num_processes: int | None = None,
                    process_id: int | None = None, *, time_out: float = 60.0) -> None:
    """Join the other processes of this run, if there are any. Call it before anything else that uses a device.

    On a CPU each program then runs to its end before the next one starts: two of them at a time could wait for each
    other's messages, or for the few threads that there are.

    Args:
        coordinator: host:port of process 0. None: SLURM, Open MPI and TPU pods say it themselves; without one of them
            this process is alone.
        num_processes: number of processes; goes together with `coordinator`.
        process_id: number of this one, from 0.
        time_out: seconds without a sign of life after which a process is lost, which ends the others.

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
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from us
    # Later than the watch, whose message says more.
    jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=int(2 * time_out))


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
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LAST_SECONDS if is_first() else 0.0)
        os._exit(code)
    return code


def in_cluster() -> bool:
    """Whether the environment says that this is one of several processes."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    counts = [os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
    kubernetes = "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    return len(hosts) > 1 or any(count.isdecimal() and int(count) > 1 for count in counts) or kubernetes


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
    wait_for_all("copy")
    copies = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), copies)


def _same(tree: Any) -> Any:
    return tree
