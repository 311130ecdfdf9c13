"""The generated text for language models: short documents whose sentences depend on one another.

Facts are stated and recalled, journeys keep their order, sums come out right, and pronouns agree, so a model that reads
the whole document predicts it better than one that reads a sentence. Each document is of one of four kinds, which
serves as label for classification. A document follows from (seed, split, number) alone, and the splits share none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tfm.data.choices import Choices
from tfm.data.generated import HELD_OUT_SIZE, SPLIT_NAMES, GeneratedSplit
from tfm.data.lexicon import ADJECTIVES, CITIES, NAMES, NOUNS
from tfm.data.numerals import WEEKDAYS, clock, number_words
from tfm.data.source import Texts

Labelled = tuple[str, str]
T = TypeVar("T")

_JOBS = ("a teacher", "a doctor", "a painter", "a farmer", "a student")
_COLOURS = ("red", "green", "blue", "black", "white", "yellow")
_PLACES = ("garden", "park", "museum", "school", "forest", "church", "kitchen", "hotel")
_WEATHER = (("it rained", "stayed at home and read a {0}"), ("the sun shone", "went to the {1}"),
            ("it snowed", "wrote a long {0}"), ("it was windy", "worked in the {1}"))


def _hero(choices: Choices) -> tuple[str, str, str, str]:
    """Name, subject, object and possessive pronoun."""
    gender = choices.pick("mf")
    return choices.pick(NAMES[gender]), *(("He", "him", "his") if gender == "m" else ("She", "her", "her"))


def _portrait(choices: Choices) -> list[str]:
    name, he, him, his = _hero(choices)
    city, job, age = choices.pick(CITIES)[0], choices.pick(_JOBS), number_words(choices.between(18, 90))[0]
    animal = choices.pick(NOUNS["animal"]).english
    vehicle, colour = choices.pick(NOUNS["vehicle"]).english, choices.pick(_COLOURS)
    food = choices.pick(NOUNS["food"]).english_plural
    facts = [f"{he} lives in {city}.", f"{he} has a {colour} {vehicle}.", f"{he} likes {food} very much.",
             f"{he} has {'an' if animal[0] in 'aeiou' else 'a'} {animal}, and the {animal} loves {him}."]
    recalls = [f"The {vehicle} of {name} is {colour}.", f"Whoever wants to visit {name} must go to {city}.",
               f"When {name} cooks for {his} guests, there are {food}.",
               f"The {animal} sleeps near the {colour} {vehicle}."]
    return [f"{name} is {job} and is {age} years old.", *_shuffled(choices, facts), *_shuffled(choices, recalls)[:3],
            f"Next year {name} will be {number_words(_number(age) + 1)[0]} years old."]


def _journey(choices: Choices) -> list[str]:
    name, he, _, his = _hero(choices)
    cities = _shuffled(choices, [city for city, _ in CITIES])[:choices.between(3, 5)]
    vehicle = choices.pick(NOUNS["vehicle"]).english
    start, hour = choices.below(7), choices.between(5, 9)
    day = [WEEKDAYS[(start + i) % 7][0] for i in range(len(cities))]
    sentences = [f"On {day[0]} {name} travelled from {cities[0]} to {cities[1]} by {vehicle}.",
                 f"{he} left at {clock(hour, 0)[0]} and arrived at {clock(hour + 3, 30)[0]}."]
    for i in range(1, len(cities) - 1):
        thing = choices.pick(NOUNS["thing"])
        sentences += [f"In {cities[i]} {he.lower()} bought a {choices.pick(_COLOURS)} {thing.english}.",
                      f"On {day[i]} {he.lower()} went on from {cities[i]} to {cities[i + 1]}."]
    return [*sentences, f"The journey of {name} began in {cities[0]} and ended in {cities[-1]}.",
            f"From {cities[-1]} {he.lower()} wrote a letter to {his} friends in {cities[0]}."]


def _market(choices: Choices) -> list[str]:
    name, he, *_ = _hero(choices)
    foods = _shuffled(choices, NOUNS["food"])[:2]
    amounts = [choices.between(3, 9) for _ in foods]
    given = [choices.between(1, amount - 2) for amount in amounts]
    friend = choices.pick([other for other in NAMES["f"] + NAMES["m"] if other != name])
    price, total = choices.between(2, 5), 0
    sentences = [f"{name} went to the market with {friend}."]
    for food, amount in zip(foods, amounts, strict=True):
        total += amount * price
        number, cost = number_words(amount)[0], number_words(amount * price)[0]
        sentences.append(f"{he} bought {number} {food.english_plural} for {cost} euros.")
    sentences.append(f"Together that was {number_words(total)[0]} euros.")
    for food, amount, less in zip(foods, amounts, given, strict=True):
        word = food.english if less == 1 else food.english_plural
        sentences += [f"{he} gave {number_words(less)[0]} {word} to {friend}.",
                      f"Then {he.lower()} had {number_words(amount - less)[0]} {food.english_plural}."]
    return [*sentences, f"{friend} thanked {name} for the {foods[0].english_plural} and the {foods[1].english_plural}."]


def _diary(choices: Choices) -> list[str]:
    name, he, _, his = _hero(choices)
    start = choices.below(7)
    sentences, rainy = [f"This is the week of {name}."], 0
    for i in range(choices.between(3, 6)):
        weather, action = choices.pick(_WEATHER)
        rainy += weather == "it rained"
        done = action.format(choices.pick(NOUNS["text"]).english, choices.pick(_PLACES))
        sentences.append(f"On {WEEKDAYS[(start + i) % 7][0]} {weather}, so {he.lower()} {done}.")
    quality = choices.pick(ADJECTIVES["person"]).english
    count = "on no day" if not rainy else "on one day" if rainy == 1 else f"on {number_words(rainy)[0]} days"
    return [*sentences, f"In this week it rained {count}.",
            f"{name} was {quality}, and {his} friends were {quality} too."]


_KINDS: tuple[tuple[str, Callable[[Choices], list[str]]], ...] = (
    ("portrait", _portrait), ("journey", _journey), ("market", _market), ("diary", _diary))


def make_document(choices: Choices) -> Labelled:
    """Draw a document and its kind.

    Example:
      >>> text, kind = make_document(Choices(0, 0))
      >>> text.count(". ") > 3, kind in ("portrait", "journey", "market", "diary")
      (True, True)
    """
    kind, make = choices.pick(_KINDS)
    return " ".join(make(choices)), kind


def _shuffled(choices: Choices, items: Sequence[T]) -> list[T]:
    left, result = list(items), []
    while left:
        result.append(left.pop(choices.below(len(left))))
    return result


def _number(words: str) -> int:
    return next(n for n in range(100) if number_words(n)[0] == words)


def generated_documents(size: int, seed: int, *, labels: bool) -> tuple[Texts, Texts, Texts]:
    """Train, valid and test documents.

    Args:
      size: documents of the train split; valid and test have 500 each.
      seed: another seed gives other documents.
      labels: whether the kind of each comes as a second column.

    Returns:
      The three splits.
    """
    sizes = dict.fromkeys(SPLIT_NAMES, HELD_OUT_SIZE) | {"train": size}
    train, valid, test = (GeneratedSplit(make_document, seed, name, sizes[name]).texts(2 if labels else 1)
                          for name in SPLIT_NAMES)
    return train, valid, test
