"""Settings of the host process: seen in page faults, by a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

from tfm.parallel import host

COUNT_FAULTS = """
import resource, sys
from tfm.parallel.host import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(2**26)
before = faults()
for _ in range(8):
    bytearray(2**26)
print(faults() - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")


def _output(code: str, *arguments: str) -> str:
    """What a program prints in a process whose user has set nothing about malloc."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "GLIBC" not in name}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True,
                          check=True).stdout


def _faults(mode: str) -> int:
    return int(_output(COUNT_FAULTS, mode))


@glibc
def test_freed_memory_is_used_again_without_new_pages() -> None:
    pages = 8 * 2**26 // os.sysconf("SC_PAGE_SIZE")
    assert _faults("default") > 0.9 * pages
    assert _faults("keep") < 0.01 * pages


def test_one_device_ends_a_program_before_the_next() -> None:
    code = """
import jax, tfm.parallel.host as host
assert host.run_in_turn()
assert jax.config.read("jax_cpu_enable_async_dispatch") is False
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_several_devices_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert host.run_in_turn() is False


@pytest.mark.parametrize("name, value", [("MALLOC_ARENA_MAX", "2"),
                                         ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=9")])
def test_a_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert host.keep_freed_memory() is False


@glibc
def test_the_heap_moves_to_huge_pages() -> None:
    code = """
import numpy
from tfm.parallel import host
assert host.keep_freed_memory()
def huge():
    return next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))
block = bytearray(2**26)
whole = numpy.ones(2**22, numpy.uint8)  # for which numpy gives the kernel an advice of its own: the heap is in parts
late = bytearray(2**26)
before = huge()
host.huge_pages_later([0.0]).join()
print(host.move_to_huge_pages() >> 10, huge() - before)
assert block == late == bytearray(2**26)
"""
    told, found = map(int, _output(code).split())  # KiB
    if not told:
        pytest.skip("this kernel cannot")
    assert found > 0.9 * 2**17 and told >= found


def test_without_a_heap_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_read", lambda path: "")
    assert host.move_to_huge_pages() == 0


@pytest.mark.parametrize("choices, told", [
    ("always [madvise] never", False),
    ("[always] madvise never", False),
    ("always madvise [never]", True),
])
def test_hint_only_where_it_helps(tmp_path, monkeypatch: pytest.MonkeyPatch, choices: str, told: bool) -> None:
    (tmp_path / "enabled").write_text(choices)
    monkeypatch.setattr(host, "_HUGE_PAGES", tmp_path / "enabled")
    hint = host.huge_pages_hint()
    assert (hint is not None) == told
    assert hint is None or ("echo madvise" in hint and "\n" not in hint)


def test_no_hint_without_such_a_kernel(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_HUGE_PAGES", tmp_path / "absent")
    assert host.huge_pages_hint() is None
