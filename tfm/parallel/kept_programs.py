"""Compiled programs that a later start finds without tracing anything.

JAX's own compilation cache looks a program up by its text, which takes a second of tracing and lowering for a step of
the paper's base model. Here a program is looked up by all that its text comes from. As with JAX's cache, what lies in
the folder is run: nobody else should be able to write there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import NamedSharding

KEPT = 300
"""Programs kept in a folder: those used last."""
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
_local = threading.local()


class KeptPrograms:
    """Compiled programs in a folder, found by the code, the settings and the arguments that they were made from.

    These are the source of this package, the versions of what it calls, JAX's settings and the environment's, the
    devices, and the shapes, types and shardings of the arguments. What else decides about a program says `origin`.
    """

    def __init__(self, folder: Path, *origin: str) -> None:
        """The folder need not exist; `origin` is all that the function's code depends on, such as the config."""
        self._folder, self._origin, self._source = folder, origin, _SOURCE
        _listen()

    def find(self, arguments: Any) -> Callable[[], jax.stages.Compiled | None] | None:
        """What loads the program for these arguments, or their shapes, if there is one.

        Returns:
            None, or a function that may be called in another thread; it gives None if the program does not load.
        """
        path = self._path(arguments)
        try:
            program, (in_tree, out_tree) = pickle.loads(zlib.decompress(path.read_bytes()))
        except Exception:  # whatever is wrong with a file, it can be made again
            return None
        with contextlib.suppress(OSError):  # a folder of somebody else
            os.utime(path)
        return functools.partial(_load, program, in_tree, out_tree, _devices(arguments))

    def compile(self, lowered: jax.stages.Lowered, arguments: Any) -> jax.stages.Compiled:
        """Compile, and keep the program. It is written in a thread; a program that cannot be kept is none the worse."""
        before = _cache_hits()
        program = lowered.compile()
        # What JAX's cache gave cannot be written again: its functions would be missing.
        if _cache_hits() == before:
            threading.Thread(target=self._keep, args=(program, self._path(arguments))).start()
        return program

    def _keep(self, program: jax.stages.Compiled, path: Path) -> None:
        with contextlib.suppress(Exception):  # a full disk, a program with a part that is no data, such as a callback
            data, *trees = serialize(program)
            if source_hash() != self._source:  # edited since: this program is of the code before
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}-{os.getpid()}")
            try:
                draft.write_bytes(zlib.compress(pickle.dumps((data, trees)), 1))
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            for old in sorted(self._folder.iterdir(), key=lambda kept: kept.stat().st_mtime)[:-KEPT]:
                old.unlink()

    def _path(self, arguments: Any) -> Path:
        leaves, form = jax.tree.flatten(arguments)
        about = [(x.shape, x.dtype, getattr(x, "weak_type", False), x.sharding) for x in leaves]
        devices = _devices(arguments)
        parts = [*self._origin, self._source, *_surroundings(), str(form), *map(str, about), *map(repr, devices),
                 devices[0].device_kind, devices[0].client.platform_version]
        return self._folder / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def kept_programs(*origin: Any) -> KeptPrograms | None:
    """The programs kept beside JAX's compilation cache; None where that is off or has a limit of size, and for several
    processes.

    Args:
        *origin: what the function is, and the settings that decide what it computes; each as its `repr`.
    """
    settings = jax.config.values
    enabled = settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_max_size"] == -1
    folder = settings["jax_compilation_cache_dir"]
    if not enabled or folder is None or jax.process_count() > 1:
        return None
    return KeptPrograms(Path(folder) / "steps", *map(repr, origin))


def _load(program: bytes, in_tree: Any, out_tree: Any, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    try:
        return deserialize_and_load(program, in_tree, out_tree, backend=devices[0].client, execution_devices=devices)
    except Exception:  # of another build of XLA, or no program at all: it can be compiled again
        return None


def _devices(arguments: Any) -> list[jax.Device]:
    """The devices of the arguments, in their mesh's order where they are on one."""
    sharding = jax.tree.leaves(arguments)[0].sharding
    return list(sharding.mesh.devices.flat if isinstance(sharding, NamedSharding) else sharding.device_set)


def source_hash() -> str:
    """A hash of the code of this package, as the files are now."""
    root, code = Path(__file__).parents[1], hashlib.sha256()
    paths = sorted(path for path in root.rglob("*.py") if path.is_file())
    for path in paths:
        code.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return code.hexdigest() if paths else os.urandom(32).hex()  # code that is not in files may be any


_SOURCE = source_hash()
"""The hash of the code as it was imported."""


def _surroundings() -> list[str]:
    """Versions, settings and processor, which decide what a function is compiled to."""
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    prefixes = "XLA_", "LIBTPU_", "PJRT_", "TF_", "FLAX_"
    environment = {name: _content(value) for name, value in os.environ.items() if name.startswith(prefixes)}
    return [*map(importlib.metadata.version, _LIBRARIES), platform.python_version(), platform.machine(),
            str(sorted(settings.items())), str(sorted(environment.items())), _processor()]


def _content(setting: str) -> str:
    """A setting, and if it names a file, as `XLA_FLAGS` may, what the file says."""
    try:
        return f"{setting}: {Path(setting).read_text(errors='replace')}"
    except (OSError, ValueError):
        return setting


def _processor() -> str:
    """How many cores this process has and what they can do, as the kernel lists it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return f"{cores} {platform.processor()}"
    return f"{cores} " + next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def _listen() -> None:
    """Count, for each thread, the programs that JAX's compilation cache gives."""

    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _local.hits = _cache_hits() + 1

    jax.monitoring.register_event_listener(note)


def _cache_hits() -> int:
    return getattr(_local, "hits", 0)
