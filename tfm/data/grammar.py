"""The generated corpus: a synchronous grammar that writes English-German sentence pairs.

Each pair is one abstract structure written out twice: agreement, cases, verb-second and verb-final order, separable
verbs, negation, numbers, dates and times come out as each language wants them. A sentence follows from (seed, split,
number) alone; a hash of the English sentence decides which split it may stand in, so held-out sentences are new.
"""

from __future__ import annotations

from collections.abc import Callable

from tfm.data import german
from tfm.data.choices import Choices
from tfm.data.clause import Clause, be, english, german_clause, german_infinitive, make_clause, without_time
from tfm.data.generated import HELD_OUT_SIZE, SPLIT_NAMES, GeneratedSplit
from tfm.data.lexicon import ADJECTIVES, CONTROL, SEIN, SPEECH, VERBS, WERDEN
from tfm.data.numerals import clock, decimal, number_words
from tfm.data.phrases import NounPhrase, Pair, large_number, name, noun_phrase, person, time
from tfm.data.source import Texts

_BEFORE = (("because", "weil"), ("although", "obwohl"), ("while", "während"), ("if", "wenn"))
_BETWEEN = (("and", "und"), ("but", "aber"))
_QUESTIONS = (("where", "wo"), ("when", "wann"), ("why", "warum"))


def _statement(choices: Choices) -> Pair:
    clause = make_clause(choices)
    if clause.time and choices.chance(50):
        return english(clause, front_time=True) + ".", german_clause(clause, "time") + "."
    return english(clause) + ".", german_clause(clause, "second") + "."


def _yes_no_question(choices: Choices) -> Pair:
    clause = make_clause(choices)
    clause.negated = False
    return english(clause, question=True) + "?", german_clause(clause, "first") + "?"


def _open_question(choices: Choices) -> Pair:
    asked = choices.pick(_QUESTIONS)
    clause = make_clause(choices, with_time=asked[0] == "why")
    clause.negated = False
    if asked[0] == "where" and clause.verb.frame in ("place", "goal", "acc"):
        clause.place = None
        if clause.verb.frame == "goal":
            asked = ("where", "wohin")
    return (f"{asked[0]} {english(clause, question=True)}?", f"{asked[1]} {german_clause(clause, 'first')}?")


def _two_clauses(choices: Choices) -> Pair:
    word, german_word = choices.pick(_BEFORE)
    tense = choices.pick(("present", "past"))
    main, side = make_clause(choices, tense=tense), make_clause(choices, tense=tense, with_time=False)
    dependent = f"{word} {english(side)}", f"{german_word} {german_clause(side, 'final')}"
    if choices.chance(50):
        return (f"{dependent[0]}, {english(main)}.", f"{dependent[1]}, {german_clause(main, 'first')}.")
    return f"{english(main)} {dependent[0]}.", f"{german_clause(main, 'second')}, {dependent[1]}."


def _that_clause(choices: Choices) -> Pair:
    outer = Clause(person(choices), choices.pick(SPEECH), choices.pick(("present", "past")))
    inner = make_clause(choices)
    return (f"{english(outer)} that {english(inner)}.",
            f"{german_clause(outer, 'second')}, dass {german_clause(inner, 'final')}.")


def _infinitive_clause(choices: Choices) -> Pair:
    subject = person(choices)
    outer = Clause(subject, choices.pick(CONTROL), choices.pick(("present", "past")))
    inner = without_time(make_clause(choices, subject=subject, tense="present"))
    inner.negated, inner.adverb = False, None
    return (f"{english(outer)} to {english(inner, infinitive=True)}.",
            f"{german_clause(outer, 'second')}, {german_infinitive(inner)}.")


def _joined(choices: Choices) -> Pair:
    word, german_word = choices.pick(_BETWEEN)
    tense = choices.pick(("present", "past"))
    first, second = (make_clause(choices, tense=tense, with_time=False) for _ in range(2))
    comma = "," if german_word == "aber" else ""
    return (f"{english(first)} {word} {english(second)}.",
            f"{german_clause(first, 'second')}{comma} {german_word} {german_clause(second, 'second')}.")


def _relative(choices: Choices) -> Pair:
    subject = noun_phrase(choices, "person", determiner="the", attributes=False)
    inner = make_clause(choices, subject=subject, with_time=False)
    outer = make_clause(choices, subject=subject, with_time=False)
    relative = german_clause(inner, "final", subject=german.the("nom", subject.gender))
    who = f"{subject.english} {english(inner, subject='who')}"
    return (f"{english(outer, subject=who)}.",
            f"{german_clause(outer, 'second', subject=subject.german('nom') + ', ' + relative + ',')}.")


def _copula_subject(choices: Choices) -> NounPhrase:
    return noun_phrase(choices, choices.pick(tuple(ADJECTIVES)), determiner=choices.pick(("the", "possessive", "this")))


def _copula(choices: Choices) -> Pair:
    subject, tense = _copula_subject(choices), choices.pick(("present", "past"))
    quality = choices.pick(ADJECTIVES[subject.kind])
    finite = SEIN[tense][3 if subject.plural else 2]
    start = f"{subject.english} {be(subject, tense)}", f"{subject.german('nom')} {finite}"
    which = choices.weighted(((40, "plain"), (35, "more"), (25, "as")))
    if which == "plain":
        degree = choices.pick((("very", "sehr"), ("not", "nicht"), ("too", "zu"), ("", "")))
        source = f"{start[0]} {degree[0]} {quality.english}."
        target = f"{start[1]} {degree[1]} {german.predicate(quality.german)}."
        return source.replace("  ", " "), target.replace("  ", " ")
    other = noun_phrase(choices, subject.kind, determiner=choices.pick(("the", "possessive")), attributes=False)
    if which == "more":
        return (f"{start[0]} {quality.english_more} than {other.english}.",
                f"{start[1]} {quality.german_more} als {other.german('nom')}.")
    return (f"{start[0]} as {quality.english} as {other.english}.",
            f"{start[1]} so {german.predicate(quality.german)} wie {other.german('nom')}.")


_PASSIVE = [verb for verb in VERBS if verb.frame == "acc" and " " not in verb.english[0]]


def _passive(choices: Choices) -> Pair:
    verb = choices.pick(_PASSIVE)
    subject = noun_phrase(choices, choices.pick(verb.objects))
    agent = name(choices) if choices.chance(30) else noun_phrase(choices, "person", attributes=False)
    when = time(choices, "past") if choices.chance(40) else ("", "")
    finite = WERDEN["past"][3 if subject.plural else 2]
    source = f"{subject.english} {be(subject, 'past')} {verb.english[3]} by {agent.english_object} {when[0]}"
    target = (f"{subject.german('nom')} {finite} {when[1]} {german.with_preposition('von', agent.german('dat'))} "
              f"{verb.prefix}{verb.participle}")
    return source.strip() + ".", target.replace("  ", " ") + "."


def _price(choices: Choices) -> Pair:
    kind = choices.pick(("food", "thing", "text", "vehicle", "device"))
    thing = noun_phrase(choices, kind, determiner="the", attributes=False)
    number = decimal(choices.between(2, 99), choices.between(1, 99)) if choices.chance(50) else large_number(choices)
    verb = ("cost", "kosten") if thing.plural else ("costs", "kostet")
    return f"{thing.english} {verb[0]} {number[0]} euros.", f"{thing.german('nom')} {verb[1]} {number[1]} Euro."


def _age(choices: Choices) -> Pair:
    who = person(choices)
    number = number_words(choices.between(2, 99))
    finite = SEIN["present"][3 if who.plural else who.person - 1]
    return (f"{who.english} {be(who, 'present')} {number[0]} years old.",
            f"{who.german('nom')} {finite} {number[1]} Jahre alt.")


def _time_of_day(choices: Choices) -> Pair:
    now = clock(choices.between(1, 12), 5 * choices.below(12))
    return f"it is {now[0]}.", f"es ist {now[1]}."


def _inhabitants(choices: Choices) -> Pair:
    year, number = choices.between(1950, 2020), large_number(choices)
    place = choices.pick((("the town", "die Stadt"), ("the village", "das Dorf")))
    return (f"in {year} {place[0]} had {number[0]} inhabitants.",
            f"im Jahr {year} hatte {place[1]} {number[1]} Einwohner.")


_SENTENCES: tuple[tuple[int, Callable[[Choices], Pair]], ...] = (
    (36, _statement), (8, _yes_no_question), (6, _open_question), (10, _two_clauses), (7, _that_clause),
    (6, _infinitive_clause), (5, _joined), (6, _relative), (6, _copula), (4, _passive), (2, _price), (2, _age),
    (1, _time_of_day), (1, _inhabitants),
)


def make_pair(choices: Choices) -> Pair:
    """Draw one sentence pair.

    Example:
      >>> english_side, german_side = make_pair(Choices(0, 0))
      >>> english_side[0].isupper(), german_side[-1] in ".?"
      (True, True)
    """
    source, target = choices.weighted(_SENTENCES)(choices)
    target = target.replace(",.", ".").replace(",,", ",")
    return source[0].upper() + source[1:], target[0].upper() + target[1:]


def generated_pairs(size: int, seed: int) -> tuple[Texts, Texts, Texts]:
    """Train, valid and test texts of the generated corpus.

    Args:
      size: sentence pairs of the train split; valid and test have 500 each.
      seed: another seed gives another corpus.

    Returns:
      The three splits, English first.
    """
    sizes = dict.fromkeys(SPLIT_NAMES, HELD_OUT_SIZE) | {"train": size}
    train, valid, test = (GeneratedSplit(make_pair, seed, name, sizes[name]).texts(2) for name in SPLIT_NAMES)
    return train, valid, test
