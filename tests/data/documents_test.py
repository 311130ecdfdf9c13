"""Generated documents: what later sentences say follows from earlier ones."""

from __future__ import annotations

import itertools
import re

from tfm.config import DataConfig
from tfm.data import class_names, load_splits
from tfm.data.choices import Choices
from tfm.data.documents import make_document
from tfm.data.numerals import number_words

NUMBER = {number_words(n)[0]: n for n in range(100)}


def documents(kind: str) -> list[str]:
    made = (make_document(Choices(1, i)) for i in range(400))
    return [text for text, label in made if label == kind]


def test_sums_come_out_right() -> None:
    for text in documents("market"):
        costs = [NUMBER[word] for word in re.findall(r"for (\S+) euros", text)]
        assert NUMBER[re.findall(r"that was (\S+) euros", text)[0]] == sum(costs)
        bought, given, left = (
            re.findall(pattern, text) for pattern in (r"bought (\S+) ", r"gave (\S+) ", r"had (\S+) ")
        )
        assert [NUMBER[b] - NUMBER[g] for b, g in zip(bought, given, strict=True)] == [NUMBER[rest] for rest in left]


def test_facts_are_recalled() -> None:
    for text in documents("portrait"):
        age, next_age = (
            NUMBER[re.findall(r"is (\S+) years old", text)[0]],
            NUMBER[re.findall(r"be (\S+) years", text)[0]],
        )
        assert next_age == age + 1
        for stated, recalled in (
            (r"lives in (\w+)", r"must go to (\w+)"),
            (r"has a (\w+) (?:car|bicycle|train|ship|bus)\.", r"The \w+ of \w+ is (\w+)\."),
        ):
            assert set(re.findall(recalled, text)) <= set(re.findall(stated, text))


def test_journeys_go_on_from_where_they_were() -> None:
    for text in documents("journey"):
        legs = re.findall(r"from (\w+) to (\w+)", text)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(legs))
        assert re.findall(r"began in (\w+) and ended in (\w+)", text) == [(legs[0][0], legs[-1][1])]


def test_diaries_count_the_rain() -> None:
    for text in documents("diary"):
        rain = len(re.findall(r"y it rained, so", text))
        said = re.findall(r"rained on (\w+) day", text)[0]
        assert {"no": 0}.get(said, NUMBER.get(said)) == rain


def test_splits_and_labels() -> None:
    splits = load_splits(DataConfig(task="causal_lm", generated_size=1500), seed=0)
    train, valid, test = (set(split) for split in (splits.train, splits.valid, splits.test))
    assert not train & valid and not train & test and len(train) > 1400
    labelled = load_splits(DataConfig(task="classify", generated_size=1500), seed=0)
    assert class_names(labelled) == ["diary", "journey", "market", "portrait"]
    assert [text for text, _ in labelled.test] == list(splits.test)
