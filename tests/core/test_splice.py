"""Values in JSON text are found and replaced; the rest stays as it came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core import splice

ODD = (
    '{ "id" :\t1e400 ,"params":{"_meta":{"progressToken":[1,{"}":"\\"]"}]},"x":12345678901234567890123},"id":"\\ud800"}'
)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("id",), '"\\ud800"'),  # of two the last
        (("params", "_meta", "progressToken"), '[1,{"}":"\\"]"}]'),
        (("params", "x"), "12345678901234567890123"),
        (("params", "x", "y"), None),
        (("nothing",), None),
        ((), ODD),
    ],
)
def test_a_value_is_found_as_it_was_written(path: tuple[str, ...], found: str | None) -> None:
    assert splice.cut(ODD, *path) == found


def test_only_the_value_changes() -> None:
    assert splice.replaced(ODD, "7", "params", "x") == ODD.replace("12345678901234567890123", "7")
    assert splice.replaced(ODD, "7", "params", "nothing") == ODD


def test_line_ends_become_space_and_nothing_else_changes() -> None:
    assert splice.one_line('{\r\n "a": "b\\nc"\n}') == '{   "a": "b\\nc" }'


@pytest.mark.parametrize("text", ["", "{", '{"a":NaN}', "[1,]", '{"a" 1}', "[" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - what the parser says is its own matter
        splice.decode(text)


def test_the_items_of_an_array_are_texts() -> None:
    assert splice.items(' [ {"a":1e400} , 2,[ ] ] ') == ['{"a":1e400}', "2", "[ ]"]
    assert splice.items("[]") == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("abc"), _JSON)), _JSON, st.data())
def test_replacing_is_what_decoding_and_encoding_would_do(found: Any, value: Any, data: st.DataObject) -> None:
    indent = data.draw(st.sampled_from([None, 0, 3]))
    text = json.dumps(found, indent=indent, ensure_ascii=data.draw(st.booleans()))
    path = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=2))
    assert json.loads(splice.cut(text, *path) or "null") == _at(found, path)
    if splice.find(text, *path) is not None:
        _at(found, path[:-1])[path[-1]] = value
    assert json.loads(splice.replaced(text, json.dumps(value), *path)) == found


def _at(found: Any, path: list[str]) -> Any:
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found
