"""Formats text for people: durations and sizes as they write them (`1h`, `500ms`, `4 MiB`); a peer's text, harmless;
addresses of the documentation, which an installed package does not have.

What `format_…` writes, `parse_…` reads back to the same value.
"""

import difflib
import re
from collections.abc import Iterable
from decimal import Decimal

#: Largest first, so that a value is written in the largest unit that divides it.
_SECONDS = {"d": Decimal(86_400), "h": Decimal(3_600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_BYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}

# Lengths are bounded because turning digits into a number costs more than linear time.
_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?(ms|s|m|h|d)?")
_SIZE = re.compile(r"([0-9]{1,18}) ?(GiB|MiB|KiB|B)?")
_COUNT = re.compile(r"[0-9]{1,18}")

SITE = "https://perdure.example/docs"
"""Where the pages are that `make docs` builds. `.example` is a reserved name: a release sets it, here and in the
project's metadata, which a test compares."""

ALIKE = 0.7
"""How much two names must have in common: `loavse` is `loaves`, and not `oven`."""

_MARK = "\N{REPLACEMENT CHARACTER}"


def parse_duration(text: str) -> float:
    """Seconds; a number without a unit is seconds."""
    if not (found := _DURATION.fullmatch(text)):
        raise ValueError(f"{text!r} is not a duration such as 90, 500ms, 30s, 5m, 1h or 7d")
    return float(Decimal(found[1]) * _SECONDS[found[2] or "s"])


def parse_size(text: str) -> int:
    """Bytes; a number without a unit is bytes."""
    if not (found := _SIZE.fullmatch(text)):
        raise ValueError(f"{text!r} is not a size such as 65536, 64KiB or 4MiB")
    return int(found[1]) * _BYTES.get(found[2], 1)


def parse_count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def format_duration(seconds: float) -> str:
    value = Decimal(repr(seconds))
    for unit, worth in _SECONDS.items():
        if value >= worth and value % worth == 0:
            return f"{value // worth:f}{unit}"
    return f"{value.normalize():f}s"


def spoken_duration(seconds: float) -> str:
    """A duration in a sentence, which nothing reads back: `45 s`, `5 min`, `24 h`, `7 days`."""
    for unit, worth, least in (("days", 86_400, 2), ("h", 3_600, 1), ("min", 60, 1)):
        if seconds >= least * worth and seconds % worth == 0:
            return f"{seconds / worth:.0f} {unit}"
    return f"{seconds:g} s"


def format_size(size: int) -> str:
    for unit, worth in _BYTES.items():
        if size >= worth and size % worth == 0:
            return f"{size // worth} {unit}"
    return f"{size} B"


def printable(text: str, most: int | None = None) -> str:
    """A peer's text for logs and terminals: on one line, without what could move the cursor, change colours or turn the
    direction of writing; cut, with a mark, where it is longer than `most` characters."""
    if most is not None and len(text) > most:
        text = text[:most] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else _MARK for c in text)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint at names that look alike, each with the prefix; "" if there are none."""
    close = difflib.get_close_matches(name, list(known), cutoff=ALIKE)
    return f"; did you mean {' or '.join(repr(prefix + one) for one in close)}?" if close else ""


def see(page: str, section: str) -> str:
    """Point to a section, at the end of a message."""
    return f"see {address(page, section)}"


def address(page: str, section: str) -> str:
    return f"{SITE}/{page}.html#{section}"
