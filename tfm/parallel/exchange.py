"""What several processes tell each other: texts through the coordination service, in which no device takes part.

All processes call each function here the same number of times in the same order, from their main thread; so a call
meets the same call of the others. Device programs that go across processes have short time-outs of their own and must
be launched in one order everywhere: whatever a process may have to wait long for comes through here.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")
WAIT_SECONDS = 3600
"""Longest time that one process waits for another to compile, to prepare the data or to do its part."""
_calls = itertools.count()
_posted: list[str] = []


def is_first() -> bool:
    """Whether this process is the one that writes and reports."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Return when every process is here.

    Raises:
        RuntimeError: one did not come in time; the message names it.
    """
    if jax.process_count() > 1:
        _client().wait_at_barrier(f"tfm/{next(_calls)} {name}", 1000 * WAIT_SECONDS)


def first_alone(work: Callable[[], T], name: str) -> T:
    """The result of some work that writes files: process 0 does it first, then the others find the files.

    Raises:
        ValueError, OSError: what process 0 raised; the others raise a ValueError that says so.
    """
    if jax.process_count() == 1:
        return work()
    result: T | None = None
    error: ValueError | OSError | None = None
    if is_first():
        try:
            result = work()
        except (ValueError, OSError) as raised:
            error = raised
    message = from_first("" if error is None else str(error) or repr(error))
    if error is not None:
        raise error
    if message:
        raise ValueError(f"process 0 has no {name}: {message}")
    return work() if result is None else result


def from_first(value: T) -> T:
    """Process 0's value, on all processes; it must be plain JSON data.

    Example:
        >>> from_first(0.1)
        0.1
    """
    if jax.process_count() == 1:
        return value
    key = f"tfm/{next(_calls)}"
    if is_first():
        _post(key, value)
        return value
    result: T = _read(key)
    return result


def from_all(value: T) -> list[T]:
    """The values of all processes, in order, on all of them; plain JSON data.

    Example:
        >>> from_all({"lines": 3})
        [{'lines': 3}]
    """
    count = jax.process_count()
    if count == 1:
        return [value]
    number, before = next(_calls), len(_posted)
    _post(f"tfm/{number}/{jax.process_index()}", value)
    values = [_read(f"tfm/{number}/{process}") for process in range(count)]
    # Every process is in this call, so all have read what was posted before it.
    for key in _posted[:before]:
        _client().key_value_delete(key)
    del _posted[:before]
    return values


def all_agree(good: bool) -> bool:
    """Whether `good` is true on every process."""
    if jax.process_count() == 1:
        return good
    folder = f"tfm/{next(_calls)}"
    if not good:
        _client().key_value_set(f"{folder}/{jax.process_index()}", "no")
    wait_for_all("agreement")
    return not _client().key_value_dir_get(folder)


def spread(items: Iterable[T], work: Callable[[T], Any]) -> Iterator[Any]:
    """work(item) for each item, in order: item i is done by process i modulo their number.

    Args:
        items: plain JSON data. Only process 0 reads it.
        work: gives plain JSON data.

    Returns:
        the results, on every process.

    Raises:
        ValueError: `items` or `work` raised it, on whichever process; then all raise it.

    Example:
        >>> list(spread(["a", "b"], str.upper))
        ['A', 'B']
    """
    if jax.process_count() == 1:
        yield from map(work, items)
        return
    me, source = jax.process_index(), iter(items if is_first() else ())
    while True:
        given = _result(from_first(_outcome(lambda: list(itertools.islice(source, jax.process_count())))))
        if not given:
            return
        mine = _outcome(lambda given=given: work(given[me])) if me < len(given) else {}  # type: ignore[misc]
        for outcome in from_all(mine)[: len(given)]:
            yield _result(outcome)


def _outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """A result, or the message of a ValueError, as data that travels."""
    try:
        return {"result": work()}
    except ValueError as error:
        return {"error": str(error)}


def _result(outcome: dict[str, Any]) -> Any:
    if "error" in outcome:
        raise ValueError(outcome["error"])
    return outcome["result"]


def _post(key: str, value: Any) -> None:
    _client().key_value_set(key, json.dumps(value))
    _posted.append(key)


def _read(key: str) -> Any:
    """The value that another process posts; between short waits, signals are noticed."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return json.loads(_client().blocking_key_value_get(key, 2000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > deadline:
                raise


def _client() -> Any:
    """The client of the coordination service, which JAX has no public name for."""
    from jax._src.distributed import global_state

    return global_state.client
