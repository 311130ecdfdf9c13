"""BERT's masked language model: which tokens are hidden, and what stands in their place."""

from __future__ import annotations

import numpy as np


def choose_masked(maskable: np.ndarray, rate: float, rng: np.random.Generator,
                  starts_word: np.ndarray | None = None) -> np.ndarray:
    """Choose the positions to predict: the share `rate` of those allowed, at least one.

    Args:
      maskable: [T] bool, positions that may be chosen.
      rate: share of them.
      rng: source of randomness.
      starts_word: [T] bool, where a word begins; whole words are chosen then. None: single tokens.

    Returns:
      [T] bool.
    """
    places = np.flatnonzero(maskable)
    chosen = np.zeros(len(maskable), bool)
    wanted = min(len(places), max(1, round(rate * len(places))))
    if starts_word is None:
        chosen[rng.permutation(places)[:wanted]] = True
        return chosen
    words = np.cumsum(starts_word)[places]
    left = wanted
    for word in rng.permutation(np.unique(words)):
        members = places[words == word]
        if len(members) <= left or left == wanted:  # a first word longer than wanted is taken all the same
            chosen[members] = True
            left -= len(members)
        if left <= 0:
            break
    return chosen


def mask_tokens(tokens: np.ndarray, chosen: np.ndarray, mask_id: int, ordinary_ids: np.ndarray,
                rng: np.random.Generator) -> np.ndarray:
    """Replace chosen tokens: 80 % by the mask, 10 % by a random token, 10 % stay.

    Args:
      tokens: [T] int32.
      chosen: [T] bool.
      mask_id: id of the mask.
      ordinary_ids: ids that a random token is drawn from.
      rng: source of randomness.

    Returns:
      [T] int32, the input of the model.

    Reference: Devlin et al., "BERT", 2019, section 3.1.
    """
    draw = rng.random(len(tokens))
    random_tokens = rng.choice(ordinary_ids, len(tokens))
    result = np.where(chosen & (draw < 0.8), mask_id, tokens)
    return np.where(chosen & (draw >= 0.8) & (draw < 0.9), random_tokens, result).astype(np.int32)
