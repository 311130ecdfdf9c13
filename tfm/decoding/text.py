"""Text that grows while it is generated: what may be shown already, and where a stop string ends it."""

from collections.abc import Sequence


def utf8_safe_prefix(data: bytes) -> bytes:
    """The longest beginning of data that does not end inside a UTF-8 character.

    Bytes that can never become a character are kept: they are an error of their own, not an unfinished character.

    Args:
        data: bytes generated so far.

    Returns:
        data without the 0 to 3 bytes of a character that has only begun.

    Example:
        >>> utf8_safe_prefix("für".encode()[:2])
        b'f'
    """
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:  # a continuation: its first byte is further to the left
            continue
        needed = (
            4 if byte & 0b1111_1000 == 0b1111_0000 else 3 if byte >> 4 == 0b1110 else 2 if byte >> 5 == 0b110 else 1
        )
        return data[:-back] if needed > back else data
    return data


def settled(text: str) -> str:
    """The beginning of decoded text that later tokens cannot change: without replacement characters at its end.

    Example:
        >>> settled("caf\\ufffd")
        'caf'
    """
    return text.rstrip("\ufffd")


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Text before the stop string that is complete first, and whether there is one.

    So the result is the same whether the text comes at once or letter by letter.

    Example:
        >>> cut_at_stop("one. two. three", [" three", ". two"])
        ('one', True)
    """
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop and stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


def before_possible_stop(text: str, stops: Sequence[str]) -> str:
    """The beginning of text, which holds no stop string, that can be shown: its end may be a stop string's beginning.

    Example:
        >>> before_possible_stop("Hello, Us", ["User:"])
        'Hello, '
    """
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return text[: len(text) - longest]
