"""Adds one server to the text of a host's configuration, and takes it out so that the text is again what it was.

`add` leaves every character of the text where it is, and puts its own between them. `remove` must find out from the
text alone what `add` has put there, because hosts and users change the file in between. So each case leaves another
trace in the space that `add` writes:

| the text before | what stands behind the new member |
|---|---|
| an object with members | a comma, if one stood behind the last member; the comma before it is the object's otherwise |
| an empty object, in a file of lines | a line end, an empty line, and what stood in the braces |
| an empty object, in a file of one line | one space, and what stood in the braces |
| no such object | a line end (nothing in a file of one line), then the brace: the object is taken out as well |

A file that is not there, or has no value in it, gets an object from the first column on, and behind it one line end, or
two line ends and what stood in the file.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure.hosts.jsonc import LINE_END, Document, Member, Object

BOM = "\ufeff"
_INDENT = "  "
"""Of a text that shows no indentation of its own; the hosts write two spaces as well."""
_MADE = re.compile(r"(?:\r\n|\n|\r)[ \t]*|")
"""What stands behind the last member of an object that `add` has made."""

Entry = Mapping[str, Any]


class BadDocument(ValueError):
    """The text cannot be edited."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a text is laid out."""

    line_end: str
    indent: str
    is_spaced: bool = True
    """Whether a space stands behind colons and commas, where there are no lines."""


def find(text: str | None, key: str, name: str) -> Any:
    """The server of this name, decoded; None if there is none. Raises `BadDocument`."""
    document = _parsed(text or "")
    if (servers := _servers(document, key)) is None or (member := servers.member(name)) is None:
        return None
    return document.decoded(member.value)


def names(text: str | None, key: str) -> list[str]:
    """The names of the servers. Raises `BadDocument`."""
    servers = _servers(_parsed(text or ""), key)
    return [] if servers is None else [member.name for member in servers.members]


def add(text: str | None, key: str, name: str, entry: Entry) -> str:
    """The text with this server in the object `key`; None is a file that is not there. A server of this name is
    replaced. Raises `BadDocument`."""
    if text is None:
        return _new(key, name, entry, "\n") + "\n"
    if text.startswith(BOM):
        return BOM + add(text[1:], key, name, entry)
    document = _parsed(text)
    root = _root(document)
    style = _style(document, root)
    if root is None:
        return _new(key, name, entry, style.line_end) + 2 * style.line_end + text
    servers = _servers(document, key)
    if servers is None:
        return _with_member(document, root, key, {name: entry}, style, has_lines=_has_lines(document, root))
    if (member := servers.member(name)) is not None:
        value = _value(entry, style, document.indent_of_line(member.start) if _has_lines(document, servers) else None)
        return text[: member.value] + value + text[member.end :]
    has_lines = _has_lines(document, servers if servers.members else root)
    return _with_member(document, servers, name, entry, style, has_lines=has_lines)


def remove(text: str, key: str, name: str) -> str | None:
    """The text without the server of this name; None if `add` has made the file for it. Raises `BadDocument`."""
    if text.startswith(BOM):
        without = remove(text[1:], key, name)
        return None if without is None else BOM + without
    document = _parsed(text)
    root, servers = _root(document), _servers(document, key)
    if root is None or servers is None or (member := servers.member(name)) is None:
        return text
    if len(servers.members) > 1 or member.comma is not None:
        # Of members given twice, the earlier ones would count now.
        return remove(_without(document, servers, member), key, name)
    behind = text[member.end : servers.end - 1]
    if not _MADE.fullmatch(behind):
        return _emptied(document, servers, member)
    holder = root.member(key)
    assert holder is not None
    if len(root.members) > 1 or holder.comma is not None:
        return _without(document, root, holder)
    if _is_new(text, root, holder, servers, member):
        after = text[root.end :]
        if after in ("\n", "\r\n"):
            return None
        if two := re.match(r"(?:\r\n|\n){2}", after):
            return after[two.end() :]
    return _emptied(document, root, holder)


def _parsed(text: str) -> Document:
    try:
        return Document(text.removeprefix(BOM))
    except json.JSONDecodeError as error:
        raise BadDocument(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except ValueError as error:
        raise BadDocument(str(error)) from error


def _root(document: Document) -> Object | None:
    if document.root is None:
        return None
    root = document.object_at(document.root)
    if root is None:
        raise BadDocument("it holds something other than an object")
    return root


def _servers(document: Document, key: str) -> Object | None:
    root = _root(document)
    holder = None if root is None else root.member(key)
    if holder is None:
        return None
    servers = document.object_at(holder.value)
    if servers is None:
        raise BadDocument(f'its "{key}" is something other than an object')
    return servers


def _has_lines(document: Document, at: Object) -> bool:
    """Whether what is put into this object goes on lines of its own. `{}` as a whole file does not show it."""
    return not at.members or LINE_END.search(document.text, at.start, at.end) is not None


def _style(document: Document, root: Object | None) -> Style:
    found = LINE_END.search(document.text)
    # A lone CR is never written: with a line feed behind it, it would become another line end.
    line_end = "\r\n" if found is not None and found[0] == "\r\n" else "\n"
    first = root.members[0] if root is not None and root.members else None
    if first is None:
        return Style(line_end=line_end, indent=_INDENT)
    indent = document.indent_of_line(first.start) if document.begins_line(first.start) else ""
    is_spaced = " " in document.text[first.start + len(first.name) : first.value]
    return Style(line_end=line_end, indent=indent or _INDENT, is_spaced=is_spaced)


def _new(key: str, name: str, entry: Entry, line_end: str) -> str:
    return _value({key: {name: entry}}, Style(line_end=line_end, indent=_INDENT), "")


def _value(value: object, style: Style, indent: str | None) -> str:
    """The value as text; on lines, all but the first with this indent before them, unless it is None."""
    if indent is None:
        separators = (", ", ": ") if style.is_spaced else (",", ":")
        return json.dumps(value, ensure_ascii=False, separators=separators)
    lines = json.dumps(value, ensure_ascii=False, indent=style.indent).split("\n")
    return (style.line_end + indent).join(lines)


def _with_member(document: Document, holder: Object, name: str, value: object, style: Style, *, has_lines: bool) -> str:
    text, outer = document.text, document.indent_of_line(holder.start)
    last = holder.members[-1] if holder.members else None
    begins_line = last is not None and document.begins_line(last.start)
    indent = document.indent_of_line(last.start) if last is not None and begins_line else outer + style.indent
    colon = ": " if has_lines or style.is_spaced else ":"
    member = json.dumps(name, ensure_ascii=False) + colon + _value(value, style, indent if has_lines else None)
    before = style.line_end + indent if has_lines else " " if style.is_spaced and last is not None else ""
    if last is None:
        at = document.beside(holder.start + 1)
        left = text[at : holder.end - 1]
        mark = " "
        if has_lines:
            mark = 2 * style.line_end + ("" if LINE_END.search(left) else outer)
        return text[:at] + before + member + mark + text[at:]
    if last.comma is not None:
        at = document.beside(last.comma + 1)
        return text[:at] + before + member + "," + text[at:]
    at = document.beside(last.end)
    return text[: last.end] + "," + text[last.end : at] + before + member + text[at:]


def _without(document: Document, holder: Object, member: Member) -> str:
    """The text without one of several members, or without a member that has a comma behind it."""
    text, lead, comma = document.text, document.lead(member), member.comma
    if comma is not None:
        return text[:lead] + text[member.end : comma] + text[comma + 1 :]
    before = holder.members[holder.members.index(member) - 1]
    assert before.comma is not None
    return text[: before.comma] + text[before.comma + 1 : lead] + text[member.end :]


def _emptied(document: Document, holder: Object, member: Member) -> str:
    """The text without the only member of an object, and without the mark that `add` has put behind it."""
    text = document.text
    left = text[member.end : holder.end - 1]
    if two := re.match(r"(?:\r\n|\n){2}", left):
        left = left[two.end() :]
        if not LINE_END.search(left):
            left = left.removeprefix(document.indent_of_line(holder.start))
    elif _MADE.fullmatch(left):
        left = ""
    else:
        left = left.removeprefix(" ")
    return text[: document.lead(member)] + left + text[holder.end - 1 :]


def _is_new(text: str, root: Object, holder: Member, servers: Object, member: Member) -> bool:
    """Whether the whole object stands where `add` puts it into a file that has none."""
    places = ((0, root.start), (1, holder.start), (servers.start + 1, member.start), (servers.end, root.end - 1))
    between = [text[begin:end].replace("\r\n", "\n") for begin, end in places]
    inner = text[member.end : servers.end - 1].replace("\r\n", "\n")
    return [*between, inner] == ["", f"\n{_INDENT}", f"\n{2 * _INDENT}", "\n", f"\n{_INDENT}"]
