"""T5's span corruption: the paper's rows, recovery of every text, densities."""

from __future__ import annotations

import numpy as np
import pytest

from tfm.config import DataConfig
from tfm.data import recover_text
from tfm.data.objective import TextObjective, reserved_symbols
from tfm.data.span_corruption import corrupt_spans, corrupted_lengths, longest_text, random_spans, span_counts
from tfm.data.tokenizer import ByteTokenizer

SENTINELS = list(range(1000, 1400))


def words_with_spans(text: str, spans: list[str]) -> tuple[str, str]:
    """Run the corruption over whole words, the sentinels written as the paper's letters."""
    words = text.split()
    noise = np.zeros(len(words), bool)
    for span in spans:
        length = len(span.split())
        at = next(i for i in range(len(words)) if words[i : i + length] == span.split())
        noise[at : at + length] = True
    shown = [*words, "<X>", "<Y>", "<Z>"]
    source, target = corrupt_spans(np.arange(len(words)), noise, range(len(words), len(words) + 3))
    return " ".join(shown[i] for i in source), " ".join(shown[i] for i in target)


def test_the_papers_figure_2() -> None:
    rows = words_with_spans("Thank you for inviting me to your party last week .", ["for inviting", "last"])
    assert rows == ("Thank you <X> me to your party <Y> week .", "<X> for inviting <Y> last <Z>")


def test_a_vietnamese_sentence() -> None:
    rows = words_with_spans("Hà Nội là thủ đô của Việt Nam", ["là thủ", "Việt"])
    assert rows == ("Hà Nội <X> đô của <Y> Nam", "<X> là thủ <Y> Việt <Z>")


@pytest.mark.parametrize("rate", [0.15, 0.55, 0.9])
@pytest.mark.parametrize("mean_span", [1.0, 3.0, 8.0])
def test_every_text_comes_back(rate: float, mean_span: float) -> None:
    for length in [*range(1, 40), 100, 333]:
        rng = np.random.default_rng(length)
        tokens = rng.integers(0, 50, length).astype(np.int32)
        noise = random_spans(length, rate, mean_span, rng)
        source, target = corrupt_spans(tokens, noise, SENTINELS)
        assert recover_text(source.tolist(), target.tolist(), SENTINELS) == tokens.tolist()
        sentinels = [t for t in source.tolist() if t >= 1000]
        assert (
            sentinels == SENTINELS[: len(sentinels)]
            and [t for t in target.tolist() if t >= 1000] == SENTINELS[: len(sentinels) + 1]
        )
        assert target[-1] == SENTINELS[len(sentinels)]  # the closing one
        assert (len(source) + 1, len(target) + 1) == corrupted_lengths(length, rate, mean_span)
        assert int(noise.sum()) == span_counts(length, rate, mean_span)[0]


@pytest.mark.parametrize("rate", [0.15, 0.55, 0.9])
def test_density_and_mean_span(rate: float) -> None:
    noise, spans = span_counts(1000, rate, 3.0)
    assert noise == round(1000 * rate)
    assert spans == min(round(noise / 3), 1000 - noise)  # at 0.9 each span still needs a kept token before it


def test_spans_of_all_lengths_are_drawn_alike() -> None:
    # 3 corrupted tokens in 2 spans among 7: 2 ways to cut the noise times 3 ways to cut the 4 kept ones, equally often
    rng = np.random.default_rng(0)
    found: dict[str, int] = {}
    for _ in range(3000):
        mask = "".join("x" if bit else "." for bit in random_spans(7, 3 / 7, 1.5, rng))
        found[mask] = found.get(mask, 0) + 1
    expected = {f"{'.' * a}{'x' * b}{'.' * (4 - a)}{'x' * (3 - b)}" for a in (1, 2, 3) for b in (1, 2)}
    assert set(found) == expected
    assert max(abs(n / 3000 - 1 / 6) for n in found.values()) < 0.03


def test_too_few_sentinels() -> None:
    with pytest.raises(ValueError, match="has 2 sentinels, but 2 spans need 3"):
        corrupt_spans(np.arange(4), np.array([True, False, True, False]), [90, 91])


@pytest.mark.parametrize("rate", [0.15, 0.55, 0.9])
@pytest.mark.parametrize("max_length", [4, 10, 64])
def test_the_longest_text_fits_and_the_next_does_not(rate: float, max_length: int) -> None:
    longest = longest_text(max_length, rate, 3.0)
    assert max(corrupted_lengths(longest, rate, 3.0)) <= max_length
    assert all(max(corrupted_lengths(n, rate, 3.0)) > max_length for n in range(longest + 1, 3 * max_length))


def test_examples_fit_and_have_sentinels_enough() -> None:
    for rate in (0.15, 0.55, 0.9):
        config = DataConfig(task="span_corruption", max_length=32, mask_rate=rate)
        tokenizer = ByteTokenizer(reserved_symbols(config))
        objective = TextObjective(config, tokenizer)
        for length in range(1, objective.piece_length + 1):
            example = objective(np.full(length, 70, np.int32), np.random.default_rng(length))
            sides = objective.sides(np.array([length]))[0]
            assert [len(example["source"]), len(example["labels"])] == sides.tolist() and max(sides) <= 32
            assert example["source"][-1] == example["labels"][-1] == tokenizer.eos_id
            assert example["target"].tolist() == [tokenizer.bos_id, *example["labels"][:-1]]
