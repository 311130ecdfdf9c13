"""BART's corruptions: text infilling and sentence permutation."""

from __future__ import annotations

import numpy as np


def infill(tokens: np.ndarray, rate: float, mean_span: float, mask_id: int, rng: np.random.Generator) -> np.ndarray:
    """Replace spans by one mask each; a span of length zero inserts a mask.

    Span lengths are drawn from a Poisson distribution until the share `rate` of the tokens is covered; spans never
    touch, and the result is never longer than the text.

    Args:
      tokens: [T] int.
      rate: share of the tokens to replace.
      mean_span: mean of the Poisson distribution.
      mask_id: id of the mask.
      rng: source of randomness.

    Returns:
      int32, the corrupted text.

    Reference: Lewis et al., "BART", 2020, section 2.2.
    """
    wanted = min(len(tokens), max(1, round(rate * len(tokens))))
    lengths = _draw_lengths(wanted, mean_span, len(tokens) - wanted + 1, rng)
    kept = len(tokens) - int(lengths.sum())
    slots = np.sort(rng.choice(kept + 1, len(lengths), replace=False))  # before which kept token each span stands
    pieces: list[np.ndarray] = []
    position, previous = 0, 0
    for slot, length in zip(slots, lengths, strict=True):
        step = int(slot) - previous
        pieces += [tokens[position:position + step], np.array([mask_id])]
        position, previous = position + step + int(length), int(slot)
    return np.concatenate([*pieces, tokens[position:]]).astype(np.int32)


def _draw_lengths(wanted: int, mean_span: float, slots: int, rng: np.random.Generator) -> np.ndarray:
    """Poisson lengths that sum to `wanted`, at most `slots` of them and at most `wanted`."""
    lengths: list[int] = []
    left = wanted
    while left > 0:
        lengths.append(min(int(rng.poisson(mean_span)), left))
        left -= lengths[-1]
    limit = min(slots, wanted)
    if len(lengths) > limit:  # keep the longest ones: they leave out zeros first
        lengths = sorted(lengths, reverse=True)[:limit]
    return rng.permutation(np.array(lengths, np.int64))


def permute_sentences(tokens: np.ndarray, ends_sentence: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shuffle the sentences of a text; each keeps its tokens and the mark that ends it.

    Args:
      tokens: [T] int.
      ends_sentence: [T] bool, where a token ends a sentence; several in a row end the same one.
      rng: source of randomness.

    Returns:
      [T] int32.

    Reference: Lewis et al., "BART", 2020, section 2.2.
    """
    last = ends_sentence & ~np.concatenate([ends_sentence[1:], [False]])
    sentences = np.split(tokens, np.flatnonzero(last) + 1)
    sentences = [sentence for sentence in sentences if len(sentence)]
    order = rng.permutation(len(sentences))
    return np.concatenate([sentences[i] for i in order]).astype(np.int32)
