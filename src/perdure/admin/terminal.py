"""Formats text for a terminal: lines end at its edge, and columns stand in line."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from perdure._core.text import printable

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))


def width(text: str) -> int:
    """The columns that a text takes: two for wide characters, none for those that join the one before."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int | None) -> str:
    """The text, or as much of it as fits with a mark that there is more."""
    if columns is None or width(text) <= columns:
        return text
    kept, room = "", columns - 1
    for character in text[: max(columns, 0)]:
        room -= _columns(character)
        if room < 0:
            break
        kept += character
    return f"{kept}…" if columns > 0 else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, indent: str = "") -> list[str]:
    """Lines with columns as wide as their widest cell. Cells may hold what a peer wrote."""
    lines = [head, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    return [
        indent + "  ".join(cell + " " * (wide - width(cell)) for cell, wide in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def span(seconds: float) -> str:
    """A span of time in one unit: 90s, 5m, 3h, 2d. A larger unit is used from two of it on."""
    for worth, unit in _UNITS:
        if seconds >= 2 * worth:
            return f"{int(seconds // worth)}{unit}"
    return f"{max(int(seconds), 0)}s"


def moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}Z"


def clock(time: float) -> str:
    """The time of day in milliseconds."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")[11:23]
