"""T5's span corruption: spans give way to sentinels in the source, and follow theirs in the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def span_counts(length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """How many tokens of a text are corrupted, and in how many spans.

    Args:
      length: tokens of the text, at least 1.
      rate: share of them to corrupt.
      mean_span: mean length of a span.

    Returns:
      (tokens, spans): at least one of each, and a token left over before each span where the text has two or more.

    Example:
      >>> span_counts(100, 0.15, 3.0), span_counts(1, 0.15, 3.0)
      ((15, 5), (1, 1))
    """
    if length == 1:
        return 1, 1
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), noise, length - noise)


def random_spans(length: int, rate: float, mean_span: float, rng: np.random.Generator) -> np.ndarray:
    """Draw spans to corrupt; kept and corrupted runs alternate, beginning with a kept one.

    Args:
      length, rate, mean_span: as for `span_counts`.
      rng: source of randomness.

    Returns:
      [length] bool, True where corrupted; runs of True never touch.
    """
    noise, spans = span_counts(length, rate, mean_span)
    if noise == length:
        return np.ones(length, bool)
    runs = np.stack([_random_parts(length - noise, spans, rng), _random_parts(noise, spans, rng)], axis=1)
    return np.repeat(np.tile([False, True], spans), runs.reshape(-1))


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """`total` as a sum of `parts` numbers of at least 1, each such sum equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def corrupt_spans(tokens: np.ndarray, noise: np.ndarray, sentinel_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Write source and target of one example.

    Args:
      tokens: [T] int.
      noise: [T] bool, True where corrupted.
      sentinel_ids: ids of the sentinels, at least one more than there are spans.

    Returns:
      source: the text with each span replaced by its sentinel; target: each sentinel followed by its span, and the
      closing sentinel. Both int32, without EOS.

    Raises:
      ValueError: too few sentinels.

    Example:
      >>> corrupt_spans(np.array([5, 6, 7, 8]), np.array([False, True, True, False]), [90, 91])
      (array([ 5, 90,  8], dtype=int32), array([90,  6,  7, 91], dtype=int32))

    Reference: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 3.1.4 and figure 2.
    """
    starts = noise & ~np.concatenate([[False], noise[:-1]])
    spans = int(starts.sum())
    if spans + 1 > len(sentinel_ids):
        raise ValueError(f"the tokenizer has {len(sentinel_ids)} sentinels, but {spans} spans need {spans + 1}")
    sentinels = np.asarray(sentinel_ids, np.int32)
    of_span = sentinels[np.maximum(np.cumsum(starts) - 1, 0)]
    source = np.where(starts, of_span, tokens)[~noise | starts]
    lengths = np.where(starts, 2, noise)  # a span's first token takes its sentinel along
    target = np.repeat(tokens, lengths)
    target[(np.cumsum(lengths) - 2)[starts]] = sentinels[:spans]
    return source.astype(np.int32), np.append(target, sentinels[spans]).astype(np.int32)


def recover_text(source: Sequence[int], target: Sequence[int], sentinel_ids: Sequence[int]) -> list[int]:
    """Put the spans of a target back into its source: the inverse of `corrupt_spans`.

    Args:
      source: ids with sentinels.
      target: ids, each span after its sentinel; a span that is missing gives nothing.
      sentinel_ids: ids of the sentinels.

    Returns:
      The text's ids.

    Example:
      >>> recover_text([5, 90, 8], [90, 6, 7, 91], [90, 91])
      [5, 6, 7, 8]
    """
    known = {int(i) for i in sentinel_ids}
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in map(int, target):
        if token in known:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [t for token in map(int, source) for t in (spans.get(token, []) if token in known else [token])]


def longest_text(max_length: int, rate: float, mean_span: float) -> int:
    """Most tokens whose source and target, with EOS, both fit `max_length`.

    Args:
      max_length: limit of a side.
      rate, mean_span: as for `span_counts`.

    Returns:
      The length.

    Raises:
      ValueError: not even one token fits.
    """
    length = 0
    for candidate in range(1, 2 * max_length):
        source, target = corrupted_lengths(candidate, rate, mean_span)
        if max(source, target) <= max_length:
            length = candidate
    if not length:
        raise ValueError(f"data.max_length is {max_length}, but span corruption needs at least 4")
    return length


def corrupted_lengths(length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Length of source and target of a text, each with its EOS."""
    noise, spans = span_counts(length, rate, mean_span)
    return length - noise + spans + 1, noise + spans + 2
