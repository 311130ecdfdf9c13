"""Numbers, dates and times of day in English and German."""

from __future__ import annotations

_ENGLISH = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
            "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_GERMAN = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
           "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn")
_ENGLISH_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_GERMAN_TENS = ("", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
MONTHS = (("January", "Januar"), ("February", "Februar"), ("March", "März"), ("April", "April"), ("May", "Mai"),
          ("June", "Juni"), ("July", "Juli"), ("August", "August"), ("September", "September"), ("October", "Oktober"),
          ("November", "November"), ("December", "Dezember"))
WEEKDAYS = (("Monday", "Montag"), ("Tuesday", "Dienstag"), ("Wednesday", "Mittwoch"), ("Thursday", "Donnerstag"),
            ("Friday", "Freitag"), ("Saturday", "Samstag"), ("Sunday", "Sonntag"))


def number_words(number: int) -> tuple[str, str]:
    """A number from 0 to 99 in words: German says the ones before the tens.

    Example:
      >>> number_words(21), number_words(7)
      (('twenty-one', 'einundzwanzig'), ('seven', 'sieben'))
    """
    if number < 20:
        return _ENGLISH[number], _GERMAN[number]
    tens, ones = divmod(number, 10)
    if not ones:
        return _ENGLISH_TENS[tens], _GERMAN_TENS[tens]
    german_ones = "ein" if ones == 1 else _GERMAN[ones]
    return f"{_ENGLISH_TENS[tens]}-{_ENGLISH[ones]}", f"{german_ones}und{_GERMAN_TENS[tens]}"


def grouped(number: int) -> tuple[str, str]:
    """Digits, with a comma between thousands in English and a full stop in German.

    Example:
      >>> grouped(12450)
      ('12,450', '12.450')
    """
    return f"{number:,}", f"{number:,}".replace(",", ".")


def decimal(whole: int, hundredths: int) -> tuple[str, str]:
    """A price: a decimal point in English, a comma in German."""
    return f"{whole}.{hundredths:02d}", f"{whole},{hundredths:02d}"


def date(day: int, month: int, year: int | None = None) -> tuple[str, str]:
    """A date after "on" and "am".

    Example:
      >>> date(3, 5, 1998)
      ('3 May 1998', '3. Mai 1998')
    """
    english, german = MONTHS[month - 1]
    tail = "" if year is None else f" {year}"
    return f"{day} {english}{tail}", f"{day}. {german}{tail}"


def clock(hour: int, minute: int) -> tuple[str, str]:
    """A time of day as it is spoken, hours from 1 to 12 and minutes in fives.

    Example:
      >>> clock(7, 30), clock(12, 45)
      (('half past seven', 'halb acht'), ('a quarter to one', 'Viertel vor eins'))
    """
    following = hour % 12 + 1
    if minute == 0:
        return f"{_ENGLISH[hour]} o'clock", f"{'ein' if hour == 1 else _GERMAN[hour]} Uhr"
    if minute == 30:
        return f"half past {_ENGLISH[hour]}", f"halb {_GERMAN[following]}"
    if minute < 30:
        amount = ("a quarter", "Viertel") if minute == 15 else number_words(minute)
        return f"{amount[0]} past {_ENGLISH[hour]}", f"{amount[1]} nach {_GERMAN[hour]}"
    rest = 60 - minute
    amount = ("a quarter", "Viertel") if rest == 15 else number_words(rest)
    return f"{amount[0]} to {_ENGLISH[following]}", f"{amount[1]} vor {_GERMAN[following]}"


def digital(hour: int, minute: int) -> tuple[str, str]:
    """A time as in a timetable: a colon in English, a full stop and "Uhr" in German."""
    return f"{hour}:{minute:02d}", f"{hour}.{minute:02d} Uhr"
