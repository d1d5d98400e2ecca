"""The words of `perdure call` become a tool's arguments by its schema, or are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.cli.tool_calls import MAX_INPUT, MAX_NAMES, describe, parse_words, read_input, tool_arguments, types_of
from perdure.errors import Misuse

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer", "minimum": 1},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "numbers": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        "shape": {"$ref": "#/$defs/Shape"},
        "either": {"type": ["string", "integer"]},
        "oven": {"enum": ["wood", "gas"]},
        "any": {},
    },
    "$defs": {"Shape": {"type": "object", "properties": {"side": {"type": "integer"}}, "required": ["side"]}},
}


def arguments(*words: str, schema: dict[str, Any] = SCHEMA, given: dict[str, Any] | None = None) -> dict[str, Any]:
    return tool_arguments("tool", schema, parse_words(words), given or {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {}),
        (("text=3",), {"text": "3"}),
        (("text=a=b",), {"text": "a=b"}),
        (("text=",), {"text": ""}),
        (("count=3",), {"count": 3}),
        (("share=0.5",), {"share": 0.5}),
        (("share=2",), {"share": 2}),
        (("flag=True",), {"flag": True}),
        (("maybe=null",), {"maybe": None}),
        (("tags=a", "tags=b,c"), {"tags": ["a", "b,c"]}),
        (('tags=["a"]',), {"tags": ["a"]}),
        (("numbers=1", "numbers=2"), {"numbers": [1, 2]}),
        (("numbers=null",), {"numbers": None}),
        (('shape={"side": 2}',), {"shape": {"side": 2}}),
        (("either=5",), {"either": "5"}),
        (("either:=5",), {"either": 5}),
        (("oven=gas",), {"oven": "gas"}),
        (("any=[1]",), {"any": [1]}),
        (("any=one",), {"any": "one"}),
    ],
)
def test_a_value_is_text_where_the_schema_allows_text_and_json_otherwise(
    words: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert arguments(*words) == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("count",), "'count' is not an argument; write key=value, or key:=JSON"),
        (("=1",), "'=1' is not an argument; write key=value, or key:=JSON"),
        (("count=three",), "tool: count: 'three' is not of the type integer"),
        (("flag=maybe",), "tool: flag: 'maybe' is not of the type boolean"),
        (("maybe=x",), "tool: maybe: 'x' is not of the type integer or null"),
        (("numbers=1", "numbers=x"), "tool: numbers: 'x' is not of the type integer"),
        (("either:=x",), "tool: either: Expecting value: line 1 column 1 (char 0)"),
        (("text=a", "text=b"), "tool: text: it is given twice"),
        (("txet=a",), "tool has no argument 'txet'; did you mean 'text'?"),
        (("zzz=a",), f"tool has no argument 'zzz'; it has {', '.join(SCHEMA['properties'])}"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(Misuse) as refused:
        arguments(*words)
    assert str(refused.value) == line


def test_words_override_what_is_given_as_json_and_what_is_missing_is_named() -> None:
    schema = {**SCHEMA, "required": ["text", "count"]}
    assert arguments("text=b", schema=schema, given={"text": "a", "count": 1}) == {"text": "b", "count": 1}
    with pytest.raises(Misuse, match=r"^tool needs text=… and count=…; perdure list shows its arguments$"):
        arguments(schema=schema)
    with pytest.raises(Misuse, match=r"^tool has no argument 'a'; it takes none$"):
        arguments("a=1", schema={"type": "object", "properties": {}})


def test_input_is_read_from_a_file_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"a": 1}')
    assert read_input(f"@{file}") == read_input('{"a": 1}') == {"a": 1}
    file.write_bytes(b'{"a": 1}'.ljust(MAX_INPUT))
    assert read_input(f"@{file}") == {"a": 1}
    file.write_bytes(b'{"a": 1}'.ljust(MAX_INPUT + 1))
    with pytest.raises(Misuse, match="is larger than 16 MiB"):
        read_input(f"@{file}")


def test_a_schema_that_cannot_be_understood_allows_everything() -> None:
    loop: dict[str, Any] = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    nested = {"anyOf": [{"anyOf": [{"type": "integer"}]}]}
    for schema in (loop, nested, {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "#"}, {"anyOf": "x"}, {"properties": 3}):
        assert types_of(schema, schema) == []
        assert describe(schema, schema) == "any"
        assert arguments("one=1", schema={"properties": {"one": schema}}) == {"one": 1}


def test_of_a_thousand_names_only_the_first_are_said() -> None:
    many = {"properties": {f"name-{n}": {} for n in range(1_000)}, "required": [f"name-{n}" for n in range(1_000)]}
    for words in ((), ("other=1",)):
        with pytest.raises(Misuse) as refused:
            arguments(*words, schema=many)
        assert MAX_NAMES < len(str(refused.value)) < MAX_NAMES + 100
