"""What a client is told of a call that it lost, and the name under which it may cancel it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure._core.ids import Kind, Position, StreamId
from perdure._core.orphan import MAX_NAME, Orphan, read_call

POSITION = Position(kind=Kind.CALL, stream=StreamId("s" * 22), generation=1, seq=2)
RUNNING = Orphan(
    incarnation=1, request_id=7, method="tools/call", name="bake", ended=False, position=POSITION, last=5
)  # fmt: skip


def test_a_running_call_is_told_with_what_it_said() -> None:
    assert RUNNING.params == {
        "call": "1:7",
        "requestId": 7,
        "method": "tools/call",
        "name": "bake",
        "state": "running",
        "position": str(POSITION),
        "from": 3,
        "to": 5,
    }


def test_a_call_that_said_nothing_more_has_no_numbers() -> None:
    quiet = replace(RUNNING, last=2)
    assert {"from", "to"}.isdisjoint(quiet.params)
    assert quiet.sentence == "call 1:7 (tools/call bake) still runs (cancel it as '1:7')"


def test_a_name_of_any_length_is_told_up_to_the_bound() -> None:
    for length in (MAX_NAME, MAX_NAME + 1):
        assert replace(RUNNING, name="x" * length).params["name"] == "x" * MAX_NAME
    assert "name" not in replace(RUNNING, name=None).params


@pytest.mark.parametrize("request_id", [7, "7", "bake", "a:b", ":", "1:7", "\n", "é"])
def test_a_name_is_read_as_it_was_told(request_id: int | str) -> None:
    assert read_call(replace(RUNNING, incarnation=12, request_id=request_id).call) == (12, str(request_id))


@pytest.mark.parametrize("text", [7, "7", "", ":7", "-1:7", "+1:7", " 1:7", "1 :7", "x:7", "٣:7", "1" * 10 + ":7"])
def test_anything_else_is_no_name(text: int | str) -> None:
    assert read_call(text) is None
