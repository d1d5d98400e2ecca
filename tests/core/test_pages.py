"""How far a list of a server is read."""

from __future__ import annotations

from typing import Any

import pytest

from perdure._core.pages import MAX_PAGES, Cursors


def page(cursor: object) -> dict[str, Any]:
    return {"tools": [], "nextCursor": cursor}


def test_each_cursor_is_followed_once() -> None:
    cursors = Cursors()
    assert [cursors.after(page(cursor)) for cursor in ("a", "b", "a")] == ["a", "b", None]


@pytest.mark.parametrize("last", [{}, page(None), page(""), page(3)])
def test_a_page_without_a_cursor_is_the_last(last: dict[str, Any]) -> None:
    assert Cursors().after(last) is None


def test_so_many_pages_are_read() -> None:
    cursors, read = Cursors(), 1
    while cursors.after(page(str(read))) is not None:
        read += 1
    assert read == MAX_PAGES
