"""Train short, test long: one small decoder for each position scheme, on local text and on far retrieval."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from tfm.analysis.fit import fit
from tfm.config import ModelConfig, Position
from tfm.models import build, init_params

SCHEMES: tuple[Position, ...] = ("sinusoidal", "learned", "t5", "rotary", "alibi", "none")
Task = Literal["text", "retrieval"]
VOCABULARY, TABLES, NEEDLES, LONGEST = 16, 4, 8, 64
ROWS, TRAINED = 32, 32


def scheme_config(scheme: Position) -> ModelConfig:
    """A decoder of two layers; only the position scheme differs."""
    return ModelConfig(vocab_size=VOCABULARY + 1, d_model=32, d_ff=64, num_heads=4, encoder_layers=0,
                       decoder_layers=2, norm_position="pre", position=scheme, dropout_rate=0.0,
                       max_positions=LONGEST * TRAINED, t5_buckets=16, t5_max_distance=32)


def draw_text(key: jax.Array, rows: int, length: int) -> jax.Array:
    """Sequences [rows, length + 1] of a language with 4 dialects, which the reader must find out.

    In each dialect every token has one follower, which comes with probability 0.7; else any token comes.
    """
    dialect_key, start_key, noise_key, choice_key = jax.random.split(key, 4)
    followers = jax.vmap(partial(jax.random.permutation, x=VOCABULARY))(jax.random.split(jax.random.key(99), TABLES))
    mine = followers[jax.random.randint(dialect_key, (rows,), 0, TABLES)]  # [rows, VOCABULARY]
    start = jax.random.randint(start_key, (rows,), 0, VOCABULARY)
    keep = jax.random.bernoulli(choice_key, 0.7, (length, rows))
    random = jax.random.randint(noise_key, (length, rows), 0, VOCABULARY)

    def follow(token: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        keep, random = drawn
        token = jnp.where(keep, jnp.take_along_axis(mine, token[:, None], 1)[:, 0], random)
        return token, token

    _, rest = jax.lax.scan(follow, start, (keep, random))
    return jnp.concatenate([start[:, None], rest.T], axis=1)


def draw_retrieval(key: jax.Array, rows: int, length: int, first: int = 0, last: int | None = None) -> jax.Array:
    """Sequences [rows, length + 1]: filler with one needle in it, then a question, then the needle as the answer.

    The needle stands between the places `first` and `last`; None: anywhere.
    """
    filler_key, place_key, needle_key = jax.random.split(key, 3)
    tokens = jax.random.randint(filler_key, (rows, length + 1), NEEDLES, VOCABULARY)
    place = jax.random.randint(place_key, (rows,), first, length - 1 if last is None else last)
    needle = jax.random.randint(needle_key, (rows,), 0, NEEDLES)
    tokens = tokens.at[jnp.arange(rows), place].set(needle).at[:, -2].set(VOCABULARY)
    return tokens.at[:, -1].set(needle)


def token_losses(config: ModelConfig, params: Any, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of each token from those before it, [B, T] in nats."""
    logits = build(config).apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def task_loss(config: ModelConfig, task: Task, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean over all tokens of a text, or over the answers."""
    losses = token_losses(config, params, tokens)
    return losses.mean() if task == "text" else losses[:, -1].mean()


def draw_task(task: Task, key: jax.Array) -> jax.Array:
    """A batch of the trained length."""
    return (draw_text if task == "text" else draw_retrieval)(key, ROWS, TRAINED)


def train_scheme(task: Task, scheme: Position, *, steps: int, seed: int = 0) -> Any:
    """Parameters of a decoder trained at `TRAINED` tokens."""
    config = scheme_config(scheme)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    return fit(partial(task_loss, config, task), init_params(config, jax.random.key(seed)), partial(draw_task, task),
               steps=steps, seed=seed, learning_rate=schedule)[0]


def text_losses(scheme: Position, params: Any, times: int, *, tokens: int = 16384, seed: int = 7) -> dict[str, float]:
    """Mean loss on texts of `times` the trained length, in two ways.

    Args:
        scheme: of the decoder.
        params: its parameters.
        times: length of a window over the trained length.
        tokens: read in all.
        seed: of the texts.

    Returns:
        "non-overlapping": over all tokens of separate windows, those at a window's start with little context;
        "sliding": over the last quarter of each window, as windows that move by a quarter score them.

    Reference: Press, Smith and Lewis (2022), section 2 and appendix B (the early token curse).
    """
    length = times * TRAINED
    text = draw_text(jax.random.key(seed), max(tokens // length, 1), length)
    losses = jax.jit(partial(token_losses, scheme_config(scheme)))(params, text)
    return {"non-overlapping": float(losses.mean()), "sliding": float(losses[:, -length // 4 :].mean())}


def retrieval_accuracy(scheme: Position, params: Any, times: int, *, rows: int = 32, seed: int = 7) -> float:
    """Share of needles found in the first eighth of a text of `times` the trained length."""
    length = times * TRAINED
    tokens = draw_retrieval(jax.random.key(seed), rows, length, 0, length // 8)
    logits = jax.jit(build(scheme_config(scheme)).apply)({"params": params}, tokens[:, :-1])
    return float((logits[:, -1].argmax(-1) == tokens[:, -1]).mean())
