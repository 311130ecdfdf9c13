"""Settings of the host process that make training on a CPU faster: what malloc does with freed memory, huge pages."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax

# Parameters of mallopt(3), and an advice of madvise(2).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = -1
_MADV_COLLAPSE = 25
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE = 2**21
PAUSES = 60.0, 240.0
"""Seconds before the heap is first moved to huge pages, and before what has come since is moved."""


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, instead of giving it back at each step and paying again.

    By default glibc returns large blocks to the kernel as soon as they are free, and a training step asks for them
    again: 100,000 page faults and more a step. One heap that is never trimmed ends them; the resident memory
    stays at its peak. Call it before the first large allocation. Where the user has set malloc by `MALLOC_...` or
    `GLIBC_TUNABLES`, and without glibc, nothing is changed.

    Returns:
        whether the settings are in force.

    Reference: mallopt(3), Linux manual pages.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "").replace("glibc.malloc.hugetlb", ""):
        return False
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    one_heap = [mallopt(_MMAP_MAX, 0), mallopt(_ARENA_MAX, 1)]
    return all([*one_heap, mallopt(_TRIM_THRESHOLD, _NEVER), mallopt(_TOP_PAD, 2**26)])


def move_to_huge_pages() -> int:
    """Ask the kernel to put the heap, as it is now, on huge pages: the processor then looks up fewer addresses.

    For a heap that is kept (`keep_freed_memory`). It takes a second for each GiB or two, while other threads go on; a
    long run gains that back, a short one would not. Linux 6.1 and later; elsewhere nothing happens.

    Returns:
        bytes that lie on huge pages now.

    Reference: madvise(2), MADV_COLLAPSE, Linux manual pages.
    """
    heap = _heap()
    if heap is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    starts = range(-(-heap[0] // HUGE_PAGE) * HUGE_PAGE, heap[1] - HUGE_PAGE + 1, HUGE_PAGE)
    return HUGE_PAGE * sum(madvise(start, HUGE_PAGE, _MADV_COLLAPSE) == 0 for start in starts)


def huge_pages_later(pauses: Sequence[float] = PAUSES) -> threading.Thread:
    """`move_to_huge_pages` after each pause, in a thread that ends with the program.

    Args:
        pauses: seconds.

    Returns:
        the thread.
    """
    def run() -> None:
        for pause in pauses:
            time.sleep(pause)
            move_to_huge_pages()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _heap() -> tuple[int, int] | None:
    """First and last address of the process's heap, which the kernel lists in parts where an advice differs."""
    parts = [line.split()[0].split("-") for line in _read(Path("/proc/self/maps")).splitlines() if "[heap]" in line]
    return (int(parts[0][0], 16), int(parts[-1][1], 16)) if parts else None


def _read(path: Path) -> str:
    """What a file of the kernel says, empty where there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def run_in_turn() -> bool:
    """Let a CPU end each program, and free its temporary memory, before the next one begins.

    By default JAX starts a program while the one before is ending, and now and then asks for the temporary memory of
    the second before that of the first is free: a process that keeps what it frees then stays at the sum of both. Call
    it before the first array is made. Programs of several devices wait for each other, so there nothing is changed; an
    accelerator does not heed it.

    Returns:
        whether the setting is in force.
    """
    several = "device_count" in os.environ.get("XLA_FLAGS", "") or jax.config.jax_num_cpu_devices > 1  # type: ignore[attr-defined]
    if several or jax.distributed.is_initialized():
        return False
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True


def huge_pages_hint() -> str | None:
    """One line for the owner of a machine whose kernel gives no huge pages, not even to those who ask for them.

    Example:
        >>> hint = huge_pages_hint()
        >>> hint is None or hint.startswith("huge pages")
        True
    """
    if "[never]" not in _read(_HUGE_PAGES):
        return None
    return f"huge pages are off on this machine; as root, `echo madvise > {_HUGE_PAGES}` can speed up a CPU"
