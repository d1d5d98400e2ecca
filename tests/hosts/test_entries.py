"""One server goes into any configuration text and out again: every other character stays, and the others' values too.

The texts are JSON as people keep it: comments, odd indentation, trailing commas, CRLF, a BOM, no line end at the end.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perdure.hosts.entries import BOM, BadDocument, add, find, names, remove
from perdure.hosts.jsonc import Document

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


def servers_of(text: str | None) -> tuple[Any, Any]:
    """What the text holds beside the servers, and the servers."""
    value = Document(("" if text is None else text).removeprefix(BOM)).value or {}
    return {name: held for name, held in value.items() if name != KEY}, value.get(KEY, {})


@settings(max_examples=150, deadline=None)
@given(text=configurations())
@example(text="")
@example(text="{}")
@example(text="{}\n")
@example(text="{}\n\n")
@example(text="{\n}")
@example(text='{"mcpServers": {}}')
@example(text='{\n  "mcpServers": {\n  }\n}\n')
@example(text='{"a":1}')
@example(text='{"a": 1 // why  \n}')
@example(text='{\r\n\t"a": 1, // why\r\n\t"mcpServers": {"b": {},},\r\n}')
def test_what_is_added_goes_without_a_trace(text: str) -> None:
    """Each change leaves the values of all others, and taking both out, in either order, gives the same text."""
    rest, servers = servers_of(text)
    first = add(text, KEY, "one", ENTRY)
    assert servers_of(first) == (rest, {**servers, "one": ENTRY})
    assert remove(first, KEY, "one") == text
    both = add(first, KEY, "two", OTHER)
    assert servers_of(both) == (rest, {**servers, "one": ENTRY, "two": OTHER})
    assert list(servers_of(both)[1]) == [*dict.fromkeys(servers), "one", "two"]
    assert remove(both, KEY, "two") == first
    only_second = remove(both, KEY, "one")
    assert servers_of(only_second) == (rest, {**servers, "two": OTHER})
    assert only_second is not None
    assert remove(only_second, KEY, "two") == text


@settings(max_examples=60, deadline=None)
@given(text=configurations())
def test_what_was_there_keeps_its_characters(text: str) -> None:
    """The old text is the new one with one piece taken out, or two where a comma was needed."""
    new = add(text, KEY, "one", ENTRY)
    at = 0
    for character in text:
        at = new.index(character, at) + 1
    replaced = add(new, KEY, "one", OTHER)
    assert find(replaced, KEY, "one") == OTHER
    assert remove(replaced, KEY, "one") == text


def test_a_file_that_was_not_there_is_not_there_afterwards() -> None:
    text = add(None, KEY, "one", ENTRY)
    assert text == json.dumps({KEY: {"one": ENTRY}}, indent=2) + "\n"
    both = add(text, KEY, "two", OTHER)
    assert remove(remove(both, KEY, "one") or "", KEY, "two") is None
    assert remove(text, KEY, "one") is None


def test_a_host_that_writes_its_file_anew_does_not_lose_it() -> None:
    """It has forgotten our space by then: the object stays, and so does everything else."""
    rewritten = json.dumps(json.loads(add("{}", KEY, "one", ENTRY)), indent=4)
    assert remove(rewritten, KEY, "one") == "{}"
    shared = json.dumps(json.loads(add('{"theme":"dark"}', KEY, "one", ENTRY)), indent=4)
    assert json.loads(remove(shared, KEY, "one") or "") == {"theme": "dark"}


LAID_OUT = {
    '{\n   "a": 1\n}\n': '{\n   "a": 1,\n   "mcpServers": {\n      "one": {\n         "x": []\n      }\n   }\n}\n',
    '{\r\n\t"a": 1\r\n}': '{\r\n\t"a": 1,\r\n\t"mcpServers": {\r\n\t\t"one": {\r\n\t\t\t"x": []\r\n\t\t}\r\n\t}\r\n}',
    '{"a":1}': '{"a":1,"mcpServers":{"one":{"x":[]}}}',
    '{"a": 1}': '{"a": 1, "mcpServers": {"one": {"x": []}}}',
    '{\n  "mcpServers": {\n    "b": {} // mine\n  }\n}': (
        '{\n  "mcpServers": {\n    "b": {}, // mine\n    "one": {\n      "x": []\n    }\n  }\n}'
    ),
    '{\n  "mcpServers": {\n    "b": {}, // mine\n  },\n}': (
        '{\n  "mcpServers": {\n    "b": {}, // mine\n    "one": {\n      "x": []\n    },\n  },\n}'
    ),
    '{\n  "mcpServers": {}\n}': '{\n  "mcpServers": {\n    "one": {\n      "x": []\n    }\n\n  }\n}',
    "{}": '{\n  "mcpServers": {\n    "one": {\n      "x": []\n    }\n  }\n\n}',
}


@pytest.mark.parametrize("text", LAID_OUT)
def test_the_entry_is_laid_out_as_its_neighbours_are(text: str) -> None:
    assert add(text, KEY, "one", {"x": []}) == LAID_OUT[text]


def test_of_members_given_twice_the_last_counts_and_none_is_left() -> None:
    text = '{"mcpServers": {"one": 1}, "mcpServers": {"one": 2, "b": 3, "one": 4}}'
    assert names(text, KEY) == ["one", "b", "one"]
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
