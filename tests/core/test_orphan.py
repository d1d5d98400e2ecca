"""What a client is told of a call that it lost, and the name under which it may cancel it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure._core.ids import Kind, Position, StreamId
from perdure._core.losses import MAX_NAME, Orphan, Visits, read_call

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


def without_positions(now: int) -> Visits:
    visits = Visits()
    visits.come_without_positions(now)
    return visits


def test_a_call_is_an_orphan_once_its_client_has_come_without_its_position() -> None:
    came = without_positions(5)
    assert [came.is_orphan(lost_at) for lost_at in (0, 4, 5, 6)] == [False, True, False, False]
    assert not Visits().is_orphan(4)


def test_a_client_hears_of_a_call_only_when_it_has_had_the_time_to_resume_it() -> None:
    came = without_positions(5)
    assert not came.is_due(4)
    came.pass_time(6)
    assert [came.is_due(lost_at) for lost_at in (0, 5, 6)] == [False, True, False]
    came.pass_time(3)
    assert came == Visits(attached=6, began=5, due=6)


def test_a_client_that_comes_without_positions_has_forgotten_what_it_heard() -> None:
    came = without_positions(5)
    assert [came.remembers(told_at) for told_at in (0, 4, 6)] == [False, False, True]
    came.pass_time(9)
    assert came.remembers(6)
