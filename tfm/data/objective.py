"""What is learnt from a text: each task turns token ids into one training example.

An objective is a pure function of (ids, random generator); the generator is made from (seed, epoch, example), so a
resumed run repeats nothing and skips nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfm.config import DataConfig
from tfm.data.infilling import infill, permute_sentences
from tfm.data.masked_lm import choose_masked, mask_tokens
from tfm.data.span_corruption import (
    corrupt_spans,
    corrupted_lengths,
    longest_text,
    random_spans,
    span_counts,
)
from tfm.data.tokenizer import MASK_SYMBOL, Tokenizer, sentinel_symbols

Example = dict[str, np.ndarray]


def reserved_symbols(config: DataConfig) -> list[str]:
    """Symbols that a tokenizer needs for a task: the mask, or the sentinels.

    Example:
      >>> reserved_symbols(DataConfig(task="masked_lm"))
      ['<mask>']
    """
    if config.task in ("masked_lm", "infilling"):
        return [MASK_SYMBOL]
    if config.task == "span_corruption":
        longest = longest_text(config.max_length, config.mask_rate, config.mean_span)
        return sentinel_symbols(1 + max(span_counts(n, config.mask_rate, config.mean_span)[1]
                                        for n in range(1, longest + 1)))
    return []


def example_rng(seed: int, epoch: int, example: int) -> np.random.Generator:
    """The random generator of one example in one epoch."""
    return np.random.default_rng([seed, epoch, example, 0xE7A])


def pair_example(source: np.ndarray, target: np.ndarray, tokenizer: Tokenizer) -> Example:
    """A pair of texts for an encoder-decoder: both end with EOS, the decoder's input begins with BOS.

    The tokenizer of a foreign checkpoint may put other ids around a source, and some before each target.

    Args:
      source, target: int32 ids without special ones.
      tokenizer: has the special ids.

    Returns:
      source [S], target [T], labels [T] int32 and weights [T] float32.
    """
    labels = np.concatenate([tokenizer.before_target, target, [tokenizer.eos_id]]).astype(np.int32)
    shifted = np.concatenate([[tokenizer.bos_id], labels[:-1]]).astype(np.int32)
    around = np.concatenate([tokenizer.before_source, source, tokenizer.after_source]).astype(np.int32)
    return {"source": around, "target": shifted, "labels": labels, "weights": np.ones(len(labels), np.float32)}


def pair_room(tokenizer: Tokenizer) -> tuple[int, int]:
    """Numbers of ids that `pair_example` adds to source and target."""
    return len(tokenizer.before_source) + len(tokenizer.after_source), len(tokenizer.before_target) + 1


class TextObjective:
    """A task over pieces of running text.

    A document is cut into pieces of at most `piece_length` ids; `whole` says that a piece is a window of the document
    with BOS before and EOS after it, one id longer than the model's input (causal and prefix language models).
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._extra = {"masked_lm": 2, "infilling": max(pair_room(tokenizer))}.get(config.task, 0)
        self.whole = config.task in ("causal_lm", "prefix_lm")
        self.piece_length = self._longest_piece()
        if config.task in ("masked_lm", "infilling") and tokenizer.mask_id is None:
            raise ValueError(f"data.task is {config.task!r}, but the tokenizer has no {MASK_SYMBOL}")
        if config.task == "masked_lm":
            self._ordinary = np.flatnonzero(~tokenizer.is_special)

    def _longest_piece(self) -> int:
        config = self._config
        if config.task == "span_corruption":
            room = config.max_length + 1 - max(pair_room(self._tokenizer))  # the lengths count one EOS
            return longest_text(room, config.mask_rate, config.mean_span)
        if config.max_length <= self._extra:
            raise ValueError(f"data.max_length is {config.max_length}, but {config.task} needs at least "
                             f"{self._extra + 1}")
        return config.max_length - self._extra

    def sides(self, pieces: np.ndarray) -> np.ndarray:
        """[N, sides]: positions that pieces of these lengths [N] take at most in a batch."""
        if self._config.task == "span_corruption":
            rate, mean = self._config.mask_rate, self._config.mean_span
            table = [(0, 0), *(corrupted_lengths(n, rate, mean) for n in range(1, self.piece_length + 1))]
            return np.array(table)[pieces] + pair_room(self._tokenizer) - 1  # they count one EOS
        if self._config.task == "infilling":
            return pieces[:, None] + pair_room(self._tokenizer)
        return pieces[:, None] + self._extra

    def __call__(self, piece: np.ndarray, rng: np.random.Generator) -> Example:
        """One example of a piece."""
        task = self._config.task
        if task == "masked_lm":
            return self._masked_lm(piece, rng)
        if task == "span_corruption":
            noise = random_spans(len(piece), self._config.mask_rate, self._config.mean_span, rng)
            return pair_example(*corrupt_spans(piece, noise, self._tokenizer.sentinel_ids), self._tokenizer)
        if task == "infilling":
            return self._infilling(piece, rng)
        return self._language_model(piece, rng)

    def _language_model(self, window: np.ndarray, rng: np.random.Generator) -> Example:
        weights = np.ones(len(window) - 1, np.float32)
        example: Example = {"tokens": window[:-1], "labels": window[1:], "weights": weights}
        if self._config.task == "prefix_lm":
            prefix = int(rng.integers(1, len(window)))
            weights[:prefix - 1] = 0.0  # the prefix is seen both ways: only what follows it is predicted
            example["prefix_length"] = np.array(prefix, np.int32)
        return example

    def _masked_lm(self, piece: np.ndarray, rng: np.random.Generator) -> Example:
        tokenizer = self._tokenizer
        tokens = np.concatenate([[tokenizer.bos_id], piece, [tokenizer.eos_id]]).astype(np.int32)
        maskable = np.zeros(len(tokens), bool)
        maskable[1:-1] = ~tokenizer.is_special[piece]
        starts = tokenizer.starts_word[tokens] if self._config.whole_word else None
        chosen = choose_masked(maskable, self._config.mask_rate, rng, starts)
        assert tokenizer.mask_id is not None
        return {"tokens": mask_tokens(tokens, chosen, tokenizer.mask_id, self._ordinary, rng), "labels": tokens,
                "weights": chosen.astype(np.float32)}

    def _infilling(self, piece: np.ndarray, rng: np.random.Generator) -> Example:
        tokenizer, source = self._tokenizer, piece
        assert tokenizer.mask_id is not None
        if self._config.permute_sentences:
            source = permute_sentences(source, tokenizer.ends_sentence[source], rng)
        source = infill(source, self._config.mask_rate, self._config.mean_span, tokenizer.mask_id, rng)
        return pair_example(source, piece, tokenizer)


def cut_pieces(lengths: Sequence[int] | np.ndarray, piece_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into consecutive pieces; no token is lost or used twice.

    Args:
      lengths: ids of each document.
      piece_length: most ids of a piece.

    Returns:
      (document, start, length) of each piece, int64.

    Example:
      >>> cut_pieces([5, 0, 2], 3)
      (array([0, 0, 2]), array([0, 3, 0]), array([3, 2, 2]))
    """
    lengths = np.asarray(lengths, np.int64)
    counts = -(-lengths // piece_length)
    document = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * piece_length
    return document, start, np.minimum(piece_length, lengths[document] - start)
