"""Which word of the source each word of an output comes from, by the weights of cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tfm.batching import Rows, batches, bucket, check_rows
from tfm.config import ModelConfig, require
from tfm.models import build
from tfm.models.scanned import unstack_layers
from tfm.models.stepper import alignment_layer, record_cross_attention

MARKS = ("▁", "Ġ")
"""What pieces begin with where a word begins, in the tokenizers' own writing."""


def cross_weights(config: ModelConfig, params: Any, sources: Rows, targets: Rows, *, start_id: int,
                  batch_size: int = 32) -> list[np.ndarray]:
    """How much each target token attends to each source token when it is written, out of one pass over both.

    Args:
        config: of an encoder-decoder.
        params: its parameters.
        sources: ids of sources as the model reads them.
        targets: ids that were written for them.
        start_id: first input of the decoder.
        batch_size: most rows at a time.

    Returns:
        For each pair [T, S] float32, the mean over the heads of the layer `alignment_layer(config)`; rows sum to 1.

    Raises:
        ValueError: the model has no cross-attention, or a row does not fit it.
    """
    require(config.is_encoder_decoder, "model.encoder_layers", config.encoder_layers,
            "an alignment needs an encoder-decoder")
    check_rows(config, sources, config.source_vocab_size or config.vocab_size)
    if config.scan_layers:
        params, config = unstack_layers(params, config), replace(config, scan_layers=False)
    weights = [np.zeros((0, len(row)), np.float32) for row in sources]
    written = [i for i, row in enumerate(targets) if row]
    check_rows(config, [targets[i] for i in written], config.vocab_size)
    for places, ids, mask in batches([sources[i] for i in written], batch_size):
        numbers = [written[place] for place in places]
        longest = bucket(max(len(targets[n]) for n in numbers))
        shifted = np.zeros((len(ids), longest), np.int32)
        for row, n in enumerate(numbers):
            shifted[row, : len(targets[n])] = [start_id, *targets[n][:-1]]
        found = np.asarray(_weights(config, params, ids, mask, shifted))
        for row, n in enumerate(numbers):
            weights[n] = found[row, : len(targets[n]), : len(sources[n])]
    return weights


@partial(jax.jit, static_argnames=("config",))
def _weights(config: ModelConfig, params: Any, source: jax.Array, mask: jax.Array, target: jax.Array) -> jax.Array:
    found: list[jax.Array] = []
    with nn.intercept_methods(partial(record_cross_attention, found, alignment_layer(config))):
        build(config).apply({"params": params}, source, target, source_mask=mask, method="hidden")
    return jnp.mean(found[0], axis=1)


def words(pieces: Sequence[str]) -> list[int]:
    """The number of the word that each piece belongs to; pieces that begin a word carry one of `MARKS`.

    Example:
        >>> words(["▁the", "▁cat", "s", "▁", "sat"])
        [0, 1, 1, 2, 2]
    """
    begins = [i == 0 or piece.startswith(MARKS) for i, piece in enumerate(pieces)]
    return [sum(begins[: i + 1]) - 1 for i in range(len(pieces))]


def align(weights: np.ndarray, source: Sequence[str], target: Sequence[str]) -> tuple[list[tuple[int, int]], float]:
    """Pairs (word of the source, word of the target), and how sure the attention is of them.

    A target word is paired with the source word that its pieces, together, attend to most. Source tokens behind
    `source`, such as the end mark, take part in the weights but in no pair.

    Args:
        weights: [T, S] of `cross_weights`.
        source: pieces of the source's text, the first of the S tokens.
        target: T pieces of the target.

    Returns:
        The pairs in order of the target, and the mean over them of the share of the attention that goes to the paired
        word (0 where there are none).

    Example:
        >>> align(np.array([[0.1, 0.7, 0.2], [0.6, 0.2, 0.2]]), ["▁a", "▁b"], ["▁x", "▁y"])
        ([(1, 0), (0, 1)], 0.65)
    """
    if not source or not target:
        return [], 0.0
    columns, rows = words(source), words(target)
    by_word = np.zeros((rows[-1] + 1, columns[-1] + 1))
    np.add.at(by_word, (np.array(rows)[:, None], np.array(columns)[None]), weights[:, : len(columns)])
    by_word /= np.bincount(rows)[:, None]
    best = by_word.argmax(1)
    sure = by_word[np.arange(len(best)), best]
    return [(int(i), j) for j, i in enumerate(best)], round(float(sure.mean()), 4)
