"""One server goes into a TOML configuration and out again, and everything else in the text stays."""

from __future__ import annotations

import tomllib

import pytest

from perdure._core.jsonc import BadDocument
from perdure.hosts.toml_entries import add, find, remove

KEY = "mcp_servers"
ENTRY = {"command": "/opt/perdure", "args": ["stdio", "http://127.0.0.1:8000/mcp", "é \"'\\"]}
WRITTEN = add(None, KEY, "bakery", ENTRY)
TEXTS = [
    "",
    "# mine",
    'model = "x" # the best\n\n[mcp_servers.other]\ncommand = "y"\n\n# colours\n[profiles.a]\nb = [\n  ["c"],\n]\n',
    '\ufeffa = 1\r\n[mcp_servers]\r\n[mcp_servers.other] # his\r\nargs = ["z"]\r\n',
]


@pytest.mark.parametrize("text", TEXTS)
def test_only_the_entry_goes_in_and_out(text: str) -> None:
    once = add(text, KEY, "bakery", ENTRY)
    assert once.startswith(text)
    assert find(once, KEY, "bakery") == ENTRY
    assert add(once, KEY, "bakery", ENTRY) == once
    assert remove(once + "# the end\n", KEY, "bakery").endswith("# the end\n")
    left = remove(once, KEY, "bakery")
    assert tomllib.loads(left.removeprefix("\ufeff")) == tomllib.loads(text.removeprefix("\ufeff"))
    assert left.rstrip() == text.rstrip()
    assert remove(left, KEY, "bakery") == left


def test_a_server_in_the_middle_goes_with_the_tables_below_it_and_comments_of_others_stay() -> None:
    before = 'a = 1\n\n[mcp_servers.bakery]\ncommand = "old"\n\n[mcp_servers."bakery".env]\nTOKEN = "secret"\n\n'
    after = "# the colours\n[tui]\ntheme = 2\n"
    assert remove(before + after, KEY, "bakery") == "a = 1\n\n" + after
    assert add(before + after, KEY, "bakery", ENTRY) == "a = 1\n\n" + after + "\n" + WRITTEN


def test_a_text_that_would_lose_something_else_is_refused() -> None:
    text = '[mcp_servers.other]\ncommand = """\n[mcp_servers.bakery]\n"""\n'
    with pytest.raises(BadDocument, match="not tables of their own"):
        remove(add(text, KEY, "bakery", ENTRY), KEY, "bakery")
