"""Fit small models on data that is drawn as it is needed: one compiled loop for an experiment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

Batch = Any
Loss = Callable[[Any, Batch], jax.Array]
"""(params, batch) -> mean loss."""


def fit(loss: Loss, params: Any, draw: Callable[[jax.Array], Batch], *, steps: int, seed: int = 0,
        learning_rate: float | optax.Schedule = 1e-3,
        optimizer: Callable[[Any], optax.GradientTransformation] = optax.adam) -> tuple[Any, jax.Array]:
    """Minimise a loss over fresh batches.

    Args:
        loss: (params, batch) -> scalar.
        params: where to start.
        draw: random key -> batch, traceable.
        steps: updates.
        seed: of the batches.
        learning_rate: number or schedule.
        optimizer: learning rate -> optax transformation.

    Returns:
        params, and the loss before each update [steps].

    Example:
        >>> draw = lambda key: jax.random.normal(key, (16,))
        >>> params, losses = fit(lambda w, x: jnp.mean((w * x - 2 * x) ** 2), jnp.zeros(()), draw, steps=200,
        ...                      learning_rate=0.1)
        >>> round(float(params), 2), len(losses)
        (2.0, 200)
    """
    return fit_average(loss, params, draw, steps=steps, average_from=steps, seed=seed, learning_rate=learning_rate,
                       optimizer=optimizer)[::2]


def fit_average(loss: Loss, params: Any, draw: Callable[[jax.Array], Batch], *, steps: int, average_from: int,
                seed: int = 0, learning_rate: float | optax.Schedule = 1e-3,
                optimizer: Callable[[Any], optax.GradientTransformation] = optax.adam) -> tuple[Any, Any, jax.Array]:
    """`fit`, and the mean of the parameters after the updates from number `average_from` on.

    Returns:
        (last params, mean params, losses [steps]); zeros as the mean where `average_from` is not below `steps`.
    """
    return _fit(loss, params, draw, steps, average_from, jax.random.key(seed), optimizer(learning_rate))


@partial(jax.jit, static_argnums=(0, 2, 3, 4, 6))
def _fit(loss: Loss, params: Any, draw: Callable[[jax.Array], Batch], steps: int, average_from: int, key: jax.Array,
         optimizer: optax.GradientTransformation) -> tuple[Any, Any, jax.Array]:
    count = max(steps - average_from, 1)

    def step(carry: tuple[Any, Any, Any], number: jax.Array) -> tuple[tuple[Any, Any, Any], jax.Array]:
        params, state, mean = carry
        value, gradient = jax.value_and_grad(loss)(params, draw(jax.random.fold_in(key, number)))
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        mean = jax.tree.map(lambda m, p: m + jnp.where(number >= average_from, p / count, 0.0), mean, params)
        return (params, state, mean), value

    start = params, optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
    (params, _, mean), losses = jax.lax.scan(step, start, jnp.arange(steps))
    return params, mean, losses
