"""The generated corpus: German as a grammar book has it, splits that share nothing, the same text everywhere."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tfm.config import DataConfig
from tfm.data import german as inflect
from tfm.data import load_splits
from tfm.data.choices import Choices
from tfm.data.clause import Clause, english, german_clause, german_infinitive, make_clause
from tfm.data.generated import split_of
from tfm.data.grammar import make_pair
from tfm.data.lexicon import MODALS, NOUNS, VERBS, Noun, Verb
from tfm.data.numerals import clock, date, decimal, digital, grouped, number_words
from tfm.data.phrases import NounPhrase


def noun(german: str) -> Noun:
    return next(word for words in NOUNS.values() for word in words if word.german == german)


def verb(infinitive: str, prefix: str = "") -> Verb:
    return next(word for word in VERBS if (word.infinitive, word.prefix) == (infinitive, prefix))


@pytest.mark.parametrize(
    "case, forms",
    [
        ("nom", ["der alte Mann", "die alte Frau", "das alte Kind", "die alten Männer"]),
        ("acc", ["den alten Mann", "die alte Frau", "das alte Kind", "die alten Männer"]),
        ("dat", ["dem alten Mann", "der alten Frau", "dem alten Kind", "den alten Männern"]),
        ("gen", ["des alten Mannes", "der alten Frau", "des alten Kindes", "der alten Männer"]),
    ],
)
def test_declension_after_the_article(case: str, forms: list[str]) -> None:
    words = [("Mann", False), ("Frau", False), ("Kind", False), ("Mann", True)]
    made = []
    for word, plural in words:
        gender = "pl" if plural else noun(word).gender
        adjective = inflect.adjective("alt", case, gender, "der")
        made.append(f"{inflect.the(case, gender)} {adjective} {inflect.noun(noun(word), case, plural)}")
    assert made == forms


def test_mixed_and_strong_declension() -> None:
    rows = [
        ("ein", "nom", "m", "ein guter"),
        ("ein", "nom", "n", "ein gutes"),
        ("ein", "acc", "m", "einen guten"),
        ("ein", "dat", "f", "einer guten"),
        ("unser", "nom", "pl", "unsere guten"),
        ("kein", "acc", "n", "kein gutes"),
        ("mein", "gen", "m", "meines guten"),
    ]
    for stem, case, gender, expected in rows:
        assert f"{inflect.ein_word(stem, case, gender)} {inflect.adjective('gut', case, gender, 'ein')}" == expected
    assert [inflect.adjective("gut", case, "pl", "") for case in ("nom", "acc", "dat", "gen")] == [
        "gute",
        "gute",
        "guten",
        "guter",
    ]
    assert [inflect.der_word("dies", "nom", gender) for gender in ("m", "f", "n", "pl")] == [
        "dieser",
        "diese",
        "dieses",
        "diese",
    ]


def test_weak_nouns_and_contractions() -> None:
    assert [inflect.noun(noun("Junge"), case, False) for case in ("nom", "acc", "dat", "gen")] == [
        "Junge",
        "Jungen",
        "Jungen",
        "Jungen",
    ]
    assert inflect.noun(noun("Auto"), "dat", True) == "Autos"
    assert (
        inflect.with_preposition("in", "dem Garten") == "im Garten"
        and inflect.with_preposition("zu", "der Schule") == "zur Schule"
    )
    assert (
        inflect.with_preposition("in", "das Haus") == "ins Haus"
        and inflect.with_preposition("in", "der Stadt") == "in der Stadt"
    )


CONJUGATION = {
    ("kaufen", ""): ("kaufe kaufst kauft kaufen", "kaufte kauftest kaufte kauften"),
    ("arbeiten", ""): ("arbeite arbeitest arbeitet arbeiten", "arbeitete arbeitetest arbeitete arbeiteten"),
    ("tanzen", ""): ("tanze tanzt tanzt tanzen", "tanzte tanztest tanzte tanzten"),
    ("lesen", ""): ("lese liest liest lesen", "las last las lasen"),
    ("finden", ""): ("finde findest findet finden", "fand fandest fand fanden"),
    ("rufen", "an"): ("rufe rufst ruft rufen", "rief riefst rief riefen"),
    ("essen", ""): ("esse isst isst essen", "aß aßt aß aßen"),
}


@pytest.mark.parametrize("which", CONJUGATION)
def test_conjugation(which: tuple[str, str]) -> None:
    for tense, forms in zip(("present", "past"), CONJUGATION[which], strict=True):
        made = [
            inflect.verb_parts(verb(*which), tense, person, plural)[0]
            for person, plural in ((1, False), (2, False), (3, False), (3, True))
        ]
        assert made == forms.split()


HE = NounPhrase("he", "him", 3, False, "m", {"nom": "er", "acc": "ihn", "dat": "ihm"}, pronoun=True)
CAR = NounPhrase(
    "a red car", "a red car", 3, False, "n", {"nom": "ein rotes Auto", "acc": "ein rotes Auto"}, indefinite=True
)
DOOR = NounPhrase("the door", "the door", 3, False, "f", {"acc": "die Tür"})
WOMAN = NounPhrase("the woman", "the woman", 3, False, "f", {"acc": "die Frau", "dat": "der Frau"})
YESTERDAY = ("yesterday", "gestern")
HOME = ("in the house", "im Haus")

SENTENCES: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"verb": verb("kaufen"), "tense": "past", "direct": CAR, "time": YESTERDAY},
        "time",
        "yesterday he bought a red car",
        "gestern kaufte er ein rotes Auto",
    ),
    (
        {"verb": verb("kaufen"), "tense": "past", "direct": CAR, "negated": True},
        "second",
        "he did not buy a red car",
        "er kaufte kein rotes Auto",
    ),
    (
        {"verb": verb("machen", "auf"), "tense": "present", "direct": DOOR},
        "second",
        "he opens the door",
        "er macht die Tür auf",
    ),
    (
        {"verb": verb("machen", "auf"), "tense": "present", "direct": DOOR},
        "final",
        "he opens the door",
        "er die Tür aufmacht",
    ),
    (
        {"verb": verb("machen", "auf"), "tense": "perfect", "direct": DOOR, "negated": True},
        "second",
        "he has not opened the door",
        "er hat die Tür nicht aufgemacht",
    ),
    (
        {"verb": verb("machen", "zu"), "tense": "perfect", "direct": DOOR},
        "final",
        "he has closed the door",
        "er die Tür zugemacht hat",
    ),
    (
        {"verb": verb("gehen"), "tense": "perfect", "place": ("to Berlin", "nach Berlin"), "time": YESTERDAY},
        "second",
        "he has gone to Berlin yesterday",
        "er ist gestern nach Berlin gegangen",
    ),
    (
        {"verb": verb("helfen"), "tense": "modal", "modal": MODALS[0], "direct": WOMAN, "negated": True},
        "second",
        "he cannot help the woman",
        "er kann der Frau nicht helfen",
    ),
    (
        {"verb": verb("helfen"), "tense": "modal", "modal": MODALS[3], "direct": WOMAN},
        "first",
        "does he want to help the woman",
        "will er der Frau helfen",
    ),
    (
        {"verb": verb("geben"), "tense": "future", "direct": CAR, "indirect": HE},
        "final",
        "he will give him a red car",
        "er ihm ein rotes Auto geben wird",
    ),
    (
        {"verb": verb("warten"), "tense": "present", "direct": WOMAN, "negated": True},
        "second",
        "he does not wait for the woman",
        "er wartet nicht auf die Frau",
    ),
    (
        {"verb": verb("holen", "ab"), "tense": "present", "direct": HE, "place": HOME},
        "second",
        "he picks him up in the house",
        "er holt ihn im Haus ab",
    ),
]


@pytest.mark.parametrize("parts, order, source, target", SENTENCES)
def test_word_order(parts: dict[str, Any], order: str, source: str, target: str) -> None:
    clause = Clause(HE, **parts)
    assert english(clause, front_time=order == "time", question=order == "first") == source
    assert german_clause(clause, order) == target


def test_infinitive_clauses() -> None:
    clause = Clause(HE, verb("machen", "auf"), "present", direct=DOOR)
    assert (english(clause, infinitive=True), german_infinitive(clause)) == ("open the door", "die Tür aufzumachen")


def test_numbers_dates_and_times() -> None:
    assert [number_words(n)[1] for n in (1, 12, 16, 17, 21, 30, 47, 99)] == [
        "eins",
        "zwölf",
        "sechzehn",
        "siebzehn",
        "einundzwanzig",
        "dreißig",
        "siebenundvierzig",
        "neunundneunzig",
    ]
    assert [number_words(n)[0] for n in (0, 13, 40, 58)] == ["zero", "thirteen", "forty", "fifty-eight"]
    assert len({number_words(n) for n in range(100)}) == 100
    assert grouped(1234567) == ("1,234,567", "1.234.567") and decimal(3, 5) == ("3.05", "3,05")
    assert date(31, 12, 1999) == ("31 December 1999", "31. Dezember 1999") and digital(9, 5) == ("9:05", "9.05 Uhr")
    assert [clock(h, m) for h, m in ((1, 0), (12, 30), (6, 10), (6, 40), (11, 45), (3, 15))] == [
        ("one o'clock", "ein Uhr"),
        ("half past twelve", "halb eins"),
        ("ten past six", "zehn nach sechs"),
        ("twenty to seven", "zwanzig vor sieben"),
        ("a quarter to twelve", "Viertel vor zwölf"),
        ("a quarter past three", "Viertel nach drei"),
    ]


def test_splits_share_no_sentence_and_are_mostly_distinct() -> None:
    splits = load_splits(DataConfig(generated_size=5000), seed=1)
    train, valid, test = ({source for source, _ in split} for split in (splits.train, splits.valid, splits.test))
    assert not train & valid and not train & test and not valid & test
    assert len(train) > 0.97 * 5000 and len(valid) > 0.97 * 500
    assert {split_of(source) for source in valid} == {"valid"}


def test_one_source_sentence_has_one_translation() -> None:
    seen: dict[str, str] = {}
    for i in range(20000):
        source, target = make_pair(Choices(3, i))
        assert seen.setdefault(source, target) == target
        assert (
            "  " not in source + target
            and source[-1] == target[-1]
            and source[-1] in ".?"
            and not source.startswith(" ")
        )


def test_english_says_all_that_german_needs() -> None:
    assert all(word.english != word.english_plural for words in NOUNS.values() for word in words)
    for i in range(5000):
        clause = make_clause(Choices(4, i), tense="past")
        singular = clause.subject.person == 3 and not clause.subject.plural
        assert singular or clause.verb.english[0] != clause.verb.english[2]  # "they read": present or past?


def test_the_same_seed_gives_the_same_text_in_another_process() -> None:
    config = DataConfig(generated_size=40)
    program = (
        "from tfm.config import DataConfig; from tfm.data import load_splits;"
        "print(ascii(load_splits(DataConfig(generated_size=40), 5).train[17]))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    backwards = load_splits(config, 5)
    assert [backwards.train[i] for i in (39, 17)][1] == eval(printed)
    assert load_splits(config, 6).train[17] != backwards.train[17]
    assert (
        load_splits(config, 6).train.fingerprint
        != backwards.train.fingerprint
        == load_splits(config, 5).train.fingerprint
    )
