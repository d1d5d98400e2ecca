"""Principals: equal texts for equal owners, and the names by which people ask for them."""

from __future__ import annotations

import pytest

from perdure._core.principals import ANONYMOUS, is_called, readable, token_principal, unnamed_principal, user_principal

ALICE = token_principal("alice", None, "alice")
"""As `--tokens` gives it."""

AT_WEB = token_principal("web", "https://issuer.example", "alice")
OF_ISSUER = token_principal(None, "https://issuer.example", "alice")
"""As `--issuer` gives it."""
MACHINE = token_principal("batch", None, None)
USER = user_principal("1001")
UNNAMED = unnamed_principal("web", None, "secret-1")


def test_each_principal_has_a_text_of_its_own() -> None:
    others = user_principal("alice"), token_principal("user", None, "1001")
    assert len({ALICE, AT_WEB, OF_ISSUER, MACHINE, USER, UNNAMED, ANONYMOUS, *others}) == 9
    assert UNNAMED == unnamed_principal("web", None, "secret-1") != unnamed_principal("web", None, "secret-2")
    assert "secret-1" not in UNNAMED


@pytest.mark.parametrize(
    ("principal", "shown"),
    [
        (ALICE, "alice"),
        (AT_WEB, "alice (web)"),
        (OF_ISSUER, "alice"),
        (MACHINE, "batch"),
        (USER, "1001"),
        (UNNAMED, "web (token 136813af)"),
        (ANONYMOUS, ""),
        ("alice", "alice"),
        ("[1, 2, 3]", "[1, 2, 3]"),
    ],
)
def test_a_person_reads_a_name(principal: str, shown: str) -> None:
    assert readable(principal) == shown


@pytest.mark.parametrize(
    ("principal", "names", "not_names"),
    [
        (ALICE, ["alice", ALICE], ["bob", "", "null"]),
        (AT_WEB, ["alice", "web", AT_WEB], ["https://issuer.example"]),
        (OF_ISSUER, ["alice", OF_ISSUER], ["None", ""]),
        (MACHINE, ["batch"], ["None", ""]),
        (USER, ["1001"], ["user"]),
        (ANONYMOUS, [""], ["alice"]),
        ("alice", ["alice"], ["bob"]),
    ],
)
def test_a_principal_is_found_by_its_names(principal: str, names: list[str], not_names: list[str]) -> None:
    assert [name for name in (*names, *not_names) if is_called(principal, name)] == names
