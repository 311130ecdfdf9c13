"""Checkpoints of a run: written whole or not at all, verified when read, with the config beside the arrays.

`RUN/checkpoints/<step>` is an Orbax checkpoint with the items `params`, `ema` (if kept), `optimizer`, `data` (position
of the data iterator), `config` and `scores`, and a file of checksums.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.config import Config
from tfm.config_json import config_diff, config_from_dict, config_to_dict
from tfm.models.adapters import merge_adapters
from tfm.parallel.exchange import all_agree, from_first, is_first, wait_for_all
from tfm.training.step import TrainState

CHECKSUMS = "checksums.json"
UNFINISHED = "orbax-checkpoint-tmp"


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be read back as it was written."""


@dataclass(frozen=True)
class Restored:
    """What a run goes on from."""

    state: TrainState
    data_state: Any
    step: int


class Checkpoints:
    """The checkpoints of one run folder: the newest `keep` and the best one are kept.

    Saving copies the arrays and returns; files are written in the background. The next save, `poll` and `close` raise
    what went wrong there.
    """

    def __init__(self, run: str | Path, *, keep: int, say: Callable[[str], None] = print) -> None:
        import orbax.checkpoint as ocp

        _quiet()
        self.directory = Path(run).absolute() / "checkpoints"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._keep, self._say = keep, say
        # With the processes named, Orbax waits for them through the coordination service, and not by a device program.
        everyone = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=everyone)
        self._worker = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        best = best_step(run)
        self._best = from_first(-math.inf if best is None else _score(self.directory / str(best)))
        self._newest: int | None = None
        """Step of the checkpoint saved or restored last."""

    def save(self, state: TrainState, *, config: Config, data_state: Any, scores: Mapping[str, float]) -> None:
        """Write the checkpoint of `state.step`, unless there is one already, and then remove those not kept.

        Args:
            state: all arrays.
            config: travels with them.
            data_state: JSON-ready position of the data iterator.
            scores: `bleu` or another score of which more is better; decides which checkpoint is the best.

        Raises:
            OSError: no space left; checkpoints written before are untouched.
        """
        import orbax.checkpoint as ocp

        self.wait()
        step = int(state.step)
        if step == self._newest:
            return
        path, self._newest = self.directory / str(step), step
        self._check_space(state)
        items: dict[str, Any] = {"params": ocp.args.StandardSave(state.params)}
        if state.ema is not None:
            items["ema"] = ocp.args.StandardSave(state.ema)
        items["optimizer"] = ocp.args.StandardSave(_rest(state))
        for name, value in (("data", data_state), ("config", config_to_dict(config)), ("scores", dict(scores))):
            items[name] = ocp.args.JsonSave({"value": value})
        with self._clear_about_space():
            self._orbax.save(path, ocp.args.Composite(**items))
        self._best = max([self._best, *scores.values()])
        self._pending = self._worker.submit(self._finish, path)

    def beats(self, scores: Mapping[str, float]) -> bool:
        """Whether a score is higher than that of every checkpoint so far."""
        return any(score > self._best for score in scores.values())

    def poll(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._clear_about_space():
            pending.result()

    def close(self) -> None:
        """Wait for the last checkpoint and release the threads."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._orbax.close()

    def restore_newest(self, abstract: TrainState) -> Restored | None:
        """The newest whole checkpoint, on the shardings of `abstract`; None where the run has none at all.

        A damaged one is reported and renamed to `<step>.damaged`, once an older one has been read.

        Args:
            abstract: TrainState of `jax.ShapeDtypeStruct` with shardings.

        Raises:
            ValueError: there are checkpoints, but none is whole.
        """
        self._remove_unfinished()
        damaged: list[Path] = []
        for step in reversed(from_first(checkpoint_steps(self.directory.parent))):
            restored = self._try_restore(self.directory / str(step), abstract)
            if not all_agree(restored is not None):
                damaged.append(self.directory / str(step))
                continue
            for other in damaged if is_first() else []:
                number = sum(1 for _ in self.directory.glob(f"{other.name}.damaged*"))
                other.rename(other.with_name(f"{other.name}.damaged{number or ''}"))
            wait_for_all("damaged checkpoints renamed")
            self._newest = step
            return restored
        if damaged:
            raise ValueError(f"{self.directory} has no whole checkpoint left: move the folder away to start anew")
        return None

    def _try_restore(self, path: Path, abstract: TrainState) -> Restored | None:
        """This process's shards of a checkpoint; None where it is damaged. It needs no other process."""
        try:
            if is_first():
                verify(path)
            return _restore(path, abstract)
        except DamagedCheckpointError as error:
            self._say(f"{error}: trying the one before")
            return None

    def _finish(self, path: Path) -> None:
        """In the background: the arrays reach the disk, then checksums, then checkpoints not kept go."""
        self._orbax.wait_until_finished()
        if not is_first():
            return
        write_checksums(path)
        for step in _not_kept(checkpoint_steps(path.parent.parent), best_step(path.parent.parent), self._keep):
            doomed = self.directory / f"{step}.removing"
            (self.directory / str(step)).rename(doomed)
            shutil.rmtree(doomed)

    @contextlib.contextmanager
    def _clear_about_space(self) -> Iterator[None]:
        """Turn whatever a full disk made of a save into one clear error."""
        try:
            yield
        except Exception as error:
            self._remove_unfinished()
            if _is_no_space(error):
                raise self._no_space() from error
            raise

    def _check_space(self, state: TrainState) -> None:
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        if shutil.disk_usage(self.directory).free < needed:
            raise self._no_space(needed)

    def _no_space(self, needed: int | None = None) -> OSError:
        size = "" if needed is None else f" of {needed / 1e6:.0f} MB"
        return OSError(errno.ENOSPC, f"no space left for a checkpoint{size} in {self.directory}: those written before "
                                     "are whole; free some space and run the same command again")

    def _remove_unfinished(self) -> None:
        """Remove what was never a checkpoint: half-written ones, and those that were being removed."""
        if not is_first():
            return
        for path in self.directory.iterdir():
            if UNFINISHED in path.name:
                self._say(f"{path.name} was never written to its end: removed")
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(".removing"):
                shutil.rmtree(path, ignore_errors=True)


def checkpoint_steps(run: str | Path) -> list[int]:
    """Steps of the finished checkpoints of a run folder, in ascending order."""
    directory = Path(run) / "checkpoints"
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def best_step(run: str | Path) -> int | None:
    """Step of the checkpoint with the highest score; the first of equals. None where none has a score."""
    scored = [(_score(Path(run) / "checkpoints" / str(step)), -step) for step in checkpoint_steps(run)]
    score, step = max(scored, default=(-math.inf, 0))
    return None if score == -math.inf else -step


def find_checkpoint(run: str | Path, which: int | str = "newest", *, say: Callable[[str], None] = print) -> Path:
    """Folder of one checkpoint of a run.

    Args:
        run: run folder.
        which: a step, `newest` (the newest whole one), or `best` (by BLEU).
        say: told about damaged checkpoints that were passed over.

    Raises:
        FileNotFoundError: no such checkpoint; the message lists those there are.
        ValueError: the step's checkpoint is damaged, or all are.
    """
    steps = checkpoint_steps(run)
    if not steps:
        raise FileNotFoundError(f"{Path(run) / 'checkpoints'} has no checkpoint")
    if which == "newest":
        for step in reversed(steps):
            try:
                return verify(Path(run) / "checkpoints" / str(step))
            except DamagedCheckpointError as error:
                say(f"{error}: trying the one before")
        raise ValueError(f"{Path(run) / 'checkpoints'} has no whole checkpoint")
    wanted = best_step(run) if which == "best" else which
    if wanted is None:
        raise FileNotFoundError(f"{Path(run) / 'checkpoints'} has no checkpoint with a score")
    if str(wanted) not in map(str, steps):
        raise FileNotFoundError(f"{run} has no checkpoint of step {wanted}: there are {', '.join(map(str, steps))}")
    return verify(Path(run) / "checkpoints" / str(wanted))


def load_checkpoint_config(path: str | Path) -> Config:
    """The config that travels with a checkpoint."""
    return config_from_dict(_read_json(Path(path), "config"))


def load_checkpoint_params(path: str | Path, *, sharding: Any = None) -> Any:
    """The parameters of a checkpoint as a model should be used: their moving average where one was kept.

    Args:
        path: checkpoint folder, `RUN/checkpoints/<step>`.
        sharding: function of the parameters' shapes that gives a tree of shardings. None: the first local device.

    Returns:
        nested dict of arrays.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: it is damaged.
    """
    import orbax.checkpoint as ocp

    path = verify(Path(path).absolute())
    item = "ema" if (path / "ema").is_dir() else "params"
    with _damage(path):
        reader = _reader(**{item: ocp.StandardCheckpointHandler()})
        tree = reader.metadata(path).item_metadata[item].tree
        shapes = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), tree)
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(lambda _: one, shapes) if sharding is None else sharding(shapes)
        abstract = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, placed)
        return reader.restore(path, ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract)}))[item]


def average_checkpoints(paths: Sequence[str | Path]) -> Any:
    """The mean of the parameters of several checkpoints, taken in float32.

    Args:
        paths: checkpoint folders, `RUN/checkpoints/<step>`.

    Returns:
        nested dict of float32 arrays. Adapters (LoRA) are part of the weights in it, since the mean of the products A B
        is not the product of the means: it is for the same model with `lora_rank=0`.

    Raises:
        ValueError: no path, a damaged checkpoint, or configs that differ in more than how long they trained.
        FileNotFoundError: no such folder.

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 6.1.
    """
    if not paths:
        raise ValueError("average_checkpoints needs at least one checkpoint, got none")
    first = load_checkpoint_config(verify(Path(paths[0])))
    for path in paths[1:]:
        differences = config_diff(first, load_checkpoint_config(verify(Path(path))))
        differences = {name: pair for name, pair in differences.items()
                       if not name.startswith(("train.", "decode.", "data.cache_dir"))}
        if differences:
            raise ValueError(f"cannot average {paths[0]} and {path}: {describe_diff(differences)}")
    total: Any = None
    for path in paths:
        wide = jax.tree.map(lambda x: np.asarray(x, np.float32), load_checkpoint_params(path))
        params = jax.tree.map(np.asarray, merge_adapters(first.model, wide)[1])
        total = params if total is None else jax.tree.map(np.add, total, params)
    return jax.tree.map(lambda x: jnp.asarray(x / np.float32(len(paths))), total)


def describe_diff(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """`model.d_ff 2048 -> 64, ...`."""
    return ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in differences.items())


def write_checksums(path: Path) -> None:
    """Write the length and CRC-32 of each file of a checkpoint into it."""
    sums = {str(file.relative_to(path)): _checksum(file) for file in sorted(path.rglob("*")) if file.is_file()}
    draft = path / (CHECKSUMS + ".part")
    draft.write_text(json.dumps(sums), encoding="utf-8")
    draft.replace(path / CHECKSUMS)


def verify(path: Path) -> Path:
    """Compare a checkpoint with its checksums, if it has them, and give its path back.

    Raises:
        FileNotFoundError: no such folder.
        DamagedCheckpointError: a file is missing or differs.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a checkpoint folder")
    if not (path / CHECKSUMS).is_file():
        return path
    try:
        sums = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged (file {CHECKSUMS})") from error
    wrong = [name for name, known in sums.items() if not (path / name).is_file() or _checksum(path / name) != known]
    if wrong:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged (file {wrong[0]})")
    return path


class _damage:
    """An error while reading a checkpoint that no checksums vouch for, as one that names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not (self._path / CHECKSUMS).is_file():
            reason = " ".join(str(error).split())[:120]
            raise DamagedCheckpointError(f"checkpoint {self._path} is damaged ({reason})") from error


def _restore(path: Path, abstract: TrainState) -> Restored:
    import orbax.checkpoint as ocp

    with _damage(path):
        items = {"params": ocp.args.StandardRestore(abstract.params),
                 "optimizer": ocp.args.StandardRestore(_rest(abstract)), "data": ocp.args.JsonRestore()}
        if abstract.ema is not None:
            items["ema"] = ocp.args.StandardRestore(abstract.ema)
        found = _reader().restore(path, ocp.args.Composite(**items))
    rest = found["optimizer"]
    state = TrainState(rest["step"], found["params"], rest["opt_state"], found.get("ema"), rest["key"])
    return Restored(state, found["data"]["value"], int(rest["step"]))


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state, "key": state.key}


def _read_json(path: Path, item: str) -> Any:
    import orbax.checkpoint as ocp

    with _damage(path):
        return _reader().restore(path.absolute(), ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[item]["value"]


def _score(path: Path) -> float:
    """The score that travels with a checkpoint; minus infinity where there is none, or it cannot be read."""
    try:
        return max(_read_json(path, "scores").values(), default=-math.inf)
    except (ValueError, KeyError, OSError):
        return -math.inf


@functools.cache
def _quiet() -> None:
    """Orbax logs each save and restore; its warnings stay."""
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)


def _reader(**handlers: Any) -> Any:
    """What reads this process's part of a checkpoint without waiting for other processes."""
    import orbax.checkpoint as ocp

    _quiet()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me},
                                               barrier_sync_key_prefix=f"process_{me}")
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers), multiprocessing_options=alone)


def _not_kept(steps: list[int], best: int | None, keep: int) -> list[int]:
    return [step for step in steps[:-keep] if step != best]


def _checksum(file: Path) -> list[int]:
    value, size = 0, 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value, size = zlib.crc32(block, value), size + len(block)
    return [size, value]


def _is_no_space(error: BaseException | None) -> bool:
    while error is not None:
        if (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) \
                or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
