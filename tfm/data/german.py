"""German inflection: articles and adjectives by case and gender, finite verbs by person, contracted prepositions."""

from __future__ import annotations

from tfm.data.lexicon import HABEN, PREDICATE_FORM, SEIN, WERDEN, Modal, Noun, Verb

Table = dict[tuple[str, str], str]


def _table(nom: str, acc: str, dat: str, gen: str) -> Table:
    """(case, gender) -> ending, from rows for masculine, feminine, neuter and plural; "-" is no ending."""
    rows = {"nom": nom, "acc": acc, "dat": dat, "gen": gen}
    return {(case, gender): ending.replace("-", "") for case, row in rows.items()
            for gender, ending in zip(("m", "f", "n", "pl"), row.split(), strict=True)}


_DER = _table("er e es e", "en e es e", "em er em en", "es er es er")
_EIN = _table("- e - e", "en e - e", "em er em en", "es er es er")
_WEAK = _table("e e e en", "en e e en", "en en en en", "en en en en")
_MIXED = _table("er e es en", "en e es en", "en en en en", "en en en en")
_STRONG = _table("er e es e", "en e es e", "em er em en", "en er en er")
_ADJECTIVE = {"der": _WEAK, "ein": _MIXED, "": _STRONG}
_THE = _table("der die das die", "den die das die", "dem der dem den", "des der des der")

_CONTRACTED = {"an dem": "am", "in dem": "im", "zu dem": "zum", "zu der": "zur", "in das": "ins", "von dem": "vom"}


def the(case: str, gender: str) -> str:
    """The definite article.

    Example:
      >>> the("dat", "f"), the("acc", "m")
      ('der', 'den')
    """
    return _THE[case, gender]


def der_word(stem: str, case: str, gender: str) -> str:
    """dieser, jeder: inflected like the article."""
    return stem + _DER[case, gender]


def ein_word(stem: str, case: str, gender: str) -> str:
    """ein, kein, mein, ...: without an ending in three places."""
    return stem + _EIN[case, gender]


def adjective(stem: str, case: str, gender: str, after: str) -> str:
    """An adjective before its noun: weak after a der-word, mixed after an ein-word, strong after none.

    Example:
      >>> adjective("alt", "nom", "m", "der"), adjective("alt", "nom", "m", "ein"), adjective("müde", "dat", "pl", "")
      ('alte', 'alter', 'müden')
    """
    return stem.removesuffix("e") + _ADJECTIVE[after][case, gender]


def predicate(stem: str) -> str:
    """An adjective after the verb to be."""
    return PREDICATE_FORM.get(stem, stem)


def noun(word: Noun, case: str, plural: bool) -> str:
    """A noun in its case: dative plurals end in -n, genitive singulars in -(e)s.

    Example:
      >>> from tfm.data.lexicon import NOUNS
      >>> child = NOUNS["person"][2]
      >>> noun(child, "dat", True), noun(child, "gen", False)
      ('Kindern', 'Kindes')
    """
    if plural:
        return word.german_plural + ("n" if case == "dat" and not word.german_plural.endswith(("n", "s")) else "")
    if case == "gen":
        return word.genitive
    return word.oblique if word.oblique and case != "nom" else word.german


def with_preposition(preposition: str, phrase: str) -> str:
    """Put a preposition before a phrase; "in dem" becomes "im"."""
    words = phrase.split(" ", 1)
    short = _CONTRACTED.get(f"{preposition} {words[0]}")
    return f"{preposition} {phrase}" if short is None else " ".join([short, *words[1:]])


def _person_form(forms: tuple[str, ...], person: int, plural: bool) -> str:
    return forms[3] if plural else forms[person - 1]


def _past(stem: str, person: int, plural: bool) -> str:
    if plural:
        return stem + ("n" if stem.endswith("e") else "en")
    if person != 2:
        return stem
    if stem.endswith(("s", "ß")):
        return stem + "t"
    return stem + ("est" if stem.endswith(("t", "d")) else "st")


def infinitive(verb: Verb, *, with_zu: bool = False) -> str:
    """The infinitive; "zu" goes between a separable prefix and the verb.

    Example:
      >>> from tfm.data.lexicon import VERBS
      >>> opening = next(verb for verb in VERBS if verb.prefix == "auf")
      >>> infinitive(opening), infinitive(opening, with_zu=True)
      ('aufmachen', 'aufzumachen')
    """
    if not with_zu:
        return verb.prefix + verb.infinitive
    return f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"


def verb_parts(verb: Verb, tense: str, person: int, plural: bool, modal: Modal | None = None) -> tuple[str, str, bool]:
    """The two parts of a German predicate.

    Args:
      verb: the verb.
      tense: "present", "past", "perfect", "future" or "modal".
      person, plural: of the subject.
      modal: for tense "modal".

    Returns:
      (finite part, what closes the clause, whether a verb-final clause writes the two as one word).
    """
    if tense == "modal":
        assert modal is not None
        return _person_form(modal.german, person, plural), infinitive(verb), False
    if tense == "future":
        return _person_form(WERDEN["present"], person, plural), infinitive(verb), False
    if tense == "perfect":
        auxiliary = HABEN if verb.auxiliary == "haben" else SEIN
        return _person_form(auxiliary["present"], person, plural), verb.prefix + verb.participle, False
    finite = _past(verb.past, person, plural) if tense == "past" else _person_form(
        (*verb.present, verb.infinitive), person, plural)
    return finite, verb.prefix, True
