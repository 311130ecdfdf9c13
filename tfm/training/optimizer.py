"""The optimizer and its learning rate: an `OptimizerConfig` as an optax chain."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tfm.config import Config, OptimizerConfig
from tfm.parallel.rules import path_name

DECAYED = (r"(^|/)(kernel|lora_[ab])$", r"(^|/)table$")
"""Paths of the parameters that weight decay acts on: matrices and embeddings, never norms and biases."""
STACKED = "layers"
"""Part of the path of parameters with the layer as first axis (`tfm.models.scanned`)."""


def warmup_inverse_sqrt(d_model: int, warmup_steps: int) -> optax.Schedule:
    """The paper's learning rate: it rises for `warmup_steps` updates, then falls with the root of the step.

        rate(step) = d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5),    step = count + 1

    Args:
        d_model: width of the model.
        warmup_steps: updates until the peak.

    Returns:
        schedule: count of updates done before this one (0 is the paper's step 1) -> rate.

    Raises:
        ValueError: a width or a number of steps that is not above 0.

    Example:
        >>> rate = warmup_inverse_sqrt(512, 4000)
        >>> f"{float(rate(0)):.4e} {float(rate(3999)):.4e}"
        '1.7469e-07 6.9877e-04'

    Reference: Vaswani et al., "Attention Is All You Need", 2017, equation 3.
    """
    if d_model <= 0 or warmup_steps <= 0:
        raise ValueError(f"d_model={d_model} and warmup_steps={warmup_steps} must both be above 0")

    def rate(count: Any) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1.0
        return d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return rate


def make_schedule(config: Config) -> optax.Schedule:
    """The learning rate of a config as a function of the updates done before.

    Every schedule takes count 0 as its step 1, so that no update has a rate of 0.
    """
    optimizer, steps = config.optimizer, config.train.steps
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if optimizer.schedule == "warmup_inverse_sqrt":
        paper = warmup_inverse_sqrt(config.model.d_model, warmup)
        return lambda count: peak * paper(count)
    if optimizer.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif optimizer.schedule == "warmup_cosine":
        after = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), optimizer.final_learning_rate / peak)
    else:
        after = optax.linear_schedule(peak, optimizer.final_learning_rate, max(steps - warmup, 1))
    whole = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
    return lambda count: whole(count + 1)


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optax chain of a config: clipping, the update rule, weight decay, the learning rate.

    Args:
        config: which rule, with which numbers.
        schedule: updates done before -> learning rate.

    Returns:
        optax transformation.
    """
    c = config
    rules = {
        "adam": lambda: optax.adam(schedule, c.beta1, c.beta2, c.epsilon),
        "adamw": lambda: optax.adamw(schedule, c.beta1, c.beta2, c.epsilon, weight_decay=c.weight_decay,
                                     mask=decay_mask),
        "adafactor": lambda: adafactor(schedule, c.weight_decay),
        "sgd": lambda: optax.sgd(schedule, momentum=c.beta1 or None),
    }
    rule = rules[config.name]()
    return rule if c.clip_norm is None else optax.chain(clip_by_global_norm(c.clip_norm), rule)


def global_norm(tree: Any) -> jax.Array:
    """The root of the sum of all squares, in float32 at least: bfloat16 would lose, and float16 overflow, the sum.

    Example:
        >>> float(global_norm([jnp.ones(1, jnp.bfloat16)] * 400))
        20.0
    """
    return optax.global_norm(jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree))


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """optax's rule with the norm of `global_norm`: g <- g min(1, most / |g|)."""

    def clip(updates: Any, _: Any) -> Any:
        norm = global_norm(updates)
        return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm.astype(g.dtype) * most), updates)

    return optax.stateless(clip)


def adafactor(schedule: optax.Schedule, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """Adafactor by optax's parts, with two changes: stacked layers are clipped and scaled one by one, so that
    `scan_layers` changes nothing; and weights decay in proportion to the learning rate, as AdamW's do.

        W <- W - rate (max(1e-3, RMS(W)) U / max(1, RMS(U)) + weight_decay W),    U = gradient / sqrt(factored estimate)

    Args:
        schedule: updates done before -> learning rate.
        weight_decay: for the parameters of `decay_mask`.

    Returns:
        optax transformation.

    Reference: Shazeer and Stern, "Adafactor", 2018, algorithm 4.
    """
    return optax.chain(optax.scale_by_factored_rms(), _by_layer(optax.clip_by_block_rms(1.0)),
                       _by_layer(optax.scale_by_param_block_rms()),
                       optax.add_decayed_weights(weight_decay, decay_mask), optax.scale_by_learning_rate(schedule))


def _by_layer(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """A rule without state that treats each array by itself; of stacked layers, each layer's part of it."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
            def run(u: jax.Array, p: jax.Array) -> Any:
                return rule.update(u, state, p)[0]

            return (jax.vmap(run) if STACKED in path_name(path).split("/") else run)(update, param)

        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformation(rule.init, update)


def decay_mask(params: Any) -> Any:
    """True for the parameters that weight decay acts on (`DECAYED`).

    Example:
        >>> decay_mask({"norm": {"scale": 1.0}, "query": {"kernel": 1.0, "bias": 1.0}})
        {'norm': {'scale': False}, 'query': {'bias': False, 'kernel': True}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(re.search(pattern, path_name(path)) for pattern in DECAYED), params)
