"""One clause as an abstract structure, and its word order in English and in German."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tfm.data import german
from tfm.data.choices import Choices
from tfm.data.lexicon import MODALS, VERBS, Modal, Verb
from tfm.data.phrases import NounPhrase, Pair, goal, location, noun_phrase, object_phrase, person, time

_ADVERBS = (("often", "oft"), ("always", "immer"), ("never", "nie"))
_BE = {"present": ("am", "are", "is", "are"), "past": ("was", "were", "was", "were")}


@dataclass
class Clause:
    """Who does what to whom, when and where: everything but the order of the words."""

    subject: NounPhrase
    verb: Verb
    tense: str
    modal: Modal | None = None
    direct: NounPhrase | None = None
    indirect: NounPhrase | None = None
    time: Pair | None = None
    adverb: Pair | None = None
    place: Pair | None = None
    negated: bool = False


def make_clause(choices: Choices, *, subject: NounPhrase | None = None, tense: str = "",
                with_time: bool = True) -> Clause:
    """Draw a clause.

    Args:
      choices: source of randomness.
      subject: None: drawn.
      tense: "": drawn.
      with_time: whether it may say when.
    """
    subject = subject or person(choices)
    tense = tense or choices.weighted(((34, "present"), (28, "past"), (14, "perfect"), (10, "future"), (14, "modal")))
    verb = choices.pick(VERBS)
    while tense == "past" and verb.english[2] == verb.english[0] and not _third(subject):
        verb = choices.pick(VERBS)  # "they read" does not say when
    clause = Clause(subject, verb, tense, choices.pick(MODALS) if tense == "modal" else None)
    _add_objects(choices, clause)
    if with_time and choices.chance(40):
        clause.time = time(choices, tense)
    elif tense in ("present", "past") and choices.chance(12):
        clause.adverb = choices.pick(_ADVERBS)
    clause.negated = choices.chance(14) and _may_be_negated(clause)
    return clause


def _add_objects(choices: Choices, clause: Clause) -> None:
    frame, verb = clause.verb.frame, clause.verb
    if frame == "both":
        clause.indirect = object_phrase(choices, ("person",), clause.subject)
        clause.direct = noun_phrase(choices, choices.pick(verb.objects), attributes=False)
    elif frame == "goal":
        clause.place = goal(choices)
    elif frame == "place":
        clause.place = location(choices) if verb.infinitive == "wohnen" or choices.chance(70) else None
    elif frame != "none":
        clause.direct = object_phrase(choices, verb.objects, clause.subject)
        if frame == "acc" and clause.direct.kind not in ("place", "person") and choices.chance(15):
            clause.place = location(choices)


def _may_be_negated(clause: Clause) -> bool:
    phrases = [phrase for phrase in (clause.subject, clause.direct, clause.indirect) if phrase is not None]
    return (clause.adverb is None and not any(phrase.quantified for phrase in phrases)
            and not clause.subject.indefinite and (clause.modal is None or clause.modal.negatable))


def be(subject: NounPhrase, tense: str) -> str:
    """The form of "to be"."""
    return _BE[tense][3 if subject.plural else subject.person - 1]


def _third(subject: NounPhrase) -> bool:
    return subject.person == 3 and not subject.plural


def english_verb(clause: Clause, *, split: bool) -> tuple[str, str]:
    """Auxiliary and main verb; `split` asks for an auxiliary, as questions and "not" do."""
    base, third, past, participle = clause.verb.english
    singular = _third(clause.subject)
    if clause.tense == "perfect":
        return ("has" if singular else "have"), participle
    if clause.tense == "future":
        return "will", base
    if clause.tense == "modal":
        assert clause.modal is not None
        if not clause.modal.takes_do:
            return clause.modal.english, base
        if not split:
            return "", f"{clause.modal.english_third if singular else clause.modal.english} {base}"
        return ("does" if singular else "do"), f"{clause.modal.english} {base}"
    if clause.tense == "past":
        return ("did", base) if split else ("", past)
    if split:
        return ("does" if singular else "do"), base
    return "", (third if singular else base)


def _english_objects(clause: Clause) -> list[str]:
    words = []
    if clause.indirect is not None:
        words.append(clause.indirect.english_object)
    if clause.direct is not None:
        preposition = clause.verb.english_preposition
        words.append(f"{preposition} {clause.direct.english_object}".strip())
    if clause.place is not None:
        words.append(clause.place[0])
    return words


def english(clause: Clause, *, question: bool = False, front_time: bool = False, subject: str | None = None,
            infinitive: bool = False) -> str:
    """The English clause.

    Args:
      clause: the clause.
      question: auxiliary before the subject.
      front_time: the time stands first.
      subject: what stands for the subject ("who" in a relative clause). None: its own words.
      infinitive: only the bare verb and what follows.
    """
    when = [clause.time[0]] if clause.time else []
    rest = _english_objects(clause) + ([] if front_time else when)
    auxiliary, main = ("", clause.verb.english[0]) if infinitive else english_verb(
        clause, split=question or clause.negated)
    if clause.direct is not None and clause.direct.pronoun and main.endswith(" up"):  # picks her up
        main, rest = main.removesuffix(" up"), [rest[0], "up", *rest[1:]]
    if infinitive:
        return " ".join([main, *rest])
    who = clause.subject.english if subject is None else subject
    adverb = [clause.adverb[0]] if clause.adverb else []
    if question:
        no = ["not"] if clause.negated else []
        words = [auxiliary, who, *no, *adverb, main, *rest]
    else:
        finite = f"{auxiliary} not".replace("can not", "cannot") if clause.negated else auxiliary
        words = [*(when if front_time else []), who, finite, *adverb, main, *rest]
    return " ".join(word for word in words if word)


def _german_middle(clause: Clause, *, front_time: bool) -> list[str]:
    """What stands between the two parts of the predicate: pronouns, time, objects, negation, place."""
    pronouns: list[str] = []
    nouns: list[str] = []
    late: list[str] = []
    negation = "nicht" if clause.negated else ""
    frame = clause.verb.frame
    if clause.indirect is not None:
        (pronouns if clause.indirect.pronoun else nouns).append(clause.indirect.german("dat"))
    if clause.direct is not None:
        if " " in frame:
            preposition, case = frame.split()
            late.append(german.with_preposition(preposition, clause.direct.german(case)))
        else:
            case = "acc" if frame == "both" else frame
            words = clause.direct.german(case)
            if negation and clause.direct.indefinite:
                words, negation = f"k{words}", ""
            (pronouns if clause.direct.pronoun else nouns).append(words)
    if clause.place is not None:
        late.append(clause.place[1])
    when = [clause.time[1]] if clause.time and not front_time else []
    adverb = [clause.adverb[1]] if clause.adverb else []
    return [*pronouns, *when, *adverb, *nouns, negation, *late]


def german_clause(clause: Clause, order: str, *, subject: str | None = None) -> str:
    """The German clause.

    Args:
      clause: the clause.
      order: "second" (subject, verb), "time" (time, verb, subject), "first" (verb, subject: questions, and main clauses
        after another clause) or "final" (verb last).
      subject: what stands for the subject (a relative pronoun). None: its own words.
    """
    who = clause.subject.german("nom") if subject is None else subject
    finite, closing, one_word = german.verb_parts(clause.verb, clause.tense, clause.subject.person,
                                                  clause.subject.plural, clause.modal)
    middle = _german_middle(clause, front_time=order == "time")
    if order == "final":
        words = [who, *middle, closing + finite if one_word else f"{closing} {finite}"]
    elif order == "second":
        words = [who, finite, *middle, closing]
    else:
        first = [clause.time[1]] if order == "time" and clause.time else []
        words = [*first, finite, who, *middle, closing]
    return " ".join(word for word in words if word)


def german_infinitive(clause: Clause) -> str:
    """The clause with "zu" and the infinitive, without its subject."""
    words = [*_german_middle(clause, front_time=False), german.infinitive(clause.verb, with_zu=True)]
    return " ".join(word for word in words if word)


def without_time(clause: Clause) -> Clause:
    """The same clause, not saying when."""
    return replace(clause, time=None)
