"""Words of the generated corpus: English-German nouns, adjectives, verbs and names with their irregular forms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """A noun. `oblique` is the German singular outside the nominative where it differs (der Junge, den Jungen)."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str
    kind: str
    oblique: str = ""

    @property
    def genitive(self) -> str:
        """German genitive singular."""
        if self.gender == "f":
            return self.german
        if self.oblique:
            return self.oblique
        return self.german + ("es" if self.german.endswith(("s", "ß", "x", "z", "ch", "d", "t", "f", "nn")) else "s")


@dataclass(frozen=True)
class Adjective:
    """An adjective; German endings go to `german`, the comparatives stand alone."""

    english: str
    german: str
    english_more: str
    german_more: str


@dataclass(frozen=True)
class Verb:
    """A verb and what it takes.

    `english`: base, third person, past, participle. `present`: German ich, du, er. `frame`: "none", "acc", "dat",
    "both" (dative person, accusative thing), "place", "goal", or a preposition with its case such as "auf acc".
    `objects`: kinds of noun that the object may be; `prefix`: of a separable verb.
    """

    english: tuple[str, str, str, str]
    infinitive: str
    present: tuple[str, str, str]
    past: str
    participle: str
    frame: str
    objects: tuple[str, ...] = ()
    prefix: str = ""
    auxiliary: str = "haben"
    english_preposition: str = ""


def _noun(line: str, kind: str) -> Noun:
    english, plural, german, german_plural, gender, *oblique = line.split()
    return Noun(english.replace("_", " "), plural.replace("_", " "), german, german_plural, gender, kind, *oblique)


_NOUNS = {
    "person": """man men Mann Männer m|woman women Frau Frauen f|child children Kind Kinder n
        |boy boys Junge Jungen m Jungen|girl girls Mädchen Mädchen n
        |teacher teachers Lehrer Lehrer m|doctor doctors Arzt Ärzte m
        |student students Student Studenten m Studenten|neighbour neighbours Nachbar Nachbarn m Nachbarn
        |friend friends Freund Freunde m|sister sisters Schwester Schwestern f|brother brothers Bruder Brüder m
        |mother mothers Mutter Mütter f|father fathers Vater Väter m|daughter daughters Tochter Töchter f
        |farmer farmers Bauer Bauern m Bauern|guest guests Gast Gäste m|painter painters Maler Maler m""",
    "animal": """dog dogs Hund Hunde m|cat cats Katze Katzen f|horse horses Pferd Pferde n|bird birds Vogel Vögel m
        |cow cows Kuh Kühe f""",
    "text": """book books Buch Bücher n|letter letters Brief Briefe m|newspaper newspapers Zeitung Zeitungen f
        |report reports Bericht Berichte m|story stories Geschichte Geschichten f|song songs Lied Lieder n""",
    "food": """apple apples Apfel Äpfel m|cake cakes Kuchen Kuchen m|soup soups Suppe Suppen f|egg eggs Ei Eier n
        |potato potatoes Kartoffel Kartoffeln f|carrot carrots Karotte Karotten f""",
    "vehicle": """car cars Auto Autos n|bicycle bicycles Fahrrad Fahrräder n|train trains Zug Züge m
        |ship ships Schiff Schiffe n|bus buses Bus Busse m""",
    "thing": """table tables Tisch Tische m|chair chairs Stuhl Stühle m|key keys Schlüssel Schlüssel m
        |bag bags Tasche Taschen f|picture pictures Bild Bilder n|clock clocks Uhr Uhren f|knife knives Messer Messer n
        |coat coats Mantel Mäntel m|shirt shirts Hemd Hemden n""",
    "device": "lamp lamps Lampe Lampen f|radio radios Radio Radios n|computer computers Computer Computer m",
    "opening": "door doors Tür Türen f|window windows Fenster Fenster n|box boxes Kiste Kisten f|gate gates Tor Tore n",
    "place": """garden gardens Garten Gärten m|house houses Haus Häuser n|school schools Schule Schulen f
        |town towns Stadt Städte f|kitchen kitchens Küche Küchen f|forest forests Wald Wälder m|park parks Park Parks m
        |church churches Kirche Kirchen f|museum museums Museum Museen n|village villages Dorf Dörfer n
        |shop shops Laden Läden m|hotel hotels Hotel Hotels n""",
}

NOUNS: dict[str, list[Noun]] = {
    kind: [_noun(line, kind) for line in lines.split("|")] for kind, lines in _NOUNS.items()}


def _adjective(line: str) -> Adjective:
    english, german, english_more, german_more = (word.replace("_", " ") for word in line.split())
    return Adjective(english, german, english_more, german_more)


_ADJECTIVES = {
    "any": """old alt older älter|new neu newer neuer|small klein smaller kleiner|big groß bigger größer
        |beautiful schön more_beautiful schöner|good gut better besser""",
    "living": """young jung younger jünger|tired müde more_tired müder|friendly freundlich friendlier freundlicher
        |strong stark stronger stärker|hungry hungrig hungrier hungriger|famous berühmt more_famous berühmter""",
    "thing": """red rot redder röter|green grün greener grüner|blue blau bluer blauer|black schwarz blacker schwärzer
        |cheap billig cheaper billiger|heavy schwer heavier schwerer|expensive teur more_expensive teurer""",
    "text": "long lang longer länger|short kurz shorter kürzer|interesting interessant more_interesting interessanter",
    "food": "fresh frisch fresher frischer|warm warm warmer wärmer|sweet süß sweeter süßer",
    "place": "quiet ruhig quieter ruhiger|clean sauber cleaner sauberer|modern modern more_modern moderner",
}
_OF_KIND = {"person": "living", "animal": "living", "vehicle": "thing", "opening": "thing", "device": "thing"}
_PARSED = {name: [_adjective(line) for line in lines.split("|")] for name, lines in _ADJECTIVES.items()}

ADJECTIVES: dict[str, list[Adjective]] = {kind: _PARSED["any"] + _PARSED[_OF_KIND.get(kind, kind)] for kind in NOUNS}

PREDICATE_FORM = {"teur": "teuer"}

NAMES = {"m": ("Peter", "Thomas", "Paul", "Martin", "David", "Felix"),
         "f": ("Anna", "Maria", "Julia", "Laura", "Emma", "Clara")}
CITIES = (("Berlin", "Berlin"), ("Vienna", "Wien"), ("Munich", "München"), ("Hamburg", "Hamburg"), ("Cologne", "Köln"),
          ("London", "London"), ("Paris", "Paris"), ("Rome", "Rom"))


def _weak(infinitive: str) -> tuple[tuple[str, str, str], str]:
    """Present and past of a regular German verb."""
    stem = infinitive.removesuffix("en")
    link = "e" if stem.endswith(("t", "d", "ffn", "chn")) else ""
    second = stem + link + ("t" if stem.endswith(("s", "z", "ß")) else "st")
    return (stem + "e", second, stem + link + "t"), stem + link + "te"


def _verb(line: str) -> Verb:
    """`english forms / infinitive [du er past] participle / frame [object kinds] [+prefix] [sein] [=preposition]`."""
    english, german, rest = (part.split() for part in line.split("/"))
    forms = [word.replace("_", " ") for word in english]
    if len(forms) == 1:
        past = forms[0].removesuffix("e") + "ed"
        forms = [forms[0], forms[0] + "s", past, past]
    infinitive, participle = german[0], german[-1]
    present, german_past = _weak(infinitive)
    if len(german) > 2:
        present, german_past = (present[0], german[1], german[2]), german[3]
    marks = {word[0]: word[1:] for word in rest if word[0] in "+="}
    plain = [word for word in rest if word[0] not in "+=" and word != "sein"]
    frame = plain[0].replace("_", " ")
    return Verb((forms[0], forms[1], forms[2], forms[3]), infinitive, present, german_past, participle,
                frame, tuple(plain[1:]), marks.get("+", ""), "sein" if "sein" in rest else "haben",
                marks.get("=", ""))


_VERBS = """
buy buys bought bought/kaufen gekauft/acc text food vehicle thing
sell sells sold sold/verkaufen verkauft/acc vehicle thing food
read reads read read/lesen liest liest las gelesen/acc text
write writes wrote written/schreiben schreibst schreibt schrieb geschrieben/acc text
see sees saw seen/sehen siehst sieht sah gesehen/acc person animal vehicle place
find finds found found/finden findest findet fand gefunden/acc thing text animal
look_for looks_for looked_for looked_for/suchen gesucht/acc thing person animal
eat eats ate eaten/essen isst isst aß gegessen/acc food
cook/kochen gekocht/acc food
carry carries carried carried/tragen trägst trägt trug getragen/acc thing
repair/reparieren repariert/acc vehicle device
paint/malen gemalt/acc person animal place
visit/besuchen besucht/acc person place
know knows knew known/kennen kennst kennt kannte gekannt/acc person
love/lieben geliebt/acc person animal
need/brauchen gebraucht/acc thing vehicle food
hear hears heard heard/hören gehört/acc person animal text
lose loses lost lost/verlieren verlierst verliert verlor verloren/acc thing text
forget forgets forgot forgotten/vergessen vergisst vergisst vergaß vergessen/acc thing text
wash washes washed washed/waschen wäschst wäscht wusch gewaschen/acc vehicle animal
open/machen gemacht/acc opening +auf
close/machen gemacht/acc opening +zu
call/rufen rufst ruft rief gerufen/acc person +an
invite/laden lädst lädt lud geladen/acc person +ein
pick_up picks_up picked_up picked_up/holen geholt/acc person +ab
turn_on turns_on turned_on turned_on/schalten geschaltet/acc device +ein
turn_off turns_off turned_off turned_off/schalten geschaltet/acc device +aus
help/helfen hilfst hilft half geholfen/dat person
thank/danken gedankt/dat person
answer/antworten geantwortet/dat person
follow/folgen gefolgt/dat person animal sein
give gives gave given/geben gibst gibt gab gegeben/both text thing food
show shows showed shown/zeigen gezeigt/both text thing place
send sends sent sent/schicken geschickt/both text thing
bring brings brought brought/bringen bringst bringt brachte gebracht/both thing food
wait/warten gewartet/auf_acc person vehicle =for
think thinks thought thought/denken denkst denkt dachte gedacht/an_acc person =of
talk/sprechen sprichst spricht sprach gesprochen/über_acc text person =about
dream/träumen geträumt/von_dat place person =of
play/spielen gespielt/mit_dat animal person =with
sleep sleeps slept slept/schlafen schläfst schläft schlief geschlafen/place
work/arbeiten gearbeitet/place
live/wohnen gewohnt/place
dance/tanzen getanzt/place
sing sings sang sung/singen singst singt sang gesungen/place
stay/bleiben bleibst bleibt blieb geblieben/place sein
laugh/lachen gelacht/none
swim swims swam swum/schwimmen schwimmst schwimmt schwamm geschwommen/none sein
get_up gets_up got_up got_up/stehen stehst steht stand gestanden/none +auf sein
arrive/kommen kommst kommt kam gekommen/place +an sein
go goes went gone/gehen gehst geht ging gegangen/goal sein
drive drives drove driven/fahren fährst fährt fuhr gefahren/goal sein
run runs ran run/laufen läufst läuft lief gelaufen/goal sein
"""

VERBS: list[Verb] = [_verb(line) for line in _VERBS.strip().splitlines()]

SPEECH: list[Verb] = [
    _verb("say says said said/sagen gesagt/none"),
    _verb("believe/glauben geglaubt/none"),
    _verb("hope/hoffen gehofft/none"),
    Verb(("know", "knows", "knew", "known"), "wissen", ("weiß", "weißt", "weiß"), "wusste", "gewusst", "none"),
]
"""Verbs with a that-clause."""

CONTROL: list[Verb] = [
    _verb("try tries tried tried/versuchen versucht/none"),
    _verb("hope/hoffen gehofft/none"),
    _verb("decide/beschließen beschließt beschließt beschloss beschlossen/none"),
]
"""Verbs with an infinitive clause."""


@dataclass(frozen=True)
class Modal:
    """A modal verb: `german` holds ich, du, er, wir; `takes_do`: English negates and asks with "do"."""

    english: str
    english_third: str
    german: tuple[str, str, str, str]
    takes_do: bool = False
    negatable: bool = True


MODALS = (
    Modal("can", "can", ("kann", "kannst", "kann", "können")),
    Modal("must", "must", ("muss", "musst", "muss", "müssen"), negatable=False),
    Modal("should", "should", ("sollte", "solltest", "sollte", "sollten")),
    Modal("want to", "wants to", ("will", "willst", "will", "wollen"), takes_do=True),
)

HABEN = {"present": ("habe", "hast", "hat", "haben"), "past": ("hatte", "hattest", "hatte", "hatten")}
SEIN = {"present": ("bin", "bist", "ist", "sind"), "past": ("war", "warst", "war", "waren")}
WERDEN = {"present": ("werde", "wirst", "wird", "werden"), "past": ("wurde", "wurdest", "wurde", "wurden")}
