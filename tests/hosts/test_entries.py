"""One server goes into any configuration text and out again: comments and layout stay, and the others' values too.

The texts are JSON as people keep it: comments, odd indentation, trailing commas, CRLF, a BOM, no line end at the end.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure._core.jsonc import BOM, BadDocument
from perdure.hosts.entries import add, find, remove

KEY = "mcpServers"
ENTRY = {"command": "/opt/perdure", "args": ["stdio", "http://127.0.0.1:8000/mcp"]}
OTHER = {"command": "/opt/other", "args": ["stdio", "http://127.0.0.1:9000/mcp", "--name", "é"]}

_SPACES = st.text(" \t", max_size=3)
_LINE_ENDS = st.sampled_from(["\n", "\r\n", "\n\n", "\r"])
_COMMENT_TEXT = st.text('abc "{}[],:/\t\\', max_size=6)


@st.composite
def trivia(draw: st.DrawFn, *, in_one_line: bool = False) -> str:
    """Space and comments, as they may stand between any two marks of the text."""
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        kinds = ["space", "block"] if in_one_line else ["space", "line end", "line", "block"]
        match draw(st.sampled_from(kinds)):
            case "space":
                parts.append(draw(_SPACES))
            case "line end":
                parts.append(draw(_LINE_ENDS) + draw(_SPACES))
            case "line":
                parts.append("//" + draw(_COMMENT_TEXT) + draw(_LINE_ENDS))
            case "block":
                line = "" if in_one_line else draw(st.sampled_from(["", "\n", "\r\n  "]))
                parts.append("/*" + draw(_COMMENT_TEXT).replace("/", "") + line + "*/")
    return "".join(parts)


_SCALARS = st.sampled_from(
    ["1", "-0.5e9", "true", "null", '"x"', '"// no"', '"\\"}"', '"/* no */,]"', "1" * 5000, "1e999"]
)
_NAMES = st.sampled_from(["a", "b", "mcpServers ", "naïve", "with space", ""])


@st.composite
def composed(draw: st.DrawFn, depth: int = 2, *, in_one_line: bool = False, with_servers: bool = False) -> str:
    """An object or array of other values, with trivia everywhere and sometimes a trailing comma."""
    gap = trivia(in_one_line=in_one_line)
    inner = _SCALARS if depth == 0 else st.one_of(_SCALARS, composed(depth - 1, in_one_line=in_one_line))
    is_object: bool = with_servers or draw(st.booleans())
    items: list[str] = []
    for _ in range(draw(st.integers(0, 3))):
        name = json.dumps(draw(_NAMES)) + draw(gap) + ":" + draw(gap) if is_object else ""
        items.append(draw(gap) + name + draw(inner) + draw(gap))
    if with_servers and depth == 2 and draw(st.booleans()):
        servers = draw(composed(1, in_one_line=in_one_line, with_servers=True))
        items.insert(draw(st.integers(0, len(items))), f'{draw(gap)}"{KEY}"{draw(gap)}:{draw(gap)}{servers}{draw(gap)}')
    has_last_comma: bool = draw(st.booleans())
    body = ",".join(items) + "," * has_last_comma + draw(gap) if items else draw(gap)
    return ("{" + body + "}") if is_object else ("[" + body + "]")


@st.composite
def configurations(draw: st.DrawFn) -> str:
    """A whole file, sometimes without anything in it."""
    in_one_line = draw(st.booleans())
    root = draw(composed(in_one_line=in_one_line, with_servers=True)) if draw(st.integers(0, 9)) else ""
    before, after = draw(trivia()), draw(trivia())
    # A file may end in a line comment without a line end.
    return draw(st.sampled_from(["", BOM])) + before + root + after.rstrip("\r\n" if draw(st.booleans()) else "")


_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|(//[^\r\n]*|/\*.*?\*/)', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=[ \t\r\n]*[\]}])', re.DOTALL)


def comments_of(text: str) -> list[str]:
    return [found[1] for found in _STRING_OR_COMMENT.finditer(text) if found[1]]


def servers_of(text: str) -> tuple[Any, Any]:
    """What the text holds beside the servers, and the servers."""
    plain = _STRING_OR_COMMENT.sub(lambda found: " " if found[1] else found[0], text.removeprefix(BOM))
    plain = _TRAILING_COMMA.sub(lambda found: found[1] or " ", plain)
    value = json.loads(plain, parse_int=str, parse_float=str) if plain.strip() else {}
    return {name: held for name, held in value.items() if name != KEY}, value.get(KEY, {})


@given(text=configurations())
@example(text="")
@example(text="\ufeff")
@example(text="{}")
@example(text="{}\n")
@example(text="{}\n\n")
@example(text="{\n}")
@example(text='{"mcpServers": {}}')
@example(text='{\n  "mcpServers": {\n  }\n}\n')
@example(text='{"a":1}')
@example(text='{"a": 1 // why  \n}')
@example(text='{\r\n\t"a": 1, // why\r\n\t"mcpServers": {"b": {},},\r\n}')
def test_only_the_entry_goes_in_and_out(text: str) -> None:
    """The text before is the new one with pieces taken out. Removing leaves every other value and every comment."""
    rest, servers = servers_of(text)
    first = add(text, KEY, "one", ENTRY)
    assert servers_of(first) == (rest, {**servers, "one": ENTRY})
    at = 0
    for character in text:
        at = first.index(character, at) + 1
    both = add(add(first, KEY, "two", ENTRY), KEY, "two", OTHER)
    assert servers_of(both) == (rest, {**servers, "one": ENTRY, "two": OTHER})
    assert find(both, KEY, "two") == OTHER
    for name, other in (("one", "two"), ("two", "one")):
        left = remove(both, KEY, name)
        assert servers_of(left) == (rest, {**servers, other: servers_of(both)[1][other]})
        left = remove(left, KEY, other)
        assert servers_of(left) == (rest, servers)
        assert comments_of(left) == comments_of(text)


def test_a_file_that_does_not_exist_is_laid_out_as_the_hosts_do() -> None:
    text = add(None, KEY, "one", ENTRY)
    assert text == json.dumps({KEY: {"one": ENTRY}}, indent=2) + "\n"
    assert remove(text, KEY, "one") == '{\n  "mcpServers": {}\n}\n'


REMOVED = {
    '{"mcpServers": {\n  // mine\n  "one": 1, "b": 2\n}}': '{"mcpServers": {\n  // mine\n   "b": 2\n}}',
    '{"mcpServers": {"b": 2, // mine\n  "one": 1 /* ours */\n}}': '{"mcpServers": {"b": 2 // mine\n   /* ours */\n}}',
    '{"mcpServers": {"b": 2, "one": 1,}}': '{"mcpServers": {"b": 2,}}',
    '{"mcpServers": {"one": 1 , }}': '{"mcpServers": {}}',
    '{"mcpServers": {"two": 1}}': '{"mcpServers": {"two": 1}}',
    "{}": "{}",
}


@pytest.mark.parametrize("text", REMOVED)
def test_an_entry_that_others_have_moved_is_taken_out(text: str) -> None:
    assert remove(text, KEY, "one") == REMOVED[text]


LAID_OUT = {
    '{\n   "a": 1\n}\n': '{\n   "mcpServers": {\n      "one": {\n         "x": []\n      }\n   },\n   "a": 1\n}\n',
    '{\r\n\t"a": 1\r\n}': '{\r\n\t"mcpServers": {\r\n\t\t"one": {\r\n\t\t\t"x": []\r\n\t\t}\r\n\t},\r\n\t"a": 1\r\n}',
    '{"a": 1}': '{"mcpServers": {"one": {"x": []}}, "a": 1}',
    '{\n  "mcpServers": { // mine\n    "b": {}\n  }\n}': (
        '{\n  "mcpServers": { // mine\n    "one": {\n      "x": []\n    },\n    "b": {}\n  }\n}'
    ),
    '{\n  "mcpServers": {}\n}': '{\n  "mcpServers": {\n    "one": {\n      "x": []\n    }\n  }\n}',
    "{}": '{\n  "mcpServers": {\n    "one": {\n      "x": []\n    }\n  }\n}',
    "// mine": '// mine\n{\n  "mcpServers": {\n    "one": {\n      "x": []\n    }\n  }\n}\n',
}


@pytest.mark.parametrize("text", LAID_OUT)
def test_the_entry_is_laid_out_as_its_neighbours_are(text: str) -> None:
    assert add(text, KEY, "one", {"x": []}) == LAID_OUT[text]


def test_of_members_given_twice_the_last_counts_and_none_is_left() -> None:
    text = '{"mcpServers": {"one": 1}, "mcpServers": {"one": 2, "b": 3, "one": 4}}'
    assert find(text, KEY, "one") == "4"
    assert remove(text, KEY, "one") == '{"mcpServers": {"one": 1}, "mcpServers": { "b": 3}}'


BROKEN = {
    "{": "line 1, column 2: Expecting property name enclosed in double quotes",
    '{\n  "a": 1\n  "b": 2\n}': "line 3, column 3: Expecting ',' delimiter",
    '{"a": 1,, }': "line 1, column 9: Expecting property name enclosed in double quotes",
    "{,}": "line 1, column 2: Expecting property name enclosed in double quotes",
    '{"a": [,]}': "line 1, column 8: Expecting value",
    "{} /* open": "line 1, column 4: Extra data",
    '{"a": NaN}': "NaN is not a JSON number",
    "[]": "it holds something other than an object",
    '"text"': "it holds something other than an object",
    '{"mcpServers": []}': 'its "mcpServers" is something other than an object',
    '{"mcpServers": null}': 'its "mcpServers" is something other than an object',
    "[" * 100_000: "it nests too deep",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_text_that_is_broken_is_not_touched(text: str) -> None:
    for edit in (
        lambda: add(text, KEY, "one", ENTRY),
        lambda: remove(text, KEY, "one"),
        lambda: find(text, KEY, "one"),
    ):
        with pytest.raises(BadDocument) as refused:
            edit()
        assert str(refused.value) == BROKEN[text]
