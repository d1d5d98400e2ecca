"""What is announced of tasks of 2025-11-25, and how they are shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure._core import session_tasks
from perdure._core.durable_calls import TaskFacts, TaskSupport
from perdure._core.ids import new_stream_id
from perdure._core.states import CallState

TASK = new_stream_id(lambda n: b"7" * n)
OURS = session_tasks.capability(lists=False)


def welcome(version: str = "2025-11-25", **more: Any) -> bytes:
    return json.dumps({"protocolVersion": version, "capabilities": {"tools": {}}, **more}).encode()


def test_a_result_with_the_capability_is_known_as_ours_and_can_be_taken_back() -> None:
    """K1."""
    announced = session_tasks.announce(welcome(), OURS)
    assert json.loads(announced)["capabilities"]["tasks"] == OURS
    assert session_tasks.is_ours(announced)
    assert session_tasks.as_declared(announced)["capabilities"] == {"tools": {}}
    assert session_tasks.announce_again(announced, welcome()) == announced
    assert session_tasks.announce_again(welcome(), welcome()) == welcome()


@pytest.mark.parametrize(
    "result",
    [
        welcome("2025-06-18"),
        welcome("made up"),
        welcome(capabilities={}),
        welcome(capabilities={"tools": {}, "tasks": {"cancel": {}}}),
    ],
)
def test_a_result_that_cannot_have_ours_stays_as_it_is(result: bytes) -> None:
    """K1: also with tasks of the server's own."""
    announced = session_tasks.announce(result, OURS)
    assert json.loads(announced) == json.loads(result)
    assert not session_tasks.is_ours(announced)


def test_the_mark_of_another_perdure_is_taken_off() -> None:
    """K1."""
    theirs = session_tasks.announce(welcome(_meta={"kept": 1}), OURS)
    here = session_tasks.announce(theirs, OURS)
    assert json.loads(here) == {
        **json.loads(welcome()),
        "capabilities": {"tools": {}, "tasks": OURS},
        "_meta": {"kept": 1},
    }
    assert not session_tasks.is_ours(here)


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ({}, None),
        ({"a": TaskSupport.NEVER}, None),
        ({"*": TaskSupport.NEVER}, False),
        ({"*": TaskSupport.NEVER, "a": TaskSupport.OPTIONAL}, True),
        ({"a": TaskSupport.REQUIRED}, True),
    ],
)
def test_rules_may_decide_alone_whether_any_tool_takes_part(rules: dict[str, TaskSupport], found: bool | None) -> None:
    """K1."""
    assert session_tasks.has_task_tools(rules) is found


@pytest.mark.parametrize("place", [(0.0, TASK), (1763500000.123456, TASK), (5e-324, TASK)])
def test_a_cursor_names_its_place_to_the_last_digit(place: tuple[float, str]) -> None:
    """K23."""
    assert session_tasks.read_cursor(session_tasks.cursor(*place)) == place


@pytest.mark.parametrize(
    "given", [None, 1, "", "~", f"~{TASK}", f"inf~{TASK}", f"nan~{TASK}", "0x1p+1~x", f"0x1p+99999~{TASK}"]
)
def test_what_is_no_cursor_is_none(given: object) -> None:
    """K23."""
    assert session_tasks.read_cursor(given) is None


@pytest.mark.parametrize(("size", "shown"), [(2_000, 2_000), (2_001, 2_000)])
def test_a_failed_task_says_so_much_of_its_text(size: int, shown: int) -> None:
    """K18."""
    response = {"result": {"isError": True, "content": [{"type": "text", "text": "x" * size}]}}
    facts = TaskFacts(
        id=TASK,
        created=1.0,
        updated=2.0,
        state=CallState.ANSWERED,
        asks={},
        answer=json.dumps(response).encode(),
    )
    view = session_tasks.task_of(facts, now=3.0, ttl=60.0)
    assert (view["status"], len(view["statusMessage"]), view["ttl"]) == ("failed", shown, 61_000)


@pytest.mark.parametrize("content", [[], None, [{"type": "image"}], ["odd"]])
def test_a_failed_task_without_a_text_says_that_it_failed(content: object) -> None:
    """K18."""
    answer = json.dumps({"result": {"isError": True, "content": content}}).encode()
    facts = TaskFacts(id=TASK, created=1.0, updated=2.0, state=CallState.ANSWERED, asks={}, answer=answer)
    assert session_tasks.task_of(facts, now=3.0, ttl=60.0)["statusMessage"] == "failed"


def test_params_are_the_tools_own_again_without_the_name_of_the_task() -> None:
    """K14."""
    for params in ({"data": 1}, {"data": 1, "_meta": {"mine": 2}}):
        assert session_tasks.without_related(session_tasks.related(params, TASK)) == params
