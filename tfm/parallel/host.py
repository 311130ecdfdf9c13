"""Settings of the host process that make training on a CPU faster: what malloc does with freed memory, huge pages."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import jax

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = -1
_MADV_HUGEPAGE = 14  # advice of madvise(2)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_TUNABLE = "glibc.malloc.hugetlb"


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, instead of giving it back at each step and paying again.

    By default glibc returns large blocks to the kernel as soon as they are free, and a training step asks for them
    again: 100,000 page faults and more a step. One heap that is never trimmed ends them; the resident memory
    stays at its peak. Where the kernel gives huge pages to those who ask, the heap asks, so that the processor looks
    up fewer addresses. Call it before the first large allocation. Where the user has set malloc by `MALLOC_...` or
    `GLIBC_TUNABLES`, and without glibc, nothing is changed.

    Returns:
        whether the settings are in force.

    Reference: mallopt(3) and madvise(2), Linux manual pages.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "").replace(_TUNABLE, ""):
        return False
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    mallopt = libc.mallopt
    one_heap = [mallopt(_MMAP_MAX, 0), mallopt(_ARENA_MAX, 1)]
    if not all([*one_heap, mallopt(_TRIM_THRESHOLD, _NEVER), mallopt(_TOP_PAD, 2**26)]):
        return False
    if "[madvise]" in _read(_HUGE_PAGES) and _TUNABLE not in os.environ.get("GLIBC_TUNABLES", ""):
        _ask_for_huge_pages(libc)
    return True


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Extend the heap by half of the machine's memory, as addresses alone, and ask for huge pages behind them."""
    if _read(_OVERCOMMIT).strip() == "2":  # there, addresses count as memory
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    size = os.sysconf("SC_PHYS_PAGES") // 2 * page
    block = libc.malloc(size)
    if block:
        start = -(-block // page) * page
        libc.madvise(start, size - page, _MADV_HUGEPAGE)
    libc.free(block)


def _read(path: Path) -> str:
    """A setting of the kernel, empty where there is none."""
    try:
        return path.read_text(encoding="ascii")
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
