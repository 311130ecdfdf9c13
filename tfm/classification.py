"""The held-out figures of a classification: accuracy, and F1 of each class and on average."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.bundle import Bundle
from tfm.config import ModelConfig, require
from tfm.data import Splits, Texts, make_eval_batches
from tfm.models import build


def f1_scores(truth: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """F1 of each class: the harmonic mean of precision and recall.

        F1 = 2 TP / (2 TP + FP + FN)

    Args:
        truth: [N] int classes.
        predicted: [N] int classes.
        num_classes: number of classes.

    Returns:
        [num_classes] float64; NaN for a class that occurs in neither.

    Example:
        >>> f1_scores(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]), 2).round(3).tolist()
        [0.667, 0.8]
    """
    classes = np.arange(num_classes)
    of_truth, of_predicted = truth[:, None] == classes, predicted[:, None] == classes
    right, total = np.sum(of_truth & of_predicted, axis=0), np.sum(of_truth, axis=0) + np.sum(of_predicted, axis=0)
    return np.where(total > 0, 2 * right / np.maximum(total, 1), np.nan)


def class_figures(bundle: Bundle, splits: Splits, texts: Texts) -> dict[str, Any]:
    """Figures over a split.

    Args:
        bundle: of a run with the task `classify`.
        splits: of its data.
        texts: which texts, with their labels.

    Returns:
        loss (nats an example), accuracy, macro_f1 (mean of the F1 of all classes that occur), f1 (by class), examples.

    Raises:
        ValueError: no examples, or a label that the run does not know.
    """
    require(bundle.tokenizer is not None, "the tokenizer", None, "text cannot be measured without one")
    truth, predicted, loss = [], [], 0.0
    for batch in make_eval_batches(bundle.config, bundle.tokenizer, splits, texts):  # type: ignore[arg-type]
        real = batch["weights"] > 0
        log_probs = np.asarray(_log_probs(bundle.model, bundle.params, {n: batch[n] for n in ("tokens", "mask")}))[real]
        labels = batch["labels"][real]
        loss -= float(np.sum(log_probs[np.arange(len(labels)), labels], dtype=np.float64))
        truth.append(labels)
        predicted.append(np.argmax(log_probs, axis=-1))
    if not sum(map(len, truth)):
        raise ValueError("the split has no example: name its files in the config (data.test)")
    found, wanted = np.concatenate(predicted), np.concatenate(truth)
    scores = f1_scores(wanted, found, bundle.model.num_classes)
    return {"loss": loss / len(wanted), "accuracy": float(np.mean(found == wanted)),
            "macro_f1": float(np.nanmean(scores)), "examples": len(wanted),
            "f1": {name: float(score) for name, score in zip(bundle.config.data.labels, scores, strict=True)
                   if np.isfinite(score)}}


def class_summary(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures as (name, text) lines."""
    rows = [(name, f"{figures[name]:.4f}") for name in ("loss", "accuracy", "macro_f1")]
    rows += [(f"f1 of {name}", f"{score:.4f}") for name, score in figures["f1"].items()]
    return [(name.replace("macro_f1", "macro F1"), text) for name, text in [*rows, ("examples",
                                                                                   f"{figures['examples']:,}")]]


@partial(jax.jit, static_argnames=("config",))
def _log_probs(config: ModelConfig, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    module: Any = build(config)
    logits = module.apply({"params": params}, batch["tokens"], mask=batch["mask"], method="class_logits")
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
