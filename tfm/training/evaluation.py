"""Validation while training: loss, perplexity, BLEU and sample translations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tfm.training.loss import Params

StopCheck = Callable[[], bool]
LATE = 2
"""Batches that may be on their way while the host goes on."""


class TrainingDivergedError(ValueError):
    """A loss or a gradient is NaN or infinite."""


class EvaluationStopped(Exception):
    """A stop was asked for in the middle of an evaluation."""


@dataclass(frozen=True)
class Translation:
    """What is needed for BLEU: a translator and the validation sentences."""

    translate: Callable[[Params, list[str]], list[str]]
    """(params, source texts) -> translations."""
    sources: Sequence[str]
    references: Sequence[str]
    chunk: int = 64
    """Sentences translated between two looks at whether to stop."""


def validation_loss(eval_step: Callable[[Params, Any], Mapping[str, jax.Array]], params: Params,
                    batches: Iterable[Any], stop: StopCheck = lambda: False) -> dict[str, float]:
    """Mean cross-entropy per real target token (or example), without label smoothing, and its exponential.

    Args:
        eval_step: (params, batch) -> sums `loss` and `weight`.
        params: parameters.
        batches: placed batches.
        stop: asked between batches.

    Returns:
        {"valid_loss": nats per token, "valid_perplexity"}; with the sum `right` also "valid_accuracy".

    Raises:
        ValueError: there is no real target token in the batches.
        TrainingDivergedError: the loss is not finite.
        EvaluationStopped: `stop` said so.
    """
    sums = []
    for batch in batches:
        if stop():
            raise EvaluationStopped
        sums.append(eval_step(params, batch))
        if len(sums) > LATE:  # devices that were given too many programs would hold up those that meet others
            jax.block_until_ready(sums[-1 - LATE])
    loss, weight = (float(np.sum([np.asarray(s[name], np.float64) for s in sums])) for name in ("loss", "weight"))
    if not weight:
        raise ValueError("the validation split has no target token")
    if not math.isfinite(loss):
        raise TrainingDivergedError(f"the validation loss is {loss}: the model gives no finite loss on the validation "
                                    "split")
    scores = {"valid_loss": loss / weight, "valid_perplexity": math.exp(min(loss / weight, 700.0))}
    if "right" in sums[0]:
        scores["valid_accuracy"] = float(np.sum([float(s["right"]) for s in sums])) / weight
    return scores


def translate_all(task: Translation, params: Params, stop: StopCheck = lambda: False) -> list[str]:
    """Translations of the task's sources.

    Raises:
        EvaluationStopped: `stop` said so between two chunks.
    """
    out: list[str] = []
    for start in range(0, len(task.sources), task.chunk):
        if stop():
            raise EvaluationStopped
        out += task.translate(params, list(task.sources[start:start + task.chunk]))
    return out


def corpus_bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of detokenised text by sacrebleu's defaults (Papineni et al., 2002; Post, 2018)."""
    import sacrebleu

    return sacrebleu.corpus_bleu(list(translations), [list(references)]).score


def sample_text(task: Translation, translations: Sequence[str], number: int) -> str:
    """The first few sources with their translations and references, as text."""
    rows = zip(task.sources, translations, task.references, strict=True)
    return "\n".join(f"  source       {source}\n  translation  {ours}\n  reference    {reference}"
                     for source, ours, reference in list(rows)[:number])


def write_samples(run: Path, step: int, task: Translation, translations: Sequence[str]) -> None:
    """Write all translations of an evaluation to `RUN/samples/<step>.txt`."""
    folder = run / "samples"
    folder.mkdir(exist_ok=True)
    text = sample_text(task, translations, len(translations))
    (folder / f"{step}.txt").write_text(text + "\n", encoding="utf-8")
