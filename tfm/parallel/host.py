"""Settings of the host process that make training on a CPU faster: what malloc does with freed memory, huge pages."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import jax

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_NEVER = -1
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLE = "glibc.malloc.hugetlb"


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
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "").replace(_TUNABLE, ""):
        return False
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions refuse a threshold above 32 MiB; then no block at all is mapped by itself.
    whole = mallopt(_MMAP_THRESHOLD, 2**30) or mallopt(_MMAP_MAX, 0)
    rest = [mallopt(_TRIM_THRESHOLD, _NEVER), mallopt(_TOP_PAD, 2**26), mallopt(_ARENA_MAX, 1)]
    return bool(whole) and all(rest)


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
    """One line on how to start this program with huge pages, where the kernel offers them and malloc uses none.

    Example:
        >>> hint = huge_pages_hint()
        >>> hint is None or hint.startswith("huge pages")
        True
    """
    try:
        choices = _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return None
    if "[madvise]" not in choices or _TUNABLE in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    return f"huge pages are off for this process; GLIBC_TUNABLES={_TUNABLE}=1 in its environment can speed up a CPU"
