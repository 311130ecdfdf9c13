"""How gradients reach the layers of a stack at initialisation, Post-LN against Pre-LN, and what warmup does."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tfm.analysis.fit import fit
from tfm.config import ModelConfig, NormPosition
from tfm.models import build, init_params

VOCABULARY, SPAN = 16, 8


def stack_config(norm_position: NormPosition, depth: int, width: int) -> ModelConfig:
    """A decoder as Xiong et al. analyse it: one head, d_ff = d, no dropout, logits of their own matrix."""
    return ModelConfig(vocab_size=VOCABULARY, d_model=width, d_ff=width, num_heads=1, encoder_layers=0,
                       decoder_layers=depth, norm_position=norm_position, dropout_rate=0.0, tie_embeddings="none",
                       position="sinusoidal", scan_layers=True)


def gradient_norms(norm_position: NormPosition, depth: int, width: int, *, draws: int = 8, rows: int = 8,
                   length: int = 16) -> list[float]:
    """Norm of the gradient of each layer's second feed-forward matrix at initialisation, on random tokens.

    Args:
        norm_position: "post" or "pre".
        depth: layers.
        width: d_model, and d_ff.
        draws: random parameters and tokens that the mean is taken over.
        rows: sequences.
        length: tokens of each.

    Returns:
        Frobenius norms, first layer first.

    Reference: Xiong et al. (2020), "On Layer Normalization in the Transformer Architecture", section 3.3, figure 3.
    """
    config = stack_config(norm_position, depth, width)

    def norms(key: jax.Array) -> jax.Array:
        init_key, token_key = jax.random.split(key)
        tokens = jax.random.randint(token_key, (rows, length + 1), 0, VOCABULARY)
        gradient = jax.grad(partial(next_token_loss, config))(init_params(config, init_key), tokens)
        kernels = gradient["decoder"]["layers"]["feed_forward"]["down"]["kernel"]  # [depth, F, M]
        return jnp.linalg.norm(kernels, axis=(1, 2))

    keys = jax.random.split(jax.random.key(0), draws)
    return [float(norm) for norm in jax.jit(lambda k: jax.lax.map(norms, k).mean(0))(keys)]


def next_token_loss(config: ModelConfig, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of tokens [B, T + 1] from those before them, in nats."""
    logits = build(config).apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def draw_repeats(key: jax.Array, rows: int = 32) -> jax.Array:
    """Random sequences of `SPAN` tokens, each written twice: the second half can be known, the first cannot."""
    half = jax.random.randint(key, (rows, SPAN), 0, VOCABULARY)
    return jnp.concatenate([half, half], axis=1)


def repeat_loss(config: ModelConfig, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy over the second half; a model that has learnt nothing has ln 16 = 2.77."""
    logits: Any = build(config).apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, SPAN - 1 :], tokens[:, SPAN:]).mean()


def learn_repeats(norm_position: NormPosition, depth: int, *, warmup: int, steps: int, width: int = 32,
                  peak: float = 5e-3, seed: int = 0) -> list[float]:
    """Losses while a decoder learns to repeat, with so many updates of linear warmup and then a constant rate.

    Args:
        norm_position: "post" or "pre".
        depth: layers.
        warmup: updates until the peak; 0: none.
        steps: updates by Adam.
        width: d_model, and d_ff.
        peak: learning rate.
        seed: of parameters and batches.

    Returns:
        loss before each update.

    Reference: Xiong et al. (2020), sections 3.1 and 4.
    """
    config = stack_config(norm_position, depth, width)
    schedule = optax.linear_schedule(peak / max(warmup, 1), peak, warmup) if warmup else peak
    _, losses = fit(partial(repeat_loss, config), init_params(config, jax.random.key(seed)), draw_repeats,
                    steps=steps, seed=seed, learning_rate=schedule)
    return [float(loss) for loss in losses]


def growth(sizes: list[int], values: list[float]) -> float:
    """Exponent a of the power law value ~ size^a through the points, by least squares on logarithms.

    Example:
        >>> round(growth([1, 4, 16], [3.0, 6.0, 12.0]), 3)
        0.5
    """
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
