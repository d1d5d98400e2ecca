"""Adds one server to the text of a host's configuration, and takes it out again. Everything else in the text stays.

The text is JSON with comments and trailing commas. `_core.jsonc` replaces both by spaces, so every value has its old
place in what Python's own decoder checks and reads.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from perdure._core.jsonc import (
    BOM,
    SPACE,
    BadDocument,
    decode,
    refuse_constant,
    without_comments,
    without_last_commas,
)
from perdure.hosts.known import Entry

_COMMENTS_IN_LINE = re.compile(r"(?:[ \t]*/\*.*?\*/)*(?:[ \t]*//[^\r\n]*)?", re.DOTALL)

_LINE_END = re.compile(r"[\r\n]")


# Numbers stay text: nothing here needs their value, and a text may have more digits than Python reads.
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=refuse_constant)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member of an object, by its places in the text."""

    name: str
    gap: int
    """After the brace or the comma before the name."""
    start: int
    value: int
    end: int
    comma: int | None
    """The comma after the value."""


@dataclass(frozen=True, kw_only=True)
class Object:
    """An object, by the places of its braces."""

    start: int
    end: int
    members: list[Member]

    def member(self, name: str) -> Member | None:
        """Return the member of this name. Of members given twice the last counts, as it does for the hosts."""
        return next((member for member in reversed(self.members) if member.name == name), None)


class Document:
    """A configuration, in which `key` names the object that holds the servers. Raises `BadDocument`."""

    def __init__(self, text: str, key: str) -> None:
        self.text = text
        self.line_end = "\r\n" if "\r\n" in text else "\n"
        self.indent = "  "
        """Of one level; two spaces, as hosts write them, where the text does not show its own."""
        self._commas = without_comments(text)
        self._plain = without_last_commas(self._commas)
        self.root: Object | None = None
        """None for a text of comments and space only."""
        self.servers: Object | None = None
        if not self._plain.strip(BOM + " \t\r\n"):
            return
        decode(text, _DECODER)
        self.root = self._object(self._skip(0), "it holds")
        if self.root.members:
            self.indent = _indent(text, self.root.members[0].start) or self.indent
        if (holder := self.root.member(key)) is not None:
            self.servers = self._object(holder.value, f'its "{key}" is')

    def read(self, member: Member) -> Any:
        return _DECODER.raw_decode(self._plain, member.value)[0]

    def _object(self, at: int, subject: str) -> Object:
        if self._plain[at] != "{":
            raise BadDocument(f"{subject} something other than an object")
        gap, members = at + 1, []
        while self._plain[start := self._skip(gap)] == '"':
            name, end = _DECODER.raw_decode(self._plain, start)
            value = self._skip(self._skip(end) + 1)
            end = _DECODER.raw_decode(self._plain, value)[1]
            after = self._skip(end, self._commas)
            comma = after if self._commas[after] == "," else None
            members.append(Member(name=name, gap=gap, start=start, value=value, end=end, comma=comma))
            gap = after if comma is None else comma + 1
        return Object(start=at, end=start, members=members)

    def _skip(self, at: int, text: str | None = None) -> int:
        found = re.compile(SPACE).match(self._plain if text is None else text, at)
        return at if found is None else found.end()


def find(text: str | None, key: str, name: str) -> Any:
    """Return the server of this name, decoded; None if there is none. Raises `BadDocument`."""
    document = Document(text or "", key)
    if document.servers is None or (member := document.servers.member(name)) is None:
        return None
    return document.read(member)


def add(text: str | None, key: str, name: str, entry: Entry) -> str:
    """Return the text with this server in the object `key`, in place of a server of this name. The text of a file that
    does not exist is None. Raises `BadDocument`."""
    text = text or ""
    document = Document(text, key)
    if document.root is None:
        before = f"{text}\n" if text.strip(BOM) else text
        return before + _value({key: {name: entry}}, "  ", "\n") + "\n"
    if document.servers is None:
        return _with_member(document, document.root, key, {name: entry})
    if (member := document.servers.member(name)) is None:
        return _with_member(document, document.servers, name, entry)
    is_on_lines = _LINE_END.search(text, document.servers.start, member.start) is not None
    line_start = document.line_end + _indent(text, member.start) if is_on_lines else None
    return text[: member.value] + _value(entry, document.indent, line_start) + text[member.end :]


def remove(text: str, key: str, name: str) -> str:
    """Return the text without the server of this name. Raises `BadDocument`."""
    servers = Document(text, key).servers
    if servers is None or (member := servers.member(name)) is None:
        return text
    # A comment before the name stays, and so does the line end after the comment.
    start = member.start if text[member.gap : member.start].strip() else member.gap
    if member.comma is not None:
        left = text[:start] + text[member.end : member.comma] + text[member.comma + 1 :]
    elif len(servers.members) > 1:
        comma = servers.members[-2].comma or 0
        left = text[:comma] + text[comma + 1 : start] + text[member.end :]
    else:
        left = text[:start] + text[member.end :]
    end = servers.end - (len(text) - len(left))
    if not left[servers.start + 1 : end].strip():
        left = left[: servers.start + 1] + left[end:]
    return remove(left, key, name)  # of members given twice, the earlier ones would count now


def _with_member(document: Document, holder: Object, name: str, value: object) -> str:
    """Put a member first into an object: on lines of its own, unless the first member stands beside the brace."""
    text, first = document.text, holder.members[0] if holder.members else None
    beside = _COMMENTS_IN_LINE.match(text, holder.start + 1)
    at = holder.start + 1 if beside is None else beside.end()
    if first is not None and not _LINE_END.search(text, holder.start, first.start):
        return text[:at] + f"{_value(name)}: {_value(value)}, " + text[at:]
    outer = _indent(text, holder.start)
    line_start = document.line_end + (outer + document.indent if first is None else _indent(text, first.start))
    end = document.line_end + outer if first is None else ","
    return text[:at] + f"{line_start}{_value(name)}: {_value(value, document.indent, line_start)}{end}" + text[at:]


def _value(value: object, indent: str | None = None, line_start: str | None = None) -> str:
    """Write a value as JSON: in one line, or on lines that begin with `line_start`."""
    if line_start is None:
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False, indent=indent).replace("\n", line_start)


def _indent(text: str, at: int) -> str:
    """Return the space at the beginning of the line of this place."""
    line = text[max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]
