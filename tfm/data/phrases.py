"""Noun phrases and adverbials of the generated corpus, each with its English and its German form."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfm.data import german
from tfm.data.choices import Choices
from tfm.data.lexicon import ADJECTIVES, CITIES, NAMES, NOUNS, Adjective, Noun
from tfm.data.numerals import MONTHS, WEEKDAYS, clock, date, digital, grouped, number_words

Pair = tuple[str, str]

# English subject, English object, person, plural, German nominative, accusative, dative
_PRONOUNS = (
    ("I", "me", 1, False, "ich", "mich", "mir"), ("you", "you", 2, False, "du", "dich", "dir"),
    ("he", "him", 3, False, "er", "ihn", "ihm"), ("she", "her", 3, False, "sie", "sie", "ihr"),
    ("we", "us", 1, True, "wir", "uns", "uns"), ("they", "them", 3, True, "sie", "sie", "ihnen"),
)
_DETERMINERS = ((45, "the"), (20, "a"), (15, "possessive"), (6, "this"), (5, "every"), (9, "number"))
_POSSESSIVES = (("my", "mein"), ("your", "dein"), ("his", "sein"), ("her", "ihr"), ("our", "unser"), ("their", "ihr"))


@dataclass
class NounPhrase:
    """Something that can be subject or object: its forms, and what verbs agree with."""

    english: str
    english_object: str
    person: int
    plural: bool
    gender: str
    forms: dict[str, str] = field(default_factory=dict)
    pronoun: bool = False
    indefinite: bool = False
    quantified: bool = False
    kind: str = "person"

    def german(self, case: str) -> str:
        """The German form in a case."""
        return self.forms[case]


def pronoun(choices: Choices, *, exclude: str = "") -> NounPhrase:
    """A personal pronoun other than `exclude` (an English subject form)."""
    chosen = choices.pick([row for row in _PRONOUNS if row[0] != exclude])
    subject, as_object, person, plural, nom, acc, dat = chosen
    gender = "pl" if plural else {"she": "f"}.get(subject, "m")
    return NounPhrase(subject, as_object, person, plural, gender, {"nom": nom, "acc": acc, "dat": dat}, pronoun=True)


def name(choices: Choices) -> NounPhrase:
    """A first name."""
    gender = choices.pick("mf")
    word = choices.pick(NAMES[gender])
    return NounPhrase(word, word, 3, False, gender, dict.fromkeys(("nom", "acc", "dat"), word))


def noun_phrase(choices: Choices, kind: str, *, determiner: str = "", attributes: bool = True) -> NounPhrase:
    """A noun of a kind with determiner, often an adjective, now and then a genitive.

    Args:
      choices: source of randomness.
      kind: key of `lexicon.NOUNS`.
      determiner: "the" forces the article; "" leaves it open.
      attributes: whether it may have a genitive.
    """
    word = choices.pick(NOUNS[kind])
    plural = choices.chance(20)
    which = determiner or choices.weighted(_DETERMINERS)
    if which == "number":
        plural = True
    elif which == "every" or (which == "a" and plural):
        plural = False
    adjective = choices.pick(ADJECTIVES[kind]) if choices.chance(35) else None
    english_of, german_of = _genitive(choices) if attributes and which == "the" and choices.chance(8) else ("", "")
    start, declension, article = _determiner(choices, which, plural)
    gender = "pl" if plural else word.gender
    english_noun = word.english_plural if plural else word.english
    body = f"{adjective.english} {english_noun}" if adjective else english_noun
    if start == "a" and body[0] in "aeiou":
        start = "an"
    forms = {case: _german_form(article, declension, adjective, word, case, plural) + german_of
             for case in ("nom", "acc", "dat")}
    english = f"{start} {body}{english_of}"
    return NounPhrase(english, english, 3, plural, gender, forms, indefinite=which == "a",
                      quantified=which in ("every", "number"), kind=kind)


def _determiner(choices: Choices, which: str, plural: bool) -> tuple[str, str, tuple[str, str]]:
    """English word, declension of the adjective after the German one, and (kind, stem) of the German one."""
    if which == "the":
        return "the", "der", ("the", "")
    if which == "a":
        return "a", "ein", ("ein", "ein")
    if which == "possessive":
        english, stem = choices.pick(_POSSESSIVES)
        return english, "ein", ("ein", stem)
    if which == "this":
        return ("these" if plural else "this"), "der", ("der", "dies")
    if which == "every":
        return "every", "der", ("der", "jed")
    english, word = number_words(choices.between(2, 99) if choices.chance(50) else choices.between(2, 12))
    return english, "", ("fixed", word)


def _german_form(article: tuple[str, str], declension: str, adjective: Adjective | None, word: Noun, case: str,
                 plural: bool) -> str:
    gender = "pl" if plural else word.gender
    kind, stem = article
    first = {"the": lambda: german.the(case, gender), "ein": lambda: german.ein_word(stem, case, gender),
             "der": lambda: german.der_word(stem, case, gender), "fixed": lambda: stem}[kind]()
    middle = f" {german.adjective(adjective.german, case, gender, declension)}" if adjective else ""
    return f"{first}{middle} {german.noun(word, case, plural)}"


def _genitive(choices: Choices) -> Pair:
    owner = choices.pick(NOUNS["person"])
    plural = choices.chance(25)
    gender = "pl" if plural else owner.gender
    english = owner.english_plural if plural else owner.english
    return f" of the {english}", f" {german.the('gen', gender)} {german.noun(owner, 'gen', plural)}"


def person(choices: Choices) -> NounPhrase:
    """Who does something: a pronoun, a name, two names, or a noun."""
    which = choices.weighted(((30, "pronoun"), (20, "name"), (5, "two"), (45, "noun")))
    if which == "pronoun":
        return pronoun(choices)
    if which == "name":
        return name(choices)
    if which == "noun":
        return noun_phrase(choices, "person")
    first, second = choices.pick(NAMES["f"]), choices.pick(NAMES["m"])
    forms = dict.fromkeys(("nom", "acc", "dat"), f"{first} und {second}")
    return NounPhrase(f"{first} and {second}", f"{first} and {second}", 3, True, "pl", forms)


def object_phrase(choices: Choices, kinds: tuple[str, ...], subject: NounPhrase) -> NounPhrase:
    """What something is done to; persons may be pronouns (not the subject's own) or names."""
    kind = choices.pick(kinds)
    if kind == "person" and choices.chance(30):
        thing = pronoun(choices, exclude=subject.english)
        same = thing.person == subject.person and thing.person < 3  # "I see us" is no sentence
        return name(choices) if same else thing
    if kind == "person" and choices.chance(25):
        return name(choices)
    return noun_phrase(choices, kind)


def location(choices: Choices) -> Pair:
    """Where: "in the old garden", "in Berlin"."""
    if choices.chance(30):
        english, word = choices.pick(CITIES)
        return f"in {english}", f"in {word}"
    place = noun_phrase(choices, "place", determiner=choices.pick(("the", "the", "a", "possessive")), attributes=False)
    return f"in {place.english}", german.with_preposition("in", place.german("dat"))


def goal(choices: Choices) -> Pair:
    """Where to: "to the station", "into the garden", "to Berlin"."""
    if choices.chance(30):
        english, word = choices.pick(CITIES)
        return f"to {english}", f"nach {word}"
    place = noun_phrase(choices, "place", determiner="the", attributes=False)
    if choices.chance(40):
        return f"into {place.english}", german.with_preposition("in", place.german("acc"))
    return f"to {place.english}", german.with_preposition("zu", place.german("dat"))


_TIMES: dict[str, tuple[Pair, ...]] = {
    "past": (("yesterday", "gestern"), ("last week", "letzte Woche"), ("last year", "letztes Jahr"),
             ("three days ago", "vor drei Tagen")),
    "present": (("today", "heute"), ("every day", "jeden Tag"), ("every morning", "jeden Morgen"), ("now", "jetzt")),
    "future": (("tomorrow", "morgen"), ("next week", "nächste Woche"), ("next year", "nächstes Jahr"),
               ("soon", "bald")),
    "perfect": (("today", "heute"), ("this week", "diese Woche")),
    "modal": (("today", "heute"), ("tomorrow", "morgen"), ("now", "jetzt"), ("next week", "nächste Woche")),
}


def time(choices: Choices, tense: str) -> Pair:
    """When, as fits the tense: an adverb, a weekday, a date, a year, a time of day."""
    if tense == "perfect" or choices.chance(45):
        return choices.pick(_TIMES[tense])
    which = choices.weighted(((35, "weekday"), (25, "date"), (40, "clock")))
    if which == "weekday":
        english, word = choices.pick(WEEKDAYS)
        return f"on {english}", f"am {word}"
    if which == "clock":
        return clock_time(choices)
    if tense == "past" and choices.chance(40):
        if choices.chance(50):
            year = choices.between(1950, 2020)
            return f"in {year}", f"im Jahr {year}"
        month = choices.pick(MONTHS)
        return f"in {month[0]}", f"im {month[1]}"
    year_or_none = choices.between(1950, 2020) if tense == "past" and choices.chance(50) else None
    english, word = date(choices.between(1, 28), choices.between(1, 12), year_or_none)
    return f"on {english}", f"am {word}"


def clock_time(choices: Choices) -> Pair:
    """At what time of day."""
    if choices.chance(30):
        english, word = digital(choices.between(0, 23), choices.between(0, 59))
    else:
        english, word = clock(choices.between(1, 12), 5 * choices.below(12))
    return f"at {english}", f"um {word}"


def large_number(choices: Choices) -> Pair:
    """A number of four to six digits."""
    return grouped(choices.between(1000, 99999))
