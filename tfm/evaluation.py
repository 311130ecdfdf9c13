"""The held-out figures of a run: loss and perplexity for every task, and what each task is judged by besides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.bundle import Bundle
from tfm.config import ModelConfig
from tfm.data import Splits, Texts, make_eval_batches
from tfm.models import build, output_matrix
from tfm.parallel.exchange import spread
from tfm.training.loss import MODEL_INPUTS, right_padded_positions

Say = Callable[[int], None]
WINDOW = 16
"""Batches of sentences that are translated as one part."""
_MASKED_ROWS = 32


@dataclass(frozen=True)
class Translations:
    """A translated split with its scores."""

    sources: list[str]
    translations: list[str]
    references: list[str]
    bleu: Any
    """sacrebleu's score object."""
    chrf: Any
    bleu_signature: str
    chrf_signature: str


def token_figures(bundle: Bundle, splits: Splits, texts: Texts) -> dict[str, float]:
    """Figures per target token over a split, teacher-forced, without label smoothing.

    Returns:
        loss (nats per token), perplexity, accuracy (of the most probable token), tokens; for language models also
        bits_per_byte. For masked language models these are over the masked tokens.
    """
    config = bundle.config
    batches = make_eval_batches(config, _tokenizer(bundle), splits, texts)
    loss = right = tokens = 0.0

    def measure(number: int) -> list[float]:
        return [float(x) for x in _figures(config.model, bundle.params, dict(batches[number]))]

    for sums in spread(range(len(batches)), measure):
        loss, right, tokens = loss + sums[0], right + sums[1], tokens + sums[2]
    if not tokens:
        raise ValueError("the split has no target token: name its files in the config (data.test)")
    figures = {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "accuracy": right / tokens,
               "tokens": tokens}
    if config.data.task == "causal_lm":
        figures["bits_per_byte"] = loss / math.log(2.0) / sum(len(str(text).encode()) for text in texts)
    return figures


@partial(jax.jit, static_argnames=("config",))
def _figures(config: ModelConfig, params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Sums over a batch: loss in nats, right tokens, tokens."""
    inputs = [batch[name] for name in ("source", "target", "tokens") if name in batch]
    given = right_padded_positions(batch) | {name: batch[name] for name in MODEL_INPUTS if name in batch}
    module: Any = build(config)
    hidden = module.apply({"params": params}, *inputs, **given, method="hidden")
    matrix, bias = output_matrix(config, params)
    labels, weights = batch["labels"], batch["weights"]

    def row(x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("TM,VM->TV", x[0], matrix.astype(x[0].dtype), preferred_element_type=jnp.float32)
        logits = logits if bias is None else logits + bias
        if config.logit_softcap is not None:
            logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        gold = jnp.take_along_axis(logits, x[1][:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - gold, gold >= jnp.max(logits, axis=-1)

    losses, right = jax.lax.map(row, (hidden, labels))
    return jnp.sum(losses * weights), jnp.sum(right * weights), jnp.sum(weights)


def pseudo_perplexity(bundle: Bundle, splits: Splits, texts: Texts, *, tokens: int = 1000) -> dict[str, float]:
    """How well a masked language model knows each token from all the others.

        exp(-1/N sum_i log p(w_i | w_1 ... w_(i-1), w_(i+1) ... w_n))

    Args:
        bundle: of a run with the task `masked_lm`.
        splits: of its data.
        texts: which texts.
        tokens: most tokens that are masked in turn, those of the first texts; each costs a pass over its text.

    Returns:
        pseudo_perplexity, and pseudo_tokens: the number N.

    Reference: Salazar et al. (2020), "Masked Language Model Scoring", equation 3.
    """
    tokenizer, total, number = _tokenizer(bundle), 0.0, 0
    for batch in make_eval_batches(bundle.config, tokenizer, splits, texts):
        for ids, mask in zip(batch["labels"], batch["mask"], strict=True):
            places = np.flatnonzero(mask & ~tokenizer.is_special[ids])[:max(tokens - number, 0)]
            for start in range(0, len(places), _MASKED_ROWS):
                some = np.resize(places[start:start + _MASKED_ROWS], _MASKED_ROWS)  # filled up by repeating
                found = _log_prob_of_masked(bundle.model, bundle.params, ids, mask, some, tokenizer.mask_id)
                total += float(np.sum(np.asarray(found)[:len(places) - start], dtype=np.float64))
            number += len(places)
        if number >= tokens:
            break
    if not number:
        raise ValueError("the split has no token to mask")
    return {"pseudo_perplexity": math.exp(min(-total / number, 700.0)), "pseudo_tokens": number}


@partial(jax.jit, static_argnames=("config",))
def _log_prob_of_masked(config: ModelConfig, params: Any, ids: jax.Array, mask: jax.Array, places: jax.Array,
                        mask_id: jax.Array) -> jax.Array:
    """log p of each of the tokens [N] at `places` of ids [T], where it alone is masked."""
    rows = jnp.where(jnp.arange(len(ids)) == places[:, None], mask_id, ids)
    module: Any = build(config)
    hidden = module.apply({"params": params}, rows, mask=jnp.broadcast_to(mask, rows.shape), method="hidden")
    at_place = jnp.take_along_axis(hidden, places[:, None, None], axis=1)[:, 0]
    matrix, bias = output_matrix(config, params)
    logits = jnp.einsum("NM,VM->NV", at_place, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logits = logits if bias is None else logits + bias
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[places][:, None], axis=-1)[:, 0]


def translate_split(bundle: Bundle, pairs: Sequence[Any], *, progress: Say | None = None,
                    **options: Any) -> Translations:
    """Translate a split and score it: BLEU and chrF of detokenised text by sacrebleu's defaults.

    Several processes translate parts of it in turn. Each part is sorted by length for itself.

    Reference: Papineni et al. (2002), BLEU; Popovic (2015), chrF; Post (2018), "A Call for Clarity in Reporting BLEU".
    """
    from sacrebleu.metrics import BLEU, CHRF

    sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    size = WINDOW * (options.get("batch_size") or bundle.config.decode.batch_size)

    def translate(first: int) -> list[str]:
        texts = bundle.translate(sources[first : first + size], **options)
        if progress is not None:
            progress(min(first + size, len(sources)))
        return [" ".join(text.split("\n")) for text in texts]

    translations = [text for part in spread(range(0, len(sources), size), translate) for text in part]
    bleu, chrf = BLEU(), CHRF()
    return Translations(sources, translations, references, bleu.corpus_score(translations, [references]),
                        chrf.corpus_score(translations, [references]), str(bleu.get_signature()),
                        str(chrf.get_signature()))


def exact_reconstruction(bundle: Bundle, splits: Splits, texts: Texts, *, examples: int = 100) -> float:
    """Share of corrupted examples (span corruption, infilling) whose greedy output is the target, token by token."""
    rows, targets = [], []
    for batch in make_eval_batches(bundle.config, _tokenizer(bundle), splits, texts):
        rows += _rows(batch["source"], batch["source_mask"])
        targets += _rows(batch["labels"], batch["weights"] > 0)
        if len(rows) >= examples:
            break
    if not rows:
        raise ValueError("the split has no example to reconstruct")
    rows, targets = rows[:examples], targets[:examples]
    longest = max(len(target) for target in targets) + 1
    written = bundle.generate_ids(rows, max_length=longest)
    eos = bundle.special.eos_ids
    return float(np.mean([ids == [i for i in target if i not in eos] for ids, target in zip(written, targets,
                                                                                            strict=True)]))


def _rows(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True) if real.any()]


def _tokenizer(bundle: Bundle) -> Any:
    if bundle.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer, so its text cannot be measured")
    return bundle.tokenizer


def summary(figures: Mapping[str, float], task: str) -> Iterable[tuple[str, str]]:
    """The figures as (name, text) lines, named as the task has them."""
    names = {"perplexity": "masked perplexity", "accuracy": "masked accuracy"} if task == "masked_lm" else {}
    for name, value in figures.items():
        yield names.get(name, name).replace("_", " "), f"{value:,.0f}" if name == "tokens" else f"{value:.4f}"
