"""Adds one server to the text of a TOML configuration, and takes it out again. Everything else in the text stays.

A server is a table of its own, `[key.name]`, with the tables below it. Each change is checked with Python's own parser:
the new text must hold what the old one held and the change, and nothing else. A server in another form, such as an
inline table, is refused.
"""

import json
import re
import tomllib
from typing import Any

from perdure._core.jsonc import BOM, BadDocument
from perdure.hosts.known import Entry

_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\r\n]*"|'[^'\r\n]*')"""
_HEADER = re.compile(rf"[ \t]*\[\[?[ \t]*({_KEY}(?:[ \t]*\.[ \t]*{_KEY})*)[ \t]*\]\]?[ \t]*(?:#.*)?\s*")


def find(text: str | None, key: str, name: str) -> Any:
    """Return the server of this name, decoded; None if there is none. Raises `BadDocument`."""
    return _servers(_decode(text or ""), key).get(name)


def add(text: str | None, key: str, name: str, entry: Entry) -> str:
    """Return the text with this server as its last table, in place of a server of this name. The text of a file that
    does not exist is None. Raises `BadDocument`."""
    held = _decode(text or "")
    wanted = {**held, key: {**_servers(held, key), name: dict(entry)}}
    before = remove(text or "", key, name)
    line_end = "\r\n" if "\r\n" in before else "\n"
    gap = "" if not before.strip(BOM) else line_end if before.endswith("\n") else line_end * 2
    # A JSON text or list of texts is TOML, too.
    lines = [f"[{key}.{name}]", *(f"{member} = {json.dumps(value)}" for member, value in entry.items())]
    return _checked(before + gap + "".join(line + line_end for line in lines), wanted)


def remove(text: str, key: str, name: str) -> str:
    """Return the text without the server of this name. Raises `BadDocument`."""
    held = _decode(text)
    servers = dict(_servers(held, key))
    if servers.pop(name, None) is None:
        return text
    kept: list[str] = []
    between: list[str] = []
    is_cut = False
    for line in text.splitlines(keepends=True):
        if (header := _HEADER.fullmatch(line)) is not None:
            names = [word.strip("\"'") for word in re.findall(_KEY, header[1])]
            was_cut, is_cut = is_cut, names[:2] == [key, name]
            if was_cut and not is_cut:
                kept += between
            elif is_cut and not was_cut:
                while kept and not kept[-1].strip():
                    kept.pop()
            between = []
        # Empty lines and comments before the next table belong to that table.
        if is_cut and (not line.strip() or line.lstrip().startswith("#")):
            between.append(line)
        elif is_cut:
            between = []
        else:
            kept.append(line)
    left = "".join(kept + between) if is_cut and any(line.strip() for line in between) else "".join(kept)
    wanted = {**held, key: servers}
    if not servers and key not in _decode(left):
        del wanted[key]
    return _checked(left, wanted)


def _decode(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.removeprefix(BOM))
    except tomllib.TOMLDecodeError as error:
        raise BadDocument(str(error)) from error


def _servers(held: dict[str, Any], key: str) -> dict[str, Any]:
    servers = held.get(key, {})
    if not isinstance(servers, dict):
        raise BadDocument(f'its "{key}" is something other than a table')
    return servers


def _checked(text: str, wanted: dict[str, Any]) -> str:
    try:
        if _decode(text) == wanted:
            return text
    except BadDocument:
        pass
    raise BadDocument("its servers are not tables of their own, as in [mcp_servers.name]")
