"""What a model learns from corrupted text: BERT's 80/10/10, and T5's short targets against BART's whole ones."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from tfm.analysis.costs import training_flops
from tfm.analysis.extrapolation import VOCABULARY, draw_text
from tfm.analysis.fit import fit
from tfm.config import ModelConfig
from tfm.models import build, init_params

LENGTH, SPAN, ROWS = 24, 4, 32
MASK, START = VOCABULARY, VOCABULARY + 1
RECIPES = {"80/10/10": (0.8, 0.1, 0.1), "mask only": (1.0, 0.0, 0.0), "random only": (0.0, 1.0, 0.0)}
"""Shares of the chosen tokens that become MASK, become any token, and stay."""
Objective = Literal["T5", "BART"]
ENCODER = ModelConfig(vocab_size=VOCABULARY + 1, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=0,
                      norm_position="pre", dropout_rate=0.0, position="t5", t5_buckets=16, t5_max_distance=32)
PAIR = ModelConfig(vocab_size=VOCABULARY + 2, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=2,
                   norm_position="pre", dropout_rate=0.0, position="t5", t5_buckets=16, t5_max_distance=32)
Batch = dict[str, jax.Array]


def draw_masked(recipe: str, key: jax.Array, rows: int = ROWS) -> Batch:
    """Texts of which 15 % of the tokens are chosen and corrupted by a recipe of `RECIPES`."""
    text_key, chosen_key, kind_key, random_key = jax.random.split(key, 4)
    text = draw_text(text_key, rows, LENGTH - 1)
    chosen = jax.random.bernoulli(chosen_key, 0.15, text.shape)
    kind = jax.random.uniform(kind_key, text.shape)
    mask, random, _ = RECIPES[recipe]
    other = jax.random.randint(random_key, text.shape, 0, VOCABULARY)
    corrupted = jnp.where(kind < mask, MASK, jnp.where(kind < mask + random, other, text))
    return {"tokens": jnp.where(chosen, corrupted, text), "text": text, "chosen": chosen}


def masked_loss(params: Any, batch: Batch) -> jax.Array:
    """Mean cross-entropy of the chosen tokens."""
    logits = build(ENCODER).apply({"params": params}, batch["tokens"], method="token_logits")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"])
    return jnp.sum(losses * batch["chosen"]) / jnp.maximum(batch["chosen"].sum(), 1)


def learn_masked(recipe: str, *, steps: int, seed: int = 0) -> dict[str, float]:
    """Train an encoder by a recipe; then look at it on texts that it reads as BERT's users give them.

    Args:
        recipe: of `RECIPES`.
        steps: updates by Adam.
        seed: of parameters and texts.

    Returns:
        "masked": loss of tokens that are masked; "visible": share of the unmasked tokens of a clean text that the
        output names: what the hidden vectors still know of their own token; "noticed": share of the wrong tokens in
        a text that the output does not repeat.

    Reference: Devlin et al. (2019), section 3.1 and appendix C.2.
    """
    params, _ = fit(masked_loss, init_params(ENCODER, jax.random.key(seed)), partial(draw_masked, recipe),
                    steps=steps, seed=seed, learning_rate=3e-3)
    masked = draw_masked("mask only", jax.random.key(77), 256)
    wrong = draw_masked("random only", jax.random.key(78), 256)

    @jax.jit
    def look(params: Any) -> tuple[jax.Array, ...]:
        guess = partial(build(ENCODER).apply, {"params": params}, method="token_logits")
        clean: Any = guess(masked["text"])
        spoiled: Any = guess(wrong["tokens"])
        changed = wrong["tokens"] != wrong["text"]
        repeated = (spoiled.argmax(-1) == wrong["tokens"]) & changed
        return (masked_loss(params, masked), jnp.mean(clean.argmax(-1) == masked["text"]),
                1 - repeated.sum() / changed.sum())

    return dict(zip(("masked", "visible", "noticed"), (float(x) for x in look(params)), strict=True))


def draw_spans(objective: Objective, key: jax.Array, rows: int = ROWS) -> Batch:
    """Texts with one span of `SPAN` tokens replaced by one MASK in the source.

    T5's target is MASK and the span; BART's is the whole text. `weights` marks the target tokens that are learnt,
    `span` those of the span.
    """
    text_key, place_key = jax.random.split(key)
    text = draw_text(text_key, rows, LENGTH - 1)
    begin = jax.random.randint(place_key, (rows, 1), 4, LENGTH - SPAN - 4)
    places = jnp.arange(LENGTH - SPAN + 1)
    shifted = jnp.take_along_axis(text, jnp.minimum(places + (places > begin) * (SPAN - 1), LENGTH - 1), 1)
    source = jnp.where(places == begin, MASK, shifted)
    if objective == "T5":
        labels = jnp.take_along_axis(text, begin + jnp.arange(SPAN), 1)
        first, span = jnp.full((rows, 1), MASK), jnp.ones_like(labels, bool)
    else:
        labels, first = text, jnp.full((rows, 1), START)
        span = (jnp.arange(LENGTH) >= begin) & (jnp.arange(LENGTH) < begin + SPAN)
    target = jnp.concatenate([first, labels[:, :-1]], axis=1)
    return {"source": source, "target": target, "labels": labels, "span": span}


def span_losses(params: Any, batch: Batch) -> jax.Array:
    """Cross-entropy of every target token."""
    logits = build(PAIR).apply({"params": params}, batch["source"], batch["target"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def steps_of_equal_compute(steps: int) -> dict[Objective, int]:
    """Updates of each objective that cost what `steps` of BART's cost, by `training_flops`."""
    source = LENGTH - SPAN + 1
    cost = {objective: sum(training_flops(PAIR, ROWS, source, target_length=length).values())
            for objective, length in (("T5", SPAN), ("BART", LENGTH))}
    return {"T5": round(steps * cost["BART"] / cost["T5"]), "BART": steps}


def learn_spans(objective: Objective, *, steps: int, seed: int = 0) -> float:
    """Loss of the span's tokens on fresh texts after so many updates.

    Reference: Raffel et al. (2020), section 3.3.4; Lewis et al. (2020), section 2.2 (text infilling).
    """
    params, _ = fit(lambda params, batch: span_losses(params, batch).mean(), init_params(PAIR, jax.random.key(seed)),
                    partial(draw_spans, objective), steps=steps, seed=seed, learning_rate=3e-3)
    batch = draw_spans(objective, jax.random.key(79), 256)
    losses = jax.jit(span_losses)(params, batch)
    return float(jnp.sum(losses * batch["span"]) / batch["span"].sum())
