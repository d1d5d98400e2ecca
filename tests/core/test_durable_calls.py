"""Single calls: what a client says of itself, names made of keys, digests, and how tools are served."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure._core.durable_calls import (
    Client,
    TaskSupport,
    call_digest,
    key_names,
    parse_task_rules,
    task_support,
)
from perdure._core.ids import parse_session_id
from tests.support.clients.modern_requests import TASKS

SECRET = bytes(32)


def client(capabilities: object) -> Client:
    return Client(version="2026-07-28", info=None, capabilities=capabilities)


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


@settings(max_examples=30)
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
    assert task_support("pay", rules, tool) is support
