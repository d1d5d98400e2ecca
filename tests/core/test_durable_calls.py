"""Durable calls: keys, clients and rules; and tasks, as a client sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.durable_calls import (
    CallClient,
    TaskFacts,
    TaskSupport,
    call_digest,
    handle_view,
    input_requests,
    key_names,
    parse_task_rules,
    task_support,
    task_view,
)
from perdure._core.ids import parse_session_id
from perdure._core.states import CallState
from tests.support.clients.modern_requests import TASKS

SECRET = bytes(32)


def client(capabilities: object) -> CallClient:
    return CallClient(version="2026-07-28", info=None, capabilities=capabilities)


# What a client declares


@pytest.mark.parametrize(
    ("capabilities", "takes"),
    [
        ({"extensions": {TASKS: {}}}, True),
        ({"extensions": {TASKS: None}}, True),
        ({"extensions": {}}, False),
        ({"extensions": [TASKS]}, False),
        ({"tasks": {}}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_client_takes_tasks_if_it_names_the_extension(capabilities: object, takes: bool) -> None:
    assert client(capabilities).takes_tasks is takes


@pytest.mark.parametrize(
    ("capabilities", "takes"),
    [
        ({"elicitation": {}}, True),
        ({"sampling": {}}, True),
        ({"roots": {}}, True),
        ({"roots": None}, False),
        ({}, False),
    ],
)
def test_a_client_can_be_asked_if_it_declares_one_of_three_capabilities(capabilities: object, takes: bool) -> None:
    assert client(capabilities).takes_asks is takes


@pytest.mark.parametrize(
    ("method", "params", "declared", "lacks"),
    [
        ("elicitation/create", {"mode": "form"}, {"elicitation": {}}, None),
        ("elicitation/create", None, {"elicitation": {"form": {}}}, None),
        ("elicitation/create", {}, {}, {"elicitation": {}}),
        ("elicitation/create", {"mode": "url"}, {"elicitation": {"form": {}}}, {"elicitation": {"url": {}}}),
        ("elicitation/create", {"mode": "url"}, {"elicitation": {"url": {}}}, None),
        ("sampling/createMessage", {}, {"sampling": {}}, None),
        ("sampling/createMessage", {"tools": [{}]}, {"sampling": {}}, {"sampling": {"tools": {}}}),
        ("sampling/createMessage", {"toolChoice": {}}, {"sampling": {"tools": {}}}, None),
        ("sampling/createMessage", {"tools": []}, {"sampling": {}}, None),
        ("sampling/createMessage", {}, {"elicitation": {}}, {"sampling": {}}),
        ("roots/list", None, {"roots": {}}, None),
        ("roots/list", None, {"roots": True}, {"roots": {}}),
        ("ping", None, {}, None),
        ("roots/list", None, None, {"roots": {}}),
    ],
)
def test_what_a_client_has_to_declare_to_be_asked(method: str, params: Any, declared: object, lacks: object) -> None:
    assert client(declared).lacks(method, params) == lacks


# Keys and digests


def test_equal_keys_of_one_caller_have_equal_names_and_all_others_have_not() -> None:
    names = {
        key_names(SECRET, owner, key, state)
        for owner in ("", "alice", "bob")
        for key in ("k", "l", 'k","l')
        for state in (None, "", "s")
    }
    assert len(names) == len({session for session, _ in names}) == len({stream for _, stream in names}) == 27
    assert key_names(SECRET, "alice", "k", None) in names
    assert key_names(bytes([1]) * 32, "alice", "k", None) not in names


@given(st.text(max_size=255), st.text(max_size=50))
def test_whatever_the_key_is_its_name_is_one_of_a_session(key: str, owner: str) -> None:
    session, _ = key_names(SECRET, owner, key, None)
    assert parse_session_id(session) == session


def test_the_parts_of_a_name_cannot_be_moved_from_one_to_the_other() -> None:
    assert key_names(SECRET, "alice", "bob", None) != key_names(SECRET, "alicebob", "", None)
    assert key_names(SECRET, "alice", "k", "") != key_names(SECRET, "alice", "k", None)


ASKED = {"name": "pay", "arguments": {"a": 1, "b": [1, 2]}}


@pytest.mark.parametrize(
    "params",
    [
        {"arguments": {"b": [1, 2], "a": 1}, "name": "pay"},
        {**ASKED, "_meta": {"progressToken": 7}},
        {**ASKED, "requestState": "s", "inputResponses": {}},
    ],
)
def test_requests_that_a_tool_cannot_tell_apart_have_one_digest(params: dict[str, Any]) -> None:
    assert call_digest("tools/call", params) == call_digest("tools/call", ASKED)


@pytest.mark.parametrize(
    "params",
    [
        {**ASKED, "name": "put"},
        {**ASKED, "arguments": {"a": 1, "b": [2, 1]}},
        {**ASKED, "arguments": {"a": "1", "b": [1, 2]}},
        {**ASKED, "arguments": {"a": 1}},
        {"name": "pay"},
    ],
)
def test_other_tools_and_other_arguments_have_other_digests(params: dict[str, Any]) -> None:
    assert call_digest("tools/call", params) != call_digest("tools/call", ASKED)


def test_no_arguments_are_as_empty_ones() -> None:
    assert call_digest("tools/call", {"name": "pay"}) == call_digest("tools/call", {"name": "pay", "arguments": {}})


# Rules


def test_rules_are_read_with_the_last_word_of_a_name() -> None:
    rules = parse_task_rules(["pay=required", "*=never", "a=b=optional", "pay=optional"])
    assert rules == {"pay": TaskSupport.OPTIONAL, "*": TaskSupport.NEVER, "a=b": TaskSupport.OPTIONAL}


@pytest.mark.parametrize("rule", ["pay", "pay=", "=never", "pay=always", "", "pay=NEVER", "pay= never"])
def test_a_rule_that_is_none_is_refused_with_what_is_allowed(rule: str) -> None:
    with pytest.raises(ValueError, match=r"is not NAME=required\|optional\|never") as refused:
        parse_task_rules(["*=never", rule])
    assert repr(rule) in str(refused.value)


@pytest.mark.parametrize(
    ("rules", "tool", "support"),
    [
        ({}, None, TaskSupport.OPTIONAL),
        ({}, {"name": "pay"}, TaskSupport.OPTIONAL),
        ({}, {"execution": {"taskSupport": "required"}}, TaskSupport.REQUIRED),
        ({}, {"execution": {"taskSupport": "forbidden"}}, TaskSupport.NEVER),
        ({}, {"execution": {"taskSupport": "optional"}}, TaskSupport.OPTIONAL),
        ({}, {"execution": {"taskSupport": ["odd"]}}, TaskSupport.OPTIONAL),
        ({}, {"execution": "odd"}, TaskSupport.OPTIONAL),
        ({"*": TaskSupport.NEVER}, {"execution": {"taskSupport": "required"}}, TaskSupport.NEVER),
        ({"*": TaskSupport.NEVER, "pay": TaskSupport.REQUIRED}, None, TaskSupport.REQUIRED),
        ({"put": TaskSupport.REQUIRED}, None, TaskSupport.OPTIONAL),
    ],
)
def test_the_operator_has_the_first_word_on_a_tool_and_the_tool_the_second(
    rules: dict[str, TaskSupport], tool: dict[str, Any] | None, support: TaskSupport
) -> None:
    assert task_support("pay", rules, tool, usual=TaskSupport.OPTIONAL) is support


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


# The status

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
