"""Decides how far a list of a server is read, page by page."""

from collections.abc import Mapping
from typing import Any

MAX_PAGES = 100
"""Pages of one list that are read: a server may have no last page."""


class Cursors:
    """The cursors of one list, each of which is followed once."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def after(self, page: Mapping[str, Any]) -> str | None:
        """Return the cursor of the page after this one; `None` if there is none, or none that is new."""
        cursor = page.get("nextCursor")
        if not isinstance(cursor, str) or not cursor or cursor in self._seen or len(self._seen) >= MAX_PAGES - 1:
            return None
        self._seen.add(cursor)
        return cursor
