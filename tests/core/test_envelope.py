"""What requests of 2026-07-28 say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.shared.inbound import encode_header_value, mcp_param_headers, x_mcp_header_map

from perdure._core.envelope import (
    CALLS,
    CAPABILITIES,
    TASKS,
    VERSION,
    declares,
    envelope_in,
    header_value,
    headers_of,
    param_headers,
    with_tasks,
)

META = {VERSION: "2026-07-28", CAPABILITIES: {"roots": {}, "extensions": {"x": {}}}}


@pytest.mark.parametrize(
    "text", ["bake", "a b", "notes://today?x=1", "käse", " x", "x ", "a\nb", "=?base64?eA==?=", "~"]
)
def test_a_name_in_a_header_is_what_the_sdk_makes_of_it(text: str) -> None:
    assert header_value(text) == encode_header_value(text)


def test_the_headers_of_requests() -> None:
    version = {"mcp-protocol-version": "2026-07-28"}
    assert headers_of("tools/call", {"name": "bake", "_meta": META}) == {
        **version,
        "mcp-method": "tools/call",
        "mcp-name": "bake",
    }
    assert headers_of("resources/read", {"uri": "x://y", "_meta": META})["mcp-name"] == "x://y"
    assert headers_of("tasks/get", {"taskId": "t", "_meta": META})["mcp-name"] == "t"
    for unnamed in ({"name": "x", "_meta": META}, {"name": 1, "_meta": META}):
        assert headers_of("tools/list", unnamed) == {**version, "mcp-method": "tools/list"}


def test_only_a_request_that_says_its_version_has_an_envelope() -> None:
    assert envelope_in({"_meta": {**META, "progressToken": 1, "dev.perdure/key": "k"}}) == META
    given: list[dict[str, Any] | None] = [None, {}, {"_meta": None}, {"_meta": {}}, {"_meta": {VERSION: 1}}]
    for params in given:
        assert envelope_in(params) is None


def test_tasks_are_declared_beside_what_a_client_declares() -> None:
    assert not declares(META.get(CAPABILITIES), TASKS)
    assert with_tasks(META)[CAPABILITIES] == {"roots": {}, "extensions": {"x": {}, TASKS: {}, CALLS: {}}}
    assert declares(with_tasks(META)[CAPABILITIES], TASKS)
    assert declares(with_tasks({VERSION: "2026-07-28", CAPABILITIES: "odd"})[CAPABILITIES], TASKS)


def test_arguments_that_a_tool_wants_in_headers_are_those_that_the_sdk_sends() -> None:
    named = {"type": "string", "x-mcp-header": "City"}
    inner = {"type": "object", "properties": {"deep": {"type": "boolean", "x-mcp-header": "Deep"}, "plain": {}}}
    schema = {"properties": {"city": named, "count": {"type": "integer", "x-mcp-header": "N"}, "inner": inner}}
    for arguments in (
        {"city": "Köln", "count": 3, "inner": {"deep": True, "plain": 1}},
        {"city": None, "inner": "odd"},
        {"city": "Bonn", "inner": {"deep": False}},
        {"count": 10**5000},
    ):
        found = {name.lower(): value for name, value in param_headers(schema, arguments).items()}
        sent = mcp_param_headers(x_mcp_header_map(schema), arguments)
        assert found == {name.lower(): value for name, value in sent.items()}
    assert param_headers({"properties": {"x": {"x-mcp-header": "bad name"}}}, {"x": 1}) == {}
    odd: list[object] = [None, [], {"properties": []}, {"properties": {"x": None}}]
    for schema_like in odd:
        assert param_headers(schema_like, {"x": 1}) == {}
