"""Finds the members of an object in JSON text with comments and trailing commas, and says where each one stands.

Comments and trailing commas are replaced by spaces, one for each character. What is left is JSON with every value in
its old place, so Python's own decoder checks it and finds the ends of the values. Nothing here changes the text.
"""

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

_STRING = r'"(?:[^"\\]|\\.)*+"'
_COMMENT = r"//[^\r\n]*|/\*.*?\*/"
_COMMENTS = re.compile(_COMMENT, re.DOTALL)
_STRING_OR_COMMENT = re.compile(rf"{_STRING}|({_COMMENT})", re.DOTALL)
_STRING_OR_LAST_COMMA = re.compile(rf"{_STRING}|(,)(?=[ \t\r\n]*[\]}}])", re.DOTALL)
_BESIDE = re.compile(r"(?:[ \t]*/\*.*?\*/)*(?:[ \t]*//[^\r\n]*)?", re.DOTALL)
_NOT_A_LINE_END = re.compile(r"[^\r\n]")
_SPACE = re.compile(r"[ \t\r\n]*")
_INDENT = re.compile(r"[ \t]*")
LINE_END = re.compile(r"\r\n|\n|\r")


def _refused(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


# Numbers stay text: nothing here needs their value, and a text may have more digits than Python reads.
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refused)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member of an object, by its places in the text."""

    name: str
    gap: int
    """Behind the brace or the comma before it."""
    start: int
    """Where its name begins."""
    value: int
    end: int
    comma: int | None
    """The comma behind it."""


@dataclass(frozen=True, kw_only=True)
class Object:
    """An object, by its places in the text."""

    start: int
    end: int
    members: tuple[Member, ...]

    def member(self, name: str) -> Member | None:
        """The member of this name. Of members given twice the last counts, as it does for the hosts."""
        return next((member for member in reversed(self.members) if member.name == name), None)


class Document:
    """A text of JSON with comments and trailing commas. Raises `ValueError` if it is something else."""

    def __init__(self, text: str) -> None:
        self.text = text
        without = _STRING_OR_COMMENT.sub(_blanked, text)
        found = (match.start() for match in _STRING_OR_LAST_COMMA.finditer(without) if match[1])
        self._commas = [at for at in found if _ends_a_value(without, at)]
        ends = [*self._commas, len(without)]
        self._plain = " ".join(without[begin + 1 : end] for begin, end in zip([-1, *ends], ends, strict=False))
        self.value: Any = None
        self.root: int | None = None
        """Where the value begins; None for a text of comments and space only."""
        if self._plain.strip(" \t\r\n"):
            self.root = self._skip(0)
            try:
                self.value = _DECODER.decode(self._plain)
            except RecursionError as error:
                raise ValueError("it nests too deep") from error

    def object_at(self, at: int) -> Object | None:
        """The object that begins here; None for another value."""
        if self._plain[at] != "{":
            return None
        members: list[Member] = []
        gap, here = at + 1, self._skip(at + 1)
        while self._plain[here] != "}":
            start = here
            name, here = _DECODER.raw_decode(self._plain, start)
            value = self._skip(self._skip(here) + 1)
            _, end = _DECODER.raw_decode(self._plain, value)
            here = self._skip(end)
            comma = here if self._plain[here] == "," else self._comma_between(end, here)
            members.append(Member(name=name, gap=gap, start=start, value=value, end=end, comma=comma))
            if comma is not None:
                gap, here = comma + 1, self._skip(comma + 1)
        return Object(start=at, end=here + 1, members=tuple(members))

    def decoded(self, at: int) -> Any:
        """The value that begins here."""
        return _DECODER.raw_decode(self._plain, at)[0]

    def beside(self, at: int) -> int:
        """The end of the comments that begin in the line of this place; the place itself if there are none."""
        found = _BESIDE.match(self.text, at)
        return at if found is None else found.end()

    def lead(self, member: Member) -> int:
        """Where the space before a member's name begins, behind every comment before it."""
        ends = [found.end() for found in _COMMENTS.finditer(self.text, member.gap, member.start)]
        return ends[-1] if ends else member.gap

    def indent_of_line(self, at: int) -> str:
        """The space at the beginning of the line of this place."""
        begin = max(self.text.rfind("\n", 0, at), self.text.rfind("\r", 0, at)) + 1
        found = _INDENT.match(self.text, begin, at)
        return "" if found is None else found[0]

    def begins_line(self, at: int) -> bool:
        """Whether only space stands before this place in its line."""
        begin = max(self.text.rfind("\n", 0, at), self.text.rfind("\r", 0, at)) + 1
        return begin > 0 and not self.text[begin:at].strip(" \t")

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._plain, at)
        return at if found is None else found.end()

    def _comma_between(self, begin: int, end: int) -> int | None:
        at = bisect_right(self._commas, begin - 1)
        return self._commas[at] if at < len(self._commas) and self._commas[at] < end else None


def _blanked(found: re.Match[str]) -> str:
    return _NOT_A_LINE_END.sub(" ", found[0]) if found[1] else found[0]


def _ends_a_value(text: str, comma: int) -> bool:
    """Whether a value stands before a comma: `[,]` has none, and is not accepted by any host."""
    before = comma - 1
    while before >= 0 and text[before] in " \t\r\n":
        before -= 1
    return before >= 0 and text[before] not in "[{,:"
