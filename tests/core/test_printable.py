"""Text of peers, made harmless."""

from __future__ import annotations

import pytest

from perdure._core.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tools/call", "tools/call"),
        ("Brötchen, 面包, 🥐", "Brötchen, 面包, 🥐"),
        ("two\nlines\r\n", "two�lines��"),
        ("\x1b[2J\x07", "�[2J�"),
        ("\u202eevil\u2066", "�evil�"),
        ("\x85\u2028\u2029\x00", "����"),
        ("\ud800", "�"),
    ],
)
def test_what_acts_on_a_terminal_or_begins_a_line_is_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(("length", "shown"), [(5, "x" * 5), (6, "x" * 5 + "…")])
def test_a_text_is_cut_behind_its_limit(length: int, shown: str) -> None:
    assert printable("x" * length, 5) == shown
