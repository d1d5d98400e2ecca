"""Values in JSON text are found and replaced; the rest stays as it came."""

from __future__ import annotations

import json
import time
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


def test_an_object_is_taken_apart_and_put_together() -> None:
    """Of members given twice the last counts; each value keeps its text."""
    members = splice.members(ODD)
    assert members["id"] == '"\\ud800"'
    assert json.loads(splice.object_of(members)) == json.loads(ODD)
    assert "12345678901234567890123" in splice.object_of(members)
    assert (splice.members(" {}"), splice.members("[1]"), splice.object_of({})) == ({}, {}, "{}")


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


# The anchored way and the walk

TOKEN = ("params", "progressToken")


@pytest.mark.parametrize(
    "text",
    [
        '{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":5,"progress":1}}',
        '{"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1e3, "progressToken": "a"}}',
        '{"params":1,"params":{"progressToken":2}}',
        '{"progressToken":1,"params":{"x":null,"progressToken":2}}',
    ],
)
def test_a_token_at_its_usual_place_is_found_without_a_walk(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = splice.walk(text, *TOKEN)
    monkeypatch.setattr(splice, "walk", lambda *_: pytest.fail("it walked"))
    assert expected is not None
    assert splice.find(text, *TOKEN) == expected
    assert splice.find(text, "nothing") is None


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ('{"params":{"progressToken":5,"progressToken":6}}', "6"),
        ('{"params":{"progressToken":5},"params":{"progressToken":6}}', "6"),
        ('{"params":{"progressToken":5},"params":7}', None),
        ('{"params":{"progressToken":5,"\\u0070rogressToken":6}}', "6"),
        ('{"params":{"progressToken":5},"\\u0070arams":{}}', None),
        ('{"\\u0070arams":{"progressToken":5}}', "5"),
        ('{"result":{"params":{"progressToken":5}}}', None),
        ('{"x":"\\"params\\":{","params":{"progressToken":5}}', "5"),
        ('{"params":{"x":[1],"progressToken":5}}', "5"),
        ('{"params":{"progressToken":1.5}}', "1.5"),
        ('{"params":{"progressToken":{"params":5}}}', '{"params":5}'),
        ('{"params":{"progressToken":5,"message":"\\"progressToken\\" \\n"}}', "5"),
        ('{"params":{"message":"progressToken"}}', None),
        ('[{"params":{"progressToken":5}}]', None),
        ('"params"', None),
    ],
)
def test_where_the_usual_place_would_deceive_the_walk_decides(text: str, token: str | None) -> None:
    assert splice.cut(text, *TOKEN) == token


_NAMES = ["params", "progressToken", "id", "_meta", "x", 'pa"rams', "par\\ams"]
_SPELLED = st.sampled_from(_NAMES).flatmap(
    lambda name: st.sampled_from([json.dumps(name), json.dumps(name).replace("a", "\\u0061")])
)
_SCALARS = st.sampled_from([json.dumps(name) for name in _NAMES]) | st.sampled_from(
    ["0", "-7", "12", "1.5", "1e400", "true", "false", "null", '""', '"\\ud800"', '"\\\\"', '"}"', '"{"', '","']
)


def _object(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.lists(st.tuples(_SPELLED, inner), max_size=4)
    spaces = st.sampled_from([("{", ":", ",", "}"), ("{", ": ", ", ", "}"), ("{ ", " : ", " ,\n", " }")])
    return st.builds(
        lambda pairs, marks: marks[0] + marks[2].join(f"{name}{marks[1]}{value}" for name, value in pairs) + marks[3],
        members,
        spaces,
    )


_TEXTS = st.recursive(
    _SCALARS,
    lambda inner: _object(inner) | st.lists(inner, max_size=3).map(lambda values: f"[{','.join(values)}]"),
    max_leaves=10,
)


@given(_object(_object(_TEXTS) | _TEXTS), st.lists(st.sampled_from(_NAMES[:6]), max_size=3))
def test_both_ways_find_the_same(text: str, path: list[str]) -> None:
    """Members given twice, names spelled with escapes, names as values: whatever is JSON."""
    splice.decode(text)
    assert splice.find(text, *path) == splice.walk(text, *path)


_RESPONSE_NAMES = st.sampled_from(["jsonrpc", "id", "result", "error", "x"]).map(json.dumps)


@given(st.lists(st.tuples(_RESPONSE_NAMES, _TEXTS), max_size=4))
def test_a_response_is_decoded_once_or_not_at_all(members: list[tuple[str, str]]) -> None:
    """Members given twice and other members beside them: whatever is found is what the long way finds."""
    text = "{" + ",".join(f"{name}:{value}" for name, value in members) + "}"
    if (found := splice.answer(text)) is not None:
        name = next(name for name in ("result", "error") if name in found[0])
        assert found == (splice.decode(text), *(splice.walk(text, name) or ()))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"jsonrpc":"2.0","id":"p.1","result":{"a":[1,2.5]}}', '{"a":[1,2.5]}'),
        ('{"result":{"a":1e400},"jsonrpc":"2.0","id":7}', '{"a":1e400}'),
        ('{"jsonrpc": "2.0", "id": 7, "error": {"code": -1, "message": "}"}}', '{"code": -1, "message": "}"}'),
        ('{"jsonrpc":"2.0","id":7,"result":{},"result":{}}', None),
        ('{"jsonrpc":"2.0","id":7,"result":{},"_meta":{}}', None),
        ('{"jsonrpc":"2.0","id":7,"result":{}}}', None),
        ('{"jsonrpc":"2.0","id":7,"result":{', None),
        ('{"jsonrpc":"2.0","id":-,"result":{}}', None),
        ('{"jsonrpc":"2.0","id":7,"result":' + "[" * 100_000 + "}", None),
        ('{"jsonrpc":"2.0","method":"x","params":{"result":{}}}', None),
    ],
)
def test_where_the_part_of_a_response_stands(text: str, part: str | None) -> None:
    found = splice.answer(text)
    assert (None if found is None else text[found[1] : found[2]]) == part


def test_a_number_that_python_cannot_hold_is_none() -> None:
    assert splice.decode("[0.5,1e400,-1e400,12345678901234567890123,1%s]" % ("0" * 5_000)) == [
        *(0.5, None, None, 12345678901234567890123, None)
    ]


def test_a_text_made_to_be_slow_is_matched_in_one_pass() -> None:
    """Neither many members nor a long string makes the regular expression look back over them again and again."""
    for text in (
        "{" + '"x":1,' * 50_000 + '"y":[]}',
        '{"x":"' + "y" * 300_000 + '"}',
        '{"params":{' + '"x":"",' * 50_000 + '"y":[]}}',
    ):
        began = time.process_time()
        assert splice.find(text, *TOKEN) is None
        assert time.process_time() - began < 2.0  # about 20 ms; a square of it would be minutes


def _at(found: Any, path: list[str]) -> Any:
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b'{"jsonrpc":"2.0","id":7,"result":{"id":8,"x":"', 7),
        (b'{ "id" : "7" , "jsonrpc" : "2.0", "error" : {"code"', 7),
        (b'{"result":{"id":8,"x":"...."},"jsonrpc":"2.0","id":7}', 7),
        (b'{"jsonrpc": "2.0", "result": {"n": NaN}, "id": 7}', 7),
        (b'{"result":{"x":NaN},"id":7,"jsonrpc":"2.0"}', 7),
        (b'{"result":{"id":7}', 7),  # cut short: it cannot be told
        (b'{"jsonrpc":"2.0","id":7,"method":"x","params":{"', None),
        (b'{"jsonrpc":"2.0","method":"x","params":{"result":{},"id":7}}', None),
        (b'{"result":{"id":7},"jsonrpc":"2.0"}', None),
        (b'{"id":7,"level":"info"}', None),
        (b'  "id": 7,', None),
        (b'"id":7}', None),
        (b'{"result":{},"id":7.5}', None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_the_id_of_a_response_is_found_at_its_edges(text: bytes, wanted: int | None) -> None:
    assert splice.id_at_the_edges(text, text) == wanted
