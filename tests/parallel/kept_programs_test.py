"""Programs that are found without tracing: found when all is the same, and only then; damage costs time alone."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.parallel import kept_programs
from tfm.parallel.kept_programs import KeptPrograms

ROOT = Path(__file__).parents[2]


def lowered(factor):
    """A function that no compilation cache knows, and its argument."""
    x = jnp.arange(6.0).reshape(2, 3)
    return jax.jit(lambda x: {"y": x @ x.T + factor}).lower(x), (x,)


def keep(programs, factor):
    """Compile, wait until the program is written, and give the argument."""
    before = set(threading.enumerate())
    program, arguments = lowered(factor)
    programs.compile(program, arguments)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    return arguments


@pytest.fixture(autouse=True)
def nothing_cached(tmp_path):
    """JAX's compilation cache is empty."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_program_is_found_and_computes_the_same(tmp_path):
    arguments = keep(KeptPrograms(tmp_path / "steps", "f"), 0.25)
    load = KeptPrograms(tmp_path / "steps", "f").find(arguments)
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(load()(*arguments)["y"], x @ x.T + 0.25)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments)
    assert KeptPrograms(tmp_path / "steps", "f").find(shapes) is not None


def test_whatever_differs_is_not_found(tmp_path, monkeypatch):
    programs = KeptPrograms(tmp_path / "steps", "f", "config")
    x, = arguments = keep(programs, 0.5)
    assert programs.find(arguments) is not None
    assert KeptPrograms(tmp_path / "steps", "f", "other config").find(arguments) is None
    assert KeptPrograms(tmp_path / "steps", "g", "config").find(arguments) is None
    for other in ((x[:1],), (x.astype(jnp.bfloat16),), ({"x": x},), (x, x)):
        assert programs.find(other) is None
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert programs.find(arguments) is None
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    with monkeypatch.context() as changed:
        changed.setattr(kept_programs, "_processor", lambda: "flags: none")
        assert programs.find(arguments) is None
    with monkeypatch.context() as changed:
        changed.setattr(kept_programs, "_SOURCE", "other code")
        assert KeptPrograms(tmp_path / "steps", "f", "config").find(arguments) is None
    for name, value in (("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"), ("FLAX_FIX_RNG_SEPARATOR", "1")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert programs.find(arguments) is None
    assert programs.find(arguments) is not None


def test_the_source_is_every_line_of_the_package(tmp_path):
    """One changed letter in a copy of the package is another source."""
    shutil.copytree(ROOT / "tfm", tmp_path / "tfm", ignore=shutil.ignore_patterns("__pycache__"))
    ask = [sys.executable, "-c", "from tfm.parallel.kept_programs import source_hash; print(source_hash())"]

    def source():
        return subprocess.run(ask, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True,
                              capture_output=True, text=True).stdout.strip()

    before = source()
    assert before == kept_programs.source_hash()
    (tmp_path / "tfm" / "ops" / ".#losses.py").symlink_to("somebody@host.1:2")  # as an editor leaves it
    (tmp_path / "tfm" / "ops" / "folder.py").mkdir()
    assert source() == before
    path = tmp_path / "tfm" / "ops" / "losses.py"
    path.write_text(path.read_text().replace("softmax", "softmin", 1))
    assert source() != before


def test_flags_may_lie_in_a_file(tmp_path, monkeypatch):
    flags = tmp_path / "flags"
    flags.write_text("--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("XLA_FLAGS", str(flags))
    programs = KeptPrograms(tmp_path / "steps", "f")
    arguments = keep(programs, 0.375)
    assert programs.find(arguments) is not None
    flags.write_text("--xla_cpu_enable_fast_math=true")
    assert programs.find(arguments) is None


def test_a_program_is_not_kept_if_the_code_was_edited_meanwhile(tmp_path, monkeypatch):
    programs = KeptPrograms(tmp_path / "steps", "f")
    monkeypatch.setattr(kept_programs, "source_hash", lambda: "edited")
    keep(programs, 0.625)
    assert not (tmp_path / "steps").exists()


def test_a_program_that_is_no_data_is_not_kept(tmp_path):
    """And no thread ends with a traceback, which pytest would report."""
    programs, x = KeptPrograms(tmp_path / "steps", "f"), jnp.ones(3)

    def show(x):
        jax.debug.callback(lambda value: None, x)
        return x + 0.125

    before = set(threading.enumerate())
    programs.compile(jax.jit(show).lower(x), (x,))
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert not (tmp_path / "steps").exists()


def test_a_folder_of_somebody_else_is_read(tmp_path, monkeypatch):
    programs = KeptPrograms(tmp_path / "steps", "f")
    arguments = keep(programs, 0.875)

    def refuse(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "utime", refuse)
    assert programs.find(arguments)() is not None


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:50] + b"\0" * 20 + data[70:],
                                    lambda data: b"", lambda data: b"no program",
                                    lambda data: zlib.compress(pickle.dumps({"a": 1, "b": 2})),
                                    lambda data: zlib.compress(b"cnosuchmodule\nX\n."),
                                    lambda data: zlib.compress(b"cos\nnosuchthing\n.")])
def test_a_damaged_file_is_no_program_and_is_written_again(tmp_path, damage):
    programs = KeptPrograms(tmp_path / "steps", "f")
    arguments = keep(programs, 0.75)
    path, = (tmp_path / "steps").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert programs.find(arguments) is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new"))
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    keep(programs, 0.75)
    assert programs.find(arguments)() is not None


def test_what_does_not_load_is_no_program(tmp_path):
    """Whole as a file, but of another build of XLA, or nothing like a program."""
    for data in (b"of another build", b"", b"cnosuchmodule\nX\n."):
        assert kept_programs._load(data, None, None, jax.devices()[:1]) is None


def test_what_the_compilation_cache_gave_is_not_written(tmp_path):
    """Written again, its functions would be missing."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        keep(KeptPrograms(tmp_path / "first", "f"), 1.25)
        jax.clear_caches()
        keep(KeptPrograms(tmp_path / "second", "f"), 1.25)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    assert len(list((tmp_path / "first").iterdir())) == 1
    assert not (tmp_path / "second").exists()


def test_only_the_programs_used_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_programs, "KEPT", 2)
    programs = [KeptPrograms(tmp_path / "steps", name) for name in "abc"]
    arguments = [keep(programs[number], 2.0 + number) for number in (0, 1)]
    for number, path in enumerate(sorted((tmp_path / "steps").iterdir(), key=lambda path: path.stat().st_mtime)):
        os.utime(path, (1000 + number, 1000 + number))
    assert programs[0].find(arguments[0]) is not None  # used last, though it was written first
    arguments.append(keep(programs[2], 4.0))
    assert [program.find(x) is not None for program, x in zip(programs, arguments, strict=True)] == [True, False, True]


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "steps").write_text("a file")
    programs = KeptPrograms(tmp_path / "steps", "f")
    arguments = keep(programs, 5.0)
    assert programs.find(arguments) is None


@pytest.mark.parametrize(("setting", "value"), [("jax_compilation_cache_max_size", 1000),
                                                ("jax_compilation_cache_dir", None),
                                                ("jax_enable_compilation_cache", False)])
def test_nothing_is_kept_where_the_cache_is_off_or_bounded(setting, value):
    before = jax.config.values[setting]
    assert kept_programs.kept_programs("f") is not None
    jax.config.update(setting, value)
    try:
        assert kept_programs.kept_programs("f") is None
    finally:
        jax.config.update(setting, before)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_second_run_traces_no_step_and_ends_at_the_same_bits(tmp_path, tiny_config, devices):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_LOG_COMPILES": "1",
                                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    ran, metrics = [], []
    runs = {"first": [], "second": ["--train.eval-every", "1"], "other": ["--model.dropout-rate", "0.3"]}
    for name, more in runs.items():
        command = [sys.executable, str(ROOT / "train.py"), str(tiny_config), "--workdir", str(tmp_path / name), *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
        ran.append(done.stderr.count("Compiling jit(step)"))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        metrics.append([{key: value for key, value in json.loads(line).items()
                         if "loss" in key or key in ("step", "gradient_norm")} for line in lines])
    assert ran[0] >= 1
    assert ran[1] == 0
    assert ran[2] >= 1
    assert [row["loss"] for row in metrics[0]] == [row["loss"] for row in metrics[1]]
    assert metrics[0][-1] == metrics[1][-1]
    assert metrics[0][-1]["loss"] != metrics[2][-1]["loss"]
    assert len(metrics[0]) == 3
