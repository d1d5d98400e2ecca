"""JSON text in which one value is replaced, and the rest stays as it came.

A bridge changes ids and tokens of messages that it does not otherwise understand. Decoding and encoding the whole
would lose what a program's numbers cannot hold (`1e400`, an integer of a hundred digits), half an emoji, a member given
twice. So the text is cut where the value stands. The text must be JSON: `decode` says whether it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_LINE_ENDS = str.maketrans("\r\n", "  ")

#: Digits of an integer that is looked at as one. What is longer is no id, and Python refuses to read 4,300 of them.
_MAX_DIGITS = 20


def _integer(digits: str) -> object:
    return int(digits) if len(digits) <= _MAX_DIGITS else float("nan")


def _refused(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_float=lambda _: float("nan"), parse_int=_integer, parse_constant=_refused)
_raw_decode = _DECODER.raw_decode


def decode(text: str) -> Any:
    """What the text says, to look at only: fractions and very long integers come out as no number.

    Raises `ValueError` where it is no JSON, or nests deeper than can be read.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def one_line(text: str) -> str:
    """The same JSON without line ends: inside of strings they are escaped, elsewhere they are space."""
    return text.translate(_LINE_ENDS) if "\n" in text or "\r" in text else text


def find(text: str, *path: str) -> tuple[int, int] | None:
    """Where the value stands that these member names lead to."""
    start, end = _skip(text, 0), len(text)
    for name in path:
        found = None
        for key, begin, behind in _members(text, start):
            if key == name:
                found = begin, behind  # of members given twice the last counts
        if found is None:
            return None
        start, end = found
    return start, end


def cut(text: str, *path: str) -> str | None:
    """The value's own text."""
    found = find(text, *path)
    return None if found is None else text[found[0] : found[1]]


def replaced(text: str, value: str, *path: str) -> str:
    """The text with another value in that place; as it was if there is no such place."""
    found = find(text, *path)
    return text if found is None else f"{text[: found[0]]}{value}{text[found[1] :]}"


def items(text: str) -> list[str]:
    """The texts of an array's items."""
    found, at = [], _skip(text, _skip(text, 0) + 1)
    while text[at] != "]":
        _, behind = _raw_decode(text, at)
        found.append(text[at:behind])
        at = _skip(text, behind)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """The members of an object that begins here: name, where the value begins, and what stands behind it."""
    if text[at] != "{":
        return
    at = _skip(text, at + 1)
    while text[at] == '"':
        name, at = _raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        _, behind = _raw_decode(text, begin)
        yield name, begin, behind
        at = _skip(text, behind)
        at = _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
