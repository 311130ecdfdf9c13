"""BERT's masking: which positions, how many, and what replaces them."""

from __future__ import annotations

import numpy as np
import pytest

from tfm.config import DataConfig
from tfm.data.masked_lm import choose_masked, mask_tokens
from tfm.data.objective import TextObjective
from tfm.data.tokenizer import ByteTokenizer


@pytest.mark.parametrize("length", [1, 2, 5, 40])
@pytest.mark.parametrize("rate", [0.0, 0.15, 0.9])
def test_share_and_places(length: int, rate: float) -> None:
    maskable = np.ones(length + 2, bool)
    maskable[[0, -1]] = False
    counts = set()
    for seed in range(20):
        chosen = choose_masked(maskable, rate, np.random.default_rng(seed))
        assert not (chosen & ~maskable).any()
        counts.add(int(chosen.sum()))
    assert counts == {max(1, round(rate * length))}


def test_every_place_is_chosen_equally_often() -> None:
    rng = np.random.default_rng(0)
    total = sum(choose_masked(np.ones(20, bool), 0.15, rng).astype(int) for _ in range(4000))
    assert np.abs(total / 4000 - 0.15).max() < 4 * np.sqrt(0.15 * 0.85 / 4000)


def test_nothing_to_choose() -> None:
    assert not choose_masked(np.zeros(4, bool), 0.5, np.random.default_rng(0)).any()


def test_whole_words_are_masked_whole() -> None:
    starts = np.array([1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1], bool)
    maskable = np.ones(12, bool)
    maskable[[0, -1]] = False
    word = np.cumsum(starts)
    seen = set()
    for seed in range(60):
        chosen = choose_masked(maskable, 0.3, np.random.default_rng(seed), starts)
        assert chosen.any()
        for number in set(word[maskable].tolist()):
            assert len(set(chosen[maskable & (word == number)].tolist())) == 1
            if chosen[maskable & (word == number)].any():
                seen.add(number)
    assert seen == set(word[maskable].tolist())


def test_eighty_ten_ten() -> None:
    tokens = np.full(30000, 5, np.int32)
    chosen = np.arange(30000) % 2 == 0
    result = mask_tokens(tokens, chosen, 99, np.arange(10, 20), np.random.default_rng(1))
    assert (result[~chosen] == 5).all() and result.dtype == np.int32
    shares = [(result[chosen] == value).mean() for value in (99, 5)]
    assert abs(shares[0] - 0.8) < 0.01 and abs(shares[1] - 0.1) < 0.01
    random = result[chosen & (result != 99) & (result != 5)]
    assert set(random.tolist()) == set(range(10, 20))


def test_examples_never_mask_special_tokens() -> None:
    tokenizer = ByteTokenizer(["<mask>"])
    objective = TextObjective(DataConfig(task="masked_lm", mask_rate=0.5, max_length=16), tokenizer)
    piece = np.array(tokenizer.encode("abc def ghi"), np.int32)
    for seed in range(50):
        example = objective(piece, np.random.default_rng(seed))
        assert example["labels"].tolist() == [tokenizer.bos_id, *piece, tokenizer.eos_id]
        assert example["weights"][[0, -1]].tolist() == [0, 0] and example["weights"].sum() == 6  # round(0.5 * 11)
        changed = example["tokens"] != example["labels"]
        assert (example["weights"][changed] == 1).all()
        inserted = example["tokens"][changed]
        assert (~tokenizer.is_special[inserted] | (inserted == tokenizer.mask_id)).all()
