"""Replaces values in JSON text and leaves the rest as it is.

A bridge changes ids and tokens of messages that it does not otherwise understand. Decoding and encoding the whole
message would lose what a program's numbers cannot hold (`1e400`, an integer of a hundred digits), half an emoji, a
member given twice. So the text is cut where the value stands. The text must be JSON: `decode` says whether it is.

`find` has two ways. The walk reads every member on the way to the value: 13 µs for the progress token of a usual
message. The anchored way takes less than 2 µs: one regular expression matches the text up to the value. It holds where
only members with plain values stand before the value, and no name of the path occurs after it, because of members
given twice the last counts. All other texts take the walk.
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_LINE_ENDS = str.maketrans("\r\n", "  ")

#: Digits of an integer that is read as one: Python refuses to read more than 4,300, and takes long over them.
_MAX_DIGITS = 1_000


def _refused(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _float(digits: str) -> float | None:
    found = float(digits)
    return found if math.isfinite(found) else None


_DECODER = json.JSONDecoder(
    parse_float=_float,
    parse_int=lambda digits: int(digits) if len(digits) <= _MAX_DIGITS else None,
    parse_constant=_refused,
)
_raw_decode = _DECODER.raw_decode
#: The same, faster; it raises `ValueError` for integers of thousands of digits.
_fast_decode = json.JSONDecoder(parse_float=_float, parse_constant=_refused).raw_decode


def decode(text: str) -> Any:
    """The text as a value. A number that a double, or a thousand digits, cannot hold comes out as `None`.

    Raises `ValueError` if the text is not JSON, or nests deeper than can be read.
    """
    try:
        value, stop = _fast_decode(text)
        if stop == len(text):
            return value
    except (ValueError, RecursionError):
        pass
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def without_halves(value: Any) -> Any:
    """The same value with a question mark for each half of a character outside the basic plane ("\\ud83d"), which JSON
    allows in a text and no store can hold. Raises `ValueError` if it nests deeper than can be written."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode(errors="replace"))
    return value


def one_line(text: str) -> str:
    """The same JSON without line ends: inside of strings they are escaped, elsewhere they are space."""
    return text.translate(_LINE_ENDS) if "\n" in text or "\r" in text else text


_PLAIN_STRING = r'"[^"\\]*+"'
_PLAIN_VALUE = rf"(?:{_PLAIN_STRING}|[-+.0-9Ee]++|true|false|null)"
_PLAIN_NAME = re.compile(r"[A-Za-z_]+")
_ESCAPE = "\\u"
"""With it a name can be spelled in many ways. No other escape stands for a letter."""


@functools.cache
def _anchored(path: tuple[str, ...]) -> tuple[tuple[str, ...], re.Pattern[str]] | None:
    """The names as they stand in a text, and what matches a text up to the value; None for a path with other names."""
    if not path or not all(map(_PLAIN_NAME.fullmatch, path)):
        return None
    quoted = tuple(f'"{name}"' for name in path)
    # Lazy, so that it stops at the first member of that name; possessive inside, so that it never backtracks.
    objects = (rf"\{{ ?(?:{_PLAIN_STRING}: ?{_PLAIN_VALUE}, ?)*?{name}: ?" for name in quoted)
    return quoted, re.compile("".join(objects) + rf"({_PLAIN_STRING}|-?[0-9]++)(?=[,}}])")


def find(text: str, *path: str) -> tuple[int, int] | None:
    """Find the place of the value that these member names lead to."""
    if (anchored := _anchored(path)) is None:
        return walk(text, *path)
    names, pattern = anchored
    found = pattern.match(text)
    stop = found.end() if found is not None else 0
    # A single character is found about ten times as fast as two, and most texts have no backslash.
    if text.find("\\", stop) >= 0 and text.find(_ESCAPE, stop) >= 0:
        return walk(text, *path)
    if found is None:
        return walk(text, *path) if names[-1] in text else None
    for name in names:
        if text.find(name, stop) >= 0:
            return walk(text, *path)
    return found.span(1)


def walk(text: str, *path: str) -> tuple[int, int] | None:
    """As `find`, for every text."""
    start, end = _skip(text, 0), len(text)
    for name in path:
        found = None
        for key, begin, stop in _parts(text, start) if text[start] == "{" else ():
            if key == name:
                found = begin, stop  # of members given twice the last counts
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


def members(text: str) -> dict[str, str]:
    """The texts of an object's values, by the members' names; empty if the text is not an object."""
    start = _skip(text, 0)
    return {name: text[begin:stop] for name, begin, stop in _parts(text, start)} if text[start] == "{" else {}


def object_of(members: Mapping[str, str]) -> str:
    """The text of the object that has these members."""
    return f"{{{','.join(f'{json.dumps(name)}:{value}' for name, value in members.items())}}}"


_ENVELOPE = rf'"(?:jsonrpc|id)": ?{_PLAIN_VALUE}'
_BEFORE_ANSWER = re.compile(rf'\{{ ?(?:{_ENVELOPE}, ?)*+"(result|error)": ?')
_AFTER_ANSWER = re.compile(rf"(?:, ?{_ENVELOPE})*+ ?\}}")


def answer(text: str) -> tuple[dict[str, Any], int, int] | None:
    """Decode a JSON-RPC response once: the message, and where its result or its error begins and ends.

    None for other texts, and for responses that are written in an unusual way.
    """
    before = _BEFORE_ANSWER.match(text)
    if before is None:
        return None
    try:
        value, stop = _raw_decode(text, before.end())
        if _AFTER_ANSWER.fullmatch(text, stop) is None:
            return None
        envelope = _DECODER.decode(f"{text[: before.end()]}null{text[stop:]}")
    except (ValueError, RecursionError):  # `decode` reports the error
        return None
    return {**envelope, before[1]: value}, before.end(), stop


def items(text: str) -> list[str]:
    """The texts of an array's items."""
    return [text[begin:stop] for _, begin, stop in _parts(text, _skip(text, 0))]


def _parts(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """The members of an object, or the items of an array, that begins here: the member's name, where the value begins,
    and where the value ends."""
    is_object, name = text[at] == "{", ""
    at = _skip(text, at + 1)
    while text[at] not in "]}":
        if is_object:
            name, at = _raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        _, stop = _raw_decode(text, at)
        yield name, at, stop
        at = _skip(text, stop)
        at = _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


_W = r"[ \t]*+"
_MEMBER = rf"{_PLAIN_STRING}{_W}:{_W}{_PLAIN_VALUE}{_W}"
_ID = rf'"id"{_W}:{_W}"?([0-9]{{1,18}})"?{_W}'
_OUTCOME = rf'(?:{_MEMBER},{_W})*?"(?:result|error)"{_W}:'
_ID_FIRST = re.compile(rf"\{{{_W}(?:{_MEMBER},{_W})*?{_ID},{_W}{_OUTCOME}")
_OUTCOME_FIRST = re.compile(rf"\{{{_W}{_OUTCOME}")
_ID_LAST = re.compile(rf"{_ID}(?:,{_W}{_MEMBER})*+\}}{_W}$")


def id_at_the_edges(head: bytes, tail: bytes) -> int | None:
    """The id, a number, of a response that is known by its first and its last bytes only, or that is not JSON between
    them. It stands before the result or the error, or after it, with plain members at most beside it."""
    start = head.decode("latin-1")
    if (found := _ID_FIRST.match(start)) is None and _OUTCOME_FIRST.match(start):
        found = _ID_LAST.search(tail.decode("latin-1"))
    return None if found is None else int(found[1])
