"""BART's corruptions, against counts by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfm.config import DataConfig
from tfm.data.infilling import infill, permute_sentences
from tfm.data.objective import TextObjective
from tfm.data.tokenizer import ByteTokenizer

MASK = 999


def is_infilling_of(source: list[int], text: list[int]) -> tuple[bool, int]:
    """Whether the kept tokens are a subsequence of the (distinct) text, and how many tokens are gone."""
    kept = [token for token in source if token != MASK]
    return kept == sorted(kept) and set(kept) <= set(text), len(text) - len(kept)


@pytest.mark.parametrize("rate", [0.15, 0.3, 0.9])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 60])
def test_share_and_order(rate: float, length: int) -> None:
    text = list(range(length))
    for seed in range(60):
        source = infill(np.array(text, np.int32), rate, 3.0, MASK, np.random.default_rng(seed)).tolist()
        ordered, gone = is_infilling_of(source, text)
        wanted = max(1, round(rate * length))
        assert ordered and 0 < gone <= wanted and len(source) <= length
        assert MASK in source
        assert not any(a == b == MASK for a, b in itertools.pairwise(source))  # spans never touch
        if rate == 0.3 and length == 60:
            assert gone == wanted


def test_zero_length_spans_insert_a_mask() -> None:
    inserted = 0
    for seed in range(300):
        source = infill(np.arange(50), 0.3, 3.0, MASK, np.random.default_rng(seed)).tolist()
        inserted += sum(source[i] == MASK and source[i + 1] - source[i - 1] == 1 for i in range(1, len(source) - 1))
    assert inserted > 20


def test_span_lengths_are_poisson() -> None:
    counts = np.zeros(12)
    for seed in range(400):
        source = infill(np.arange(400), 0.3, 3.0, MASK, np.random.default_rng(seed)).tolist()
        padded = [-1, *source, 400]
        for i in range(1, len(padded) - 1):
            if padded[i] == MASK:
                counts[min(11, padded[i + 1] - padded[i - 1] - 1)] += 1
    shares = counts / counts.sum()
    poisson = np.exp(-3) * np.array([1, 3, 4.5, 4.5, 3.375, 2.025])
    assert np.abs(shares[:6] - poisson).max() < 0.02  # the last span of a text is cut short


def test_permutation_keeps_every_token_and_separator() -> None:
    tokens = np.array([1, 2, 0, 3, 0, 0, 4, 5, 0, 6])
    pieces = [[1, 2, 0], [3, 0, 0], [4, 5, 0], [6]]
    seen = set()
    for seed in range(200):
        result = permute_sentences(tokens, tokens == 0, np.random.default_rng(seed)).tolist()
        order, left = [], list(result)
        while left:
            piece = next(p for p in pieces if left[: len(p)] == p)
            order.append(pieces.index(piece))
            left = left[len(piece) :]
        assert sorted(order) == [0, 1, 2, 3]
        seen.add(tuple(order))
    assert len(seen) == 24


def test_examples_rebuild_the_text() -> None:
    tokenizer = ByteTokenizer(["<mask>"])
    config = DataConfig(task="infilling", mask_rate=0.3, permute_sentences=True, max_length=64)
    objective = TextObjective(config, tokenizer)
    piece = np.array(tokenizer.encode("One. Two! Three? Four"), np.int32)
    sources = set()
    for seed in range(30):
        example = objective(piece, np.random.default_rng(seed))
        assert example["labels"].tolist() == [*piece, tokenizer.eos_id]
        assert example["source"][-1] == tokenizer.eos_id and tokenizer.mask_id in example["source"]
        sources.add(tokenizer.decode(example["source"])[:3])
    assert len(sources) > 3  # another sentence comes first now and then
