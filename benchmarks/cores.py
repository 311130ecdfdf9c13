"""How long a number takes from the first core to the last, which no program can choose.

A virtual machine's cores may lie on one last-level cache or on two, and its host moves them at any time: 40 to 100 ns
or 200 ns on the machine that these benchmarks ran on. Programs whose cores hand much to each other are then slower.
"""

import ctypes
import os
import statistics
import subprocess
import time
from collections.abc import Callable

NEAR_NS = 140.0
PATIENCE_S = 1200.0
SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
enum { TRIPS = 20000 };
static _Alignas(128) atomic_int turn;
static void bind(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}
static void *answer(void *core) {
    bind(*(int *)core);
    for (int i = 0; i < TRIPS; i++) {
        while (atomic_load_explicit(&turn, memory_order_acquire) != 2 * i + 1) { }
        atomic_store_explicit(&turn, 2 * i + 2, memory_order_release);
    }
    return 0;
}
static void *call(void *cores) {
    struct timespec start, end;
    pthread_t other;
    turn = 0;
    bind(((int *)cores)[0]);
    pthread_create(&other, 0, answer, (int *)cores + 1);
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < TRIPS; i++) {
        atomic_store_explicit(&turn, 2 * i + 1, memory_order_release);
        while (atomic_load_explicit(&turn, memory_order_acquire) != 2 * i + 2) { }
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    pthread_join(other, 0);
    static double ns;
    ns = ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / (2 * TRIPS);
    return &ns;
}
double core_to_core_ns(int first, int last) {
    int cores[2] = {first, last};
    void *ns;
    pthread_t caller;
    pthread_create(&caller, 0, call, cores);
    pthread_join(caller, &ns);
    return *(double *)ns;
}
"""


class Cores:
    """Lets turns of a benchmark run while the cores are as wanted."""

    def __init__(self, folder: str, wanted: str | None = None) -> None:
        """wanted: "near", "far" or None, all the same; the measurement's program is made in `folder`, if `cc` can."""
        self._wanted, self._measure = wanted, None
        self._ends = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
        path = os.path.join(folder, "core_to_core.so")
        try:
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-x", "c", "-", "-o", path],
                           input=SOURCE.encode(), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted:
                raise SystemExit(f"--cores {wanted} needs a C compiler, cc: {error}") from error
            return
        if self._ends[0] != self._ends[1]:
            self._measure = ctypes.CDLL(path).core_to_core_ns
            self._measure.restype = ctypes.c_double

    def nanoseconds(self) -> float | None:
        """The median of three measurements; None on one core, or without a C compiler."""
        return statistics.median(self._measure(*self._ends) for _ in range(3)) if self._measure else None

    def measured(self, ask: Callable[[], dict]) -> dict:
        """The answer of a turn before and after which the cores were as wanted, with `core_ns`."""
        end = time.monotonic() + PATIENCE_S
        while True:
            before = self._waited(end)
            reply = ask()
            after = self.nanoseconds()
            if self._right(after) or "error" in reply:
                return reply | dict(core_ns=before and after and max(before, after))

    def _waited(self, end: float) -> float | None:
        while not self._right(ns := self.nanoseconds()):
            if time.monotonic() > end:
                raise SystemExit(f"the cores were not {self._wanted} for {PATIENCE_S:.0f} s: {ns:.0f} ns")
            time.sleep(2)
        return ns

    def _right(self, ns: float | None) -> bool:
        return self._wanted is None or ns is None or (ns < NEAR_NS) == (self._wanted == "near")


def core_to_core(replies: list[dict]) -> dict[str, float]:
    """The row's field: the median over its turns."""
    known = [reply["core_ns"] for reply in replies if reply.get("core_ns")]
    return dict(core_to_core_ns=round(statistics.median(known))) if known else {}
