"""A toy language pair for experiments on translation: small enough to learn in a minute, uncertain enough to decode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.analysis.fit import fit_average
from tfm.config import ModelConfig
from tfm.models import build, init_params
from tfm.ops.losses import label_smoothed_cross_entropy
from tfm.training.optimizer import warmup_inverse_sqrt

PAD, BOS, EOS, FIRST = 0, 1, 2, 3
WORDS, ROWS, SHORTEST, LONGEST = 12, 64, 3, 8
RICH = 0.6
"""Share of the sentences in the rich dialect, where each word has two translations, as likely as each other."""
BASE = ModelConfig(vocab_size=FIRST + 3 * WORDS, d_model=32, d_ff=128, num_heads=4, encoder_layers=2, decoder_layers=2,
                   dropout_rate=0.0, norm_position="pre")
Batch = dict[str, jax.Array]


def draw_pairs(key: jax.Array, rows: int = ROWS) -> Batch:
    """Sentences of 3 to 8 words; their translation is the reversed sentence, in one of two dialects.

    The plain dialect has one word for each, the rich one two. As most sentences are rich, a greedy search begins in the
    rich dialect; the likeliest translation is the plain one, as it has no further choices.

    Returns:
        source [rows, 9], source_mask, target (decoder's input), labels and weights, as `tfm.data` gives them.
    """
    length_key, word_key, dialect_key, choice_key = jax.random.split(key, 4)
    lengths = jax.random.randint(length_key, (rows, 1), SHORTEST, LONGEST + 1)
    places = jnp.arange(LONGEST + 1)
    words = jax.random.randint(word_key, (rows, LONGEST + 1), 0, WORDS)
    source = jnp.where(places < lengths, FIRST + words, jnp.where(places == lengths, EOS, PAD))
    backwards = jnp.take_along_axis(words, (lengths - 1 - places) % (LONGEST + 1), axis=1)
    rich = jax.random.bernoulli(dialect_key, RICH, (rows, 1))
    choice = jax.random.randint(choice_key, backwards.shape, 1, 3)
    labels = FIRST + backwards + WORDS * rich * choice
    labels = jnp.where(places < lengths, labels, jnp.where(places == lengths, EOS, PAD))
    target = jnp.concatenate([jnp.full((rows, 1), BOS), labels[:, :-1]], axis=1)
    return {"source": source, "source_mask": places <= lengths, "target": target, "labels": labels,
            "weights": (places <= lengths).astype(jnp.float32)}


def smoothed_loss(config: ModelConfig, smoothing: float, params: Any, batch: Batch) -> jax.Array:
    """Mean label-smoothed cross-entropy of the target tokens; dropout follows the batch."""
    key = jax.random.fold_in(jax.random.key(0), batch["source"].sum())
    logits: Any = build(config).apply({"params": params}, batch["source"], batch["target"],
                                      source_mask=batch["source_mask"], deterministic=config.dropout_rate == 0.0,
                                      rngs={"dropout": key})
    losses = label_smoothed_cross_entropy(logits, batch["labels"], smoothing=smoothing, weights=batch["weights"])
    return losses.sum() / batch["weights"].sum()


def train_pairs(config: ModelConfig, *, smoothing: float, steps: int, seed: int = 0) -> tuple[Any, Any]:
    """(last parameters, their mean over the last tenth of the updates), by Adam and the paper's schedule."""
    paper = warmup_inverse_sqrt(BASE.d_model, warmup_steps=100)
    last, mean, _ = fit_average(partial(smoothed_loss, config, smoothing), init_params(config, jax.random.key(seed)),
                                draw_pairs, steps=steps, average_from=steps - steps // 10, seed=seed,
                                learning_rate=lambda count: 0.17 * paper(count))
    return last, mean


def token_figures(config: ModelConfig, params: Any, *, rows: int = 512, seed: int = 1234) -> dict[str, float]:
    """On fresh pairs: perplexity (no smoothing), share of tokens of which the best guess is right, and its probability.

    No model can have a perplexity below 1.58 here: the dialect costs 0.673 nats a sentence, each choice of the rich one
    0.693, the end of a sentence nothing, and sentences have 5.5 words on average.
    """
    batch = draw_pairs(jax.random.key(seed), rows)

    @jax.jit
    def run(params: Any) -> tuple[jax.Array, ...]:
        logits: Any = build(replace(config, dropout_rate=0.0)).apply(
            {"params": params}, batch["source"], batch["target"], source_mask=batch["source_mask"])
        losses = label_smoothed_cross_entropy(logits, batch["labels"], weights=batch["weights"])
        right = (logits.argmax(-1) == batch["labels"]) * batch["weights"]
        sure = jax.nn.softmax(logits).max(-1) * batch["weights"]
        total = batch["weights"].sum()
        return jnp.exp(losses.sum() / total), right.sum() / total, sure.sum() / total

    perplexity, accuracy, confidence = run(params)
    return {"perplexity": float(perplexity), "accuracy": float(accuracy), "confidence": float(confidence)}


def unseen_rows(rows: int = 200, seed: int = 4321) -> tuple[list[list[int]], list[list[int]]]:
    """Sources (with EOS) and references (without) as lists of ids, for decoding."""
    batch = {name: np.asarray(x) for name, x in draw_pairs(jax.random.key(seed), rows).items()}
    sources = [row[mask].tolist() for row, mask in zip(batch["source"], batch["source_mask"], strict=True)]
    references = [row[row > EOS].tolist() for row in batch["labels"]]
    return sources, references


def smoothing_gradient_error(smoothing: float, *, classes: int = 50, tokens: int = 20, seed: int = 0) -> float:
    """Greatest difference between the loss's gradient by the logits and p - q', q' = (1 - e) one-hot + e / V."""
    logit_key, target_key = jax.random.split(jax.random.key(seed))
    logits = 3.0 * jax.random.normal(logit_key, (tokens, classes))
    targets = jax.random.randint(target_key, (tokens,), 0, classes)
    gradient = jax.grad(lambda z: label_smoothed_cross_entropy(z, targets, smoothing=smoothing).sum())(logits)
    wanted = (1 - smoothing) * jax.nn.one_hot(targets, classes) + smoothing / classes
    return float(jnp.abs(gradient - (jax.nn.softmax(logits) - wanted)).max())
