"""Tasks, as they are shown: each cell of the table, the times, the words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure._core.durable_calls import STATUS, Standing, TaskFacts, TaskStatus, handle_view, input_requests, task_view
from perdure._core.states import CallState

RESULT = b'{"jsonrpc":"2.0","id":1,"result":{"content":[]}}'
ERROR = b'{"jsonrpc":"2.0","id":1,"error":{"code":-31001,"message":"Interrupted, outcome unknown"}}'
ASK = b'{"jsonrpc":"2.0","id":"ask-a-1","method":"elicitation/create","params":{"message":"Well?"}}'
ASKS = {"ask-a-1": ASK}
START = 1_000.0
TTL = 600.0


def facts(state: CallState = CallState.RUNNING, **known: Any) -> TaskFacts:
    given: dict[str, Any] = {"id": "t", "created": START, "updated": START, "asks": {}, **known}
    return TaskFacts(state=state, **given)


def view(seen: TaskFacts, *, age: float = 0.0) -> dict[str, Any]:
    return task_view(seen, now=START + age, ttl=TTL)


# The table

CELLS = [
    (facts(), "working"),
    (facts(asks=ASKS), "input_required"),
    (facts(CallState.WAITING), "working"),
    (facts(CallState.WAITING, asks=ASKS), "working"),
    (facts(CallState.ANSWERED, answer=RESULT), "completed"),
    (facts(CallState.ANSWERED, answer=ERROR), "failed"),
    (facts(CallState.SETTLED, answer=ERROR), "failed"),
    (facts(CallState.CANCELLED, answer=ERROR), "cancelled"),
]


@pytest.mark.parametrize(("seen", "status"), CELLS)
def test_the_status_of_a_task_is_that_of_its_call(seen: TaskFacts, status: str) -> None:
    assert view(seen)["status"] == status


def test_the_cells_above_are_all_that_there_are() -> None:
    assert sum(len(row) for row in STATUS.values()) == len(CELLS)
    assert set(STATUS) == set(CallState)
    assert {status for row in STATUS.values() for status in row.values()} == set(TaskStatus)
    assert {standing for row in STATUS.values() for standing in row} == set(Standing)


def test_a_task_that_is_over_does_not_go_on() -> None:
    over = [seen for seen, _ in CELLS if seen.is_over]
    assert {seen.state for seen in over} == {CallState.ANSWERED, CallState.SETTLED, CallState.CANCELLED}


# What is shown


def test_a_completed_task_shows_its_result_and_nothing_else() -> None:
    shown = view(facts(CallState.ANSWERED, answer=RESULT, asks=ASKS))
    assert shown["result"] == {"content": []}
    assert not {"error", "inputRequests", "statusMessage"} & set(shown)


def test_a_failed_task_shows_its_error_in_words_as_well() -> None:
    shown = view(facts(CallState.SETTLED, answer=ERROR))
    assert shown["error"] == {"code": -31001, "message": "Interrupted, outcome unknown"}
    assert shown["statusMessage"] == "Interrupted, outcome unknown"
    assert "result" not in shown


@pytest.mark.parametrize("state", [CallState.ANSWERED, CallState.SETTLED])
def test_a_task_whose_answer_is_gone_has_failed_with_that(state: CallState) -> None:
    shown = view(facts(state))
    assert (shown["status"], shown["error"]["code"]) == ("failed", -31002)


def test_a_cancelled_task_shows_neither_result_nor_error() -> None:
    assert not {"result", "error"} & set(view(facts(CallState.CANCELLED, answer=ERROR)))


def test_questions_are_shown_by_their_names_with_method_and_params() -> None:
    bare = json.dumps({"jsonrpc": "2.0", "id": "ask-a-2", "method": "roots/list"}).encode()
    asks = {**ASKS, "ask-a-2": bare}
    shown = view(facts(asks=asks))["inputRequests"]
    assert shown == input_requests(asks)
    assert shown == {
        "ask-a-1": {"method": "elicitation/create", "params": {"message": "Well?"}},
        "ask-a-2": {"method": "roots/list", "params": {}},
    }


def test_a_handle_shows_nothing_of_what_came_of_it() -> None:
    for seen, status in CELLS:
        handle = handle_view(view(seen))
        assert handle["status"] == status
        assert not {"result", "error", "inputRequests"} & set(handle)
        assert handle["taskId"] == "t"


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ({"progress": 3}, "3"),
        ({"progress": 3, "total": 8}, "3 of 8"),
        ({"progress": 0.5, "total": 1.0, "message": "rising"}, "0.5 of 1: rising"),
        ({"progress": 12345678, "total": 5e7}, "12345678 of 50000000"),
        ({"progress": 3, "total": 0}, "3"),
        ({"message": "rising"}, "rising"),
        ({"progress": "three", "message": None}, ""),
    ],
)
def test_progress_is_told_in_words(progress: dict[str, Any], words: str) -> None:
    assert view(facts(progress=progress))["statusMessage"] == words


def test_a_task_that_waits_for_its_principal_says_so_whatever_its_progress_was() -> None:
    assert "principal" in view(facts(CallState.WAITING, progress={"progress": 3}))["statusMessage"]
    assert "statusMessage" not in view(facts())


# Times


@pytest.mark.parametrize(
    ("age", "pause"), [(0.0, 500), (4.9, 500), (5.1, 510), (20.0, 2_000), (50.0, 5_000), (9_999.0, 5_000)]
)
def test_clients_are_asked_to_poll_a_tenth_of_the_age_within_bounds(age: float, pause: int) -> None:
    assert view(facts(), age=age)["pollIntervalMs"] == pause


def test_a_clock_that_was_set_back_does_not_make_the_age_negative() -> None:
    shown = view(facts(updated=START - 50), age=-100.0)
    assert shown["pollIntervalMs"] == 500
    assert shown["ttlMs"] == TTL * 1000
    assert shown["lastUpdatedAt"] == shown["createdAt"]


def test_a_task_is_kept_for_its_time_after_its_end_which_a_client_counts_from_its_creation() -> None:
    ended = facts(CallState.ANSWERED, answer=RESULT, updated=START + 100)
    assert view(ended, age=300.0)["ttlMs"] == (TTL + 100) * 1000


@pytest.mark.parametrize("age", [0.0, TTL / 2, TTL / 2 + 1, TTL, 10 * TTL])
def test_a_task_that_runs_is_never_shown_as_expired(age: float) -> None:
    assert view(facts(), age=age)["ttlMs"] / 1000 - age >= TTL / 2


def test_times_are_written_in_utc_with_milliseconds() -> None:
    assert view(facts(updated=START + 1.5))["createdAt"] == "1970-01-01T00:16:40.000Z"
    assert view(facts(updated=START + 1.5))["lastUpdatedAt"] == "1970-01-01T00:16:41.500Z"
