"""One update of the parameters: pure functions (state, batch) -> (state, metrics)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from tfm.models.adapters import join_params, split_params
from tfm.parallel.exchange import wait_for_all
from tfm.parallel.kept_programs import KeptPrograms
from tfm.training.loss import Batch, LossFn, Params
from tfm.training.optimizer import global_norm


class TrainState(struct.PyTreeNode):
    """All that changes while training; with the data's position it is the whole run."""

    step: jax.Array
    """int32: updates done."""
    params: Params
    opt_state: Any
    ema: Params | None
    """Moving average of the parameters, or None; those that are trained are kept in float32."""
    key: jax.Array
    """Key data from which each step's dropout key is folded."""


Metrics = dict[str, jax.Array]
SIGNALS: dict[str, Callable[[jax.Array], jax.Array]] = {"stop": jnp.max, "count": jnp.sum}
"""What several processes tell each other with a batch, one number a row."""
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def init_state(init: Callable[[jax.Array], Params], optimizer: optax.GradientTransformation, seed: int, *,
               ema: bool = False, trainable: str | None = None) -> TrainState:
    """The state before the first update. Pure: jit it with out_shardings so that no array exists unsharded.

    Args:
        init: random key -> params.
        optimizer: optax transformation.
        seed: seed of the initialisation and of dropout.
        ema: whether a moving average is kept; it starts at the parameters.
        trainable: pattern of the paths of the parameters that are trained, the only ones that the optimizer keeps
            numbers for; None: all.

    Returns:
        state.

    Raises:
        ValueError: no parameter matches `trainable`.
    """
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    params = init(init_key)
    chosen, frozen = split_params(params, trainable)
    average = join_params(jax.tree.map(_wide_copy, chosen), jax.tree.map(jnp.copy, frozen)) if ema else None
    if not chosen:
        raise ValueError(f"no parameter has a path that matches {trainable!r}: there is nothing to train")
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(chosen), average,
                      jax.random.key_data(dropout_key))


def _wide_copy(x: jax.Array) -> jax.Array:
    """A copy in float32 where the type is narrower: bfloat16 would round away what one update adds to an average."""
    rounded = jax.lax.optimization_barrier(x)  # else XLA may take the numbers before their rounding
    return jnp.array(rounded, jnp.promote_types(x.dtype, jnp.float32))


def make_train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation, *, accumulate: int = 1,
                    ema_decay: float | None = None, trainable: str | None = None) -> StepFn:
    """The function of one update.

        gradient = (sum over micro-batches of d loss / d params) / (sum over micro-batches of weight)

    so that `accumulate` changes the memory a step needs and nothing else, up to rounding (and other dropout draws).

    Args:
        loss_fn: as `tfm.training.loss.make_loss` makes it.
        optimizer: optax transformation.
        accumulate: micro-batches into which the rows of a batch are split; it must divide their number.
        ema_decay: decay of the parameters' moving average, or None.
        trainable: as for `init_state`; gradients are taken for these parameters alone.

    Returns:
        step: (state, batch) -> (state, {"loss", "weight": sums, "gradient_norm"}). Where the batch has "stop" [B], the
        metrics have its maximum: so all processes learn at the same step that one of them was asked to stop; where it
        has "count" [B], they have its sum.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        signals = {name: reduce(batch[name]) for name, reduce in SIGNALS.items() if name in batch}
        batch = {name: x for name, x in batch.items() if name not in SIGNALS}
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        trained, frozen = split_params(state.params, trainable)

        def loss_of_trained(params: Params, rows: Batch, key: jax.Array | None) -> dict[str, jax.Array]:
            return loss_fn(join_params(params, frozen), rows, key)

        gradients, sums = _summed_gradients(loss_of_trained, trained, batch, key, accumulate)
        weight = jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
        with jax.named_scope("optimizer"):
            gradient_norm = global_norm(gradients) / weight
            # A division would be written out for the moments to read; a product becomes a part of what reads it.
            gradients = jax.tree.map(lambda g: g * (1.0 / weight).astype(g.dtype), gradients)
            updates, opt_state = optimizer.update(gradients, state.opt_state, trained)
            trained = optax.apply_updates(trained, updates)
            params = join_params(trained, frozen)
        ema = state.ema
        if ema_decay is not None:
            averaged, unchanged = split_params(ema or {}, trainable)
            averaged = jax.tree.map(lambda old, new: ema_decay * old + (1.0 - ema_decay) * new.astype(old.dtype),
                                    averaged, trained)
            ema = join_params(averaged, unchanged)
        metrics = sums | signals | {"gradient_norm": gradient_norm}
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=ema), metrics

    return step


def make_eval_step(loss_fn: LossFn) -> Callable[[Params, Batch], Metrics]:
    """The function of one evaluation step: (params, batch) -> the loss function's sums, without dropout."""
    return lambda params, batch: loss_fn(params, batch, None)


def pad_rows(batch: Mapping[str, np.ndarray], multiple: int) -> dict[str, np.ndarray]:
    """Add rows of zeros, which are padding without weight, until the number of rows is a multiple.

    Example:
        >>> pad_rows({"weights": np.ones((3, 2))}, 2)["weights"].shape
        (4, 2)
    """
    missing = -len(next(iter(batch.values()))) % multiple
    if missing == 0:
        return dict(batch)
    return {name: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}


class ByShape:
    """A jitted function compiled once for each set of argument shapes, with the time and the programs kept."""

    def __init__(self, jitted: Any, kept: KeptPrograms | None = None) -> None:
        """A program of an earlier start is taken from `kept`, without tracing."""
        self._jitted, self._kept = jitted, kept
        self.programs: dict[Any, Any] = {}
        self._begun: dict[Any, Future[Any]] = {}
        self.compile_seconds = 0.0

    def __call__(self, tree: Any, batch: Mapping[str, jax.Array]) -> Any:
        return self.compiled(tree, batch)(tree, batch)

    def begin(self, tree: Any, batch: Mapping[str, jax.Array]) -> None:
        """Trace for these arguments, or their shapes, and go on to compile in a thread; `compiled` waits for it."""
        worker = ThreadPoolExecutor(1)
        self._begun[_shapes(batch)] = worker.submit(self._find(tree, batch) or self._lower(tree, batch))
        worker.shutdown(wait=False)

    def compiled(self, tree: Any, batch: Mapping[str, jax.Array]) -> Any:
        """The program for these arguments; shapes of `tree` are the same in each call."""
        shapes = _shapes(batch)
        if shapes not in self.programs:
            begun = self._begun.pop(shapes, None)
            find = begun.result if begun else self._find(tree, batch)
            self.programs[shapes] = (find and find()) or self._lower(tree, batch)()
            wait_for_all("compiled")
        return self.programs[shapes]

    def _find(self, *arguments: Any) -> Callable[[], Any] | None:
        """What loads a kept program."""
        find = self._kept.find(arguments) if self._kept else None
        return self._timed(find) if find else None

    def _lower(self, *arguments: Any) -> Callable[[], Any]:
        """Trace; what compiles is given back."""
        lowered = self._timed(lambda: self._jitted.lower(*arguments))()
        kept = self._kept
        return self._timed(lambda: kept.compile(lowered, arguments) if kept else lowered.compile())

    def _timed(self, work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            start = time.perf_counter()
            result = work()
            self.compile_seconds += time.perf_counter() - start
            return result

        return run


def _shapes(batch: Mapping[str, jax.Array]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((name, x.shape, str(x.dtype)) for name, x in sorted(batch.items()))


def _summed_gradients(loss_fn: LossFn, params: Params, batch: Batch, key: jax.Array,
                      accumulate: int) -> tuple[Params, Metrics]:
    """Gradients of the summed loss and the loss function's sums, over all micro-batches; added up in float32."""

    def value(p: Params, rows: Batch, k: jax.Array) -> tuple[jax.Array, Metrics]:
        sums = loss_fn(p, rows, k)
        return sums["loss"], sums

    gradient = jax.grad(value, has_aux=True)
    if accumulate == 1:
        return gradient(params, batch, key)

    def add(total: Any, micro: Any) -> tuple[Any, None]:
        rows, number = micro
        found = gradient(params, rows, jax.random.fold_in(key, number))
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, found), None

    micro_batches = jax.tree.map(lambda x: _interleave(x, accumulate), dict(batch))
    shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], micro_batches), key)
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)
    total = jax.lax.scan(add, start, (micro_batches, jnp.arange(accumulate)))[0]
    return jax.tree.map(lambda x, s: x.astype(s.dtype), total, shapes)


def _interleave(x: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...] where part i holds rows i, i + parts, ...: each device keeps its rows."""
    return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
