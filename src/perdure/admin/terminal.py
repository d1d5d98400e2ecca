"""Text for a terminal: what a peer wrote does no harm there, lines end at its edge, columns stand in line."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from perdure._core.printable import printable as clean

__all__ = ["clean", "clock", "cut", "moment", "span", "table", "width"]

_GAP = "  "
_DAY = 86_400
#: The smallest is said in its own unit; a larger one as soon as there are two of it.
_UNITS = ((_DAY, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def width(text: str) -> int:
    """The columns that a text takes: two for wide characters, none for those that join the one before."""
    return len(text) if text.isascii() else sum(map(_columns, text))


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
    """Lines with columns as wide as what stands in them."""
    lines = [head, *rows]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    return [indent + _GAP.join(map(_filled, line, widths)).rstrip() for line in lines]


def span(seconds: float) -> str:
    """A span of time in one unit, for people: 90s, 5m, 3h, 2d."""
    for worth, unit in _UNITS:
        if seconds >= 2 * worth or worth == 1:
            return f"{max(int(seconds // worth), 0)}{unit}"
    raise AssertionError("the last unit takes everything")


def moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}Z"


def clock(time: float) -> str:
    """The time of day in milliseconds."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")[11:23]


def _filled(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
