"""Decoding in pieces, driven from the host: streaming, stopping rows from outside, and dropping finished rows.

A `Session` runs any search (`Greedy`, `Sample`, `Beam`) a chunk of compiled steps at a time. Between chunks the host
may read what was found so far, stop rows (a stop string came), and `compact` the batch: finished rows leave, in steps
of a few sizes, so that the work follows what is still alive and few programs are compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tfm.decoding.program import Program
from tfm.decoding.state import Cache, Hypotheses, Step, take_rows

MakeStep = Callable[[Any, Any], Step]  # (fixed, rows) -> step
Widen = Callable[[Cache, int], Cache]  # (cache, n) -> cache with room for n more tokens of each row


class Search(Protocol):
    """What a session asks of `Greedy`, `Sample` and `Beam`, which are hashable settings."""

    def start(self, step: Step, cache: Cache, prompt: jax.Array, **options: Any) -> Any:
        """Feed the prompt and choose the first tokens: the state of the loop."""

    def advance(self, step: Step, state: Any, until: Any) -> Any:
        """Go on until `until` tokens."""

    def result(self, state: Any) -> Hypotheses:
        """What was found so far."""

    def keep_rows(self, state: Any, rows: jax.Array) -> Any:
        """The state of the given rows only."""


@partial(Program, static_argnames=("search", "make_step", "static"))
def _start(
    search: Search,
    make_step: MakeStep,
    static: tuple[tuple[str, Any], ...],
    fixed: Any,
    rows: Any,
    cache: Cache,
    prompt: jax.Array,
    arrays: dict[str, jax.Array],
) -> Any:
    return search.start(make_step(fixed, rows), cache, prompt, **dict(static), **arrays)


@partial(Program, static_argnames=("search", "make_step"), donate_argnames=("state",))
def _advance(search: Search, make_step: MakeStep, fixed: Any, rows: Any, state: Any, until: int) -> Any:
    return search.advance(make_step(fixed, rows), state, until)


@partial(jax.jit, static_argnames=("search",))
def _keep(search: Search, state: Any, rows: Any, kept: jax.Array) -> tuple[Any, Any]:
    return search.keep_rows(state, kept), take_rows(rows, kept)


@partial(jax.jit, static_argnames=("widen", "tokens"))
def _widen(widen: Widen, state: Any, tokens: int) -> Any:
    return replace(state, cache=widen(state.cache, tokens))


@partial(jax.jit, static_argnames=("search",))
def _result(search: Search, state: Any) -> Hypotheses:
    return search.result(state)


class Session:
    """One batch being decoded.

    Args:
        search: settings, as `Greedy(eos_ids=(2,))`.
        make_step: (fixed, rows) -> step(tokens, cache). Programs are looked up by it: give the same function each time.
        fixed: pytree that all rows share, such as the parameters.
        rows: pytree, leaves [B, ...], what the step only reads of each row, such as the source's keys and values.
        cache: pytree, leaves [B, ...].
        prompt: [B, P] int.
        max_length, buffer_length, seen, keys, source_mask, prefill_chunk: options of the search's `start`.
        room: new tokens of each row that the cache has room for, if it is to grow with them. It then doubles when it is
            full, so that early steps read no empty room, and few programs are compiled.
        widen: how it grows: (cache, n) -> cache with room for n more tokens of each row; the same function each time.

    Attributes:
        done: [B] bool, rows that need no more steps.

    Example:
        >>> from tfm.decoding import Greedy
        >>> def make_step(fixed, rows):  # the next token is the last one plus 1
        ...     return lambda tokens, cache: (jax.nn.one_hot(tokens + 1, 9), cache)
        >>> session = Session(Greedy(eos_ids=(8,)), make_step, None, None, None, jnp.array([[1], [6]]), max_length=5)
        >>> [found.ids[:, : found.lengths.max()].tolist() for found in session.stream(2)]
        [[[2, 3], [7, 8]], [[2, 3, 4, 5], [7, 8, 0, 0]], [[2, 3, 4, 5, 6], [7, 8, 0, 0, 0]]]
    """

    def __init__(
        self,
        search: Search,
        make_step: MakeStep,
        fixed: Any,
        rows: Any,
        cache: Cache,
        prompt: jax.Array,
        *,
        max_length: jax.typing.ArrayLike,
        buffer_length: int | None = None,
        seen: jax.typing.ArrayLike | None = None,
        keys: jax.Array | None = None,
        source_mask: jax.typing.ArrayLike | None = None,
        prefill_chunk: int | None = None,
        room: int | None = None,
        widen: Widen | None = None,
    ) -> None:
        limit = np.asarray(max_length, np.int32)
        if limit.min(initial=1) < 1:
            raise ValueError(f"max_length is {limit.min()}: expected at least 1")
        self.length = int(limit.max()) if buffer_length is None else buffer_length
        static = (("buffer_length", self.length), ("prefill_chunk", prefill_chunk))
        arrays: dict[str, Any] = {"max_length": jnp.broadcast_to(jnp.asarray(limit), (len(prompt),))}
        given: dict[str, Any] = {"seen": seen, "keys": keys, "source_mask": source_mask}
        arrays |= {name: value for name, value in given.items() if value is not None}
        self._search, self._make_step, self._fixed, self._rows = search, make_step, fixed, rows
        self._state = _start(search, make_step, static, fixed, rows, cache, prompt, arrays)
        self._numbers = np.arange(len(prompt))  # which row of the result each row of the state is
        self._left: Hypotheses | None = None  # results at the last compaction, of the rows that left
        self._room, self._widen = self.length if room is None else room, widen
        self.done = self._rows_done()

    @property
    def size(self) -> int:
        """How many rows the next step computes."""
        return len(self._numbers)

    def advance(self, steps: int) -> None:
        """At most `steps` more tokens in every row that is not done."""
        until = min(int(self._state.count) + steps, self.length)
        self._make_room(until)
        self._state = _advance(self._search, self._make_step, self._fixed, self._rows, self._state, until)
        self.done[self._numbers] = self._rows_done()

    def _make_room(self, tokens: int) -> None:
        """Let the cache grow until it has room for so many new tokens."""
        room = self._room
        while room < tokens:
            room = min(2 * room, self.length)
        if room > self._room and self._widen is not None:
            self._state, self._room = _widen(self._widen, self._state, room - self._room), room

    def stop(self, rows: np.ndarray) -> None:
        """Decode the rows marked in [B] bool no further; what they have so far stays."""
        self.done = self.done | rows
        done = np.repeat(self.done[self._numbers], len(self._state.done) // self.size)
        self._state = replace(self._state, done=jnp.asarray(done))

    def compact(self, sizes: Sequence[int]) -> None:
        """Let done rows leave if the rest fits one of `sizes` smaller than the batch is now."""
        alive = np.flatnonzero(~self.done[self._numbers])
        size = min((s for s in sizes if s >= len(alive)), default=self.size)
        if size >= self.size or not len(alive):
            return
        self._left = self.result()
        fill = np.flatnonzero(self.done[self._numbers])[: size - len(alive)]
        kept = np.concatenate([alive, fill])
        self._state, self._rows = _keep(self._search, self._state, self._rows, jnp.asarray(kept))
        self._numbers = self._numbers[kept]

    def _rows_done(self) -> np.ndarray:
        """Which rows of the state are done: those of which all groups are, where a search has groups."""
        return np.all(np.asarray(self._state.done).reshape(self.size, -1), axis=1)

    def result(self) -> Hypotheses:
        """What was found so far for all B rows, as NumPy arrays."""
        now = jax.device_get(_result(self._search, self._state))
        if self._left is None:
            return now

        def merge(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            merged = np.array(old)
            merged[self._numbers] = new
            return merged

        return jax.tree.map(merge, self._left, now)

    def stream(self, steps: int) -> Iterator[Hypotheses]:
        """What was found so far, first after `steps` tokens, then every `steps` tokens until all rows are done."""
        _check_steps(steps)
        self.advance(steps - 1)
        yield self.result()
        while not self.done.all():
            self.advance(steps)
            yield self.result()

    def run(self, steps: int = 16, sizes: Sequence[int] = (),
            stopped: Callable[[], bool] = lambda: False) -> Hypotheses:
        """Decode to the end; where a batch may shrink to one of `sizes`, done rows leave it every `steps` tokens.

        Where `stopped()`, asked as often, says so, no further than now.
        """
        _check_steps(steps)
        while not (self.done.all() or stopped()):
            self.advance(steps if any(size < self.size for size in sizes) else self.length)
            self.compact(sizes)
        return self.result()


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}: expected at least 1, else decoding would never end")
