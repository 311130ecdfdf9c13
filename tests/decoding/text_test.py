import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.decoding import minimum_bayes_risk
from tfm.decoding.text import before_possible_stop, cut_at_stop, settled, utf8_safe_prefix


@given(st.text(max_size=6), st.integers(0, 24))
@settings(max_examples=100)
def test_never_half_a_character(text, size):
    data = text.encode("utf-8", "surrogatepass")[:size] if text.isascii() else text.encode()[:size]
    safe = utf8_safe_prefix(data)
    assert safe.decode() == data.decode(errors="ignore")
    assert text.startswith(safe.decode())


@pytest.mark.parametrize("data", [b"a\xff", b"\x80\x80\x80\x80", b"ab\xf8", b""])
def test_bytes_that_are_no_character_are_kept(data):
    assert utf8_safe_prefix(data) == data


def test_text_settles_once_its_bytes_are_complete():
    data = "日本".encode()
    shown = [settled(data[:n].decode(errors="replace")) for n in range(len(data) + 1)]
    assert shown == ["", "", "", "日", "日", "日", "日本"]


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
@settings(max_examples=200)
def test_what_is_shown_is_what_is_kept(text, stops):
    """Streaming letter by letter shows a prefix of the cut text, and all of it but what may begin a stop string."""
    whole, found = cut_at_stop(text, stops)
    assert found == any(stop in text for stop in stops)
    assert not any(stop in whole for stop in stops)
    shown = ""
    for n in range(len(text) + 1):
        kept, ended = cut_at_stop(text[:n], stops)
        new = kept if ended else before_possible_stop(kept, stops)
        assert new.startswith(shown)
        shown = new
        if ended:
            break
    assert whole.startswith(shown)
    assert found == ended and (not found or shown == whole)


def test_minimum_bayes_risk_is_the_largest_mean_chrf():
    from sacrebleu.metrics import CHRF

    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "dog"]
    samples = [" ".join(rng.choice(words, 5)) for _ in range(6)]
    samples.append(samples[2])
    metric = CHRF()
    table = np.array([[metric.sentence_score(h, [r]).score for r in samples] for h in samples])
    best, values = minimum_bayes_risk(samples)
    np.testing.assert_allclose(values, table.mean(1))
    assert best == int(np.argmax(table.mean(1)))
    weights = np.arange(7.0)
    best, values = minimum_bayes_risk(samples, weights=weights)
    np.testing.assert_allclose(values, table @ weights / weights.sum())


def test_minimum_bayes_risk_refuses():
    with pytest.raises(ValueError, match="samples is empty"):
        minimum_bayes_risk([])
    with pytest.raises(ValueError, match=r"weights is \[1.0\]"):
        minimum_bayes_risk(["a", "b"], weights=[1.0])
