"""Makes text that a peer wrote harmless for logs and terminals."""

from __future__ import annotations

_MARK = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, most: int | None = None) -> str:
    """The text on one line, without what could move the cursor, change colours or turn the direction of writing; cut,
    with a mark, where it is longer than `most` characters."""
    if most is not None and len(text) > most:
        text = text[:most] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else _MARK for c in text)
