"""The public names of the SDK and its HTTP library that the client leans on: when a release moves one, this says which.

A failure here is not a bug of that release: it is work for us.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import mcp
import mcp_types as types
import pytest
from mcp.client import advertise
from mcp.client.session import ClientRequestContext, ClientSession
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_METHOD_HEADER, MCP_NAME_HEADER, encode_header_value
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params, progress_token_from_params
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    methods,
)
from mcp_types.version import LATEST_HANDSHAKE_VERSION

from perdure._core.envelope import PREFIX as ENVELOPE
from perdure._core.envelope import TASKS

pytestmark = pytest.mark.anyio


def moved(seam: str, used_by: str) -> str:
    return f"the seam {seam} has moved; {used_by} leans on it"


def test_the_client_takes_a_transport_and_the_callbacks_that_connect_hands_on() -> None:
    fields = {field.name for field in dataclasses.fields(mcp.Client)}
    wanted = {
        *("server", "mode", "read_timeout_seconds", "sampling_callback", "elicitation_callback"),
        *("list_roots_callback", "logging_callback", "message_handler", "client_info", "extensions"),
    }
    assert wanted <= fields, moved("mcp.Client(…)", "client/connect.py")


def test_call_tool_takes_what_ours_hands_on() -> None:
    names = list(inspect.signature(mcp.Client.call_tool).parameters)
    assert names == [
        *("self", "name", "arguments", "read_timeout_seconds", "progress_callback"),
        *("input_responses", "request_state", "meta"),
    ], moved("mcp.Client.call_tool", "client/connect.py")


def test_what_a_renewed_session_agreed_on_can_be_adopted() -> None:
    assert list(inspect.signature(ClientSession.adopt).parameters) == ["self", "result"], moved(
        "ClientSession.adopt", "client/connect.py"
    )


def test_questions_of_a_task_go_through_the_sessions_own_table_of_callbacks() -> None:
    wanted = ["self", "ctx", "request"]
    assert list(inspect.signature(ClientSession.dispatch_input_request).parameters) == wanted, moved(
        "ClientSession.dispatch_input_request", "client/connect.py"
    )
    fields = {field.name for field in dataclasses.fields(ClientRequestContext)}
    assert fields == {"session", "request_id", "meta"}, moved("ClientRequestContext", "client/connect.py")


async def test_auto_negotiation_discovers_first_and_begins_a_session_where_that_fails() -> None:
    """`client/modern_era.py` answers the second with the error of the first. Headers travel in the metadata."""
    outbound, from_client = anyio.create_memory_object_stream[SessionMessage](9)
    to_client, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](9)

    @asynccontextmanager
    async def streams() -> AsyncIterator[tuple[Any, Any]]:
        yield inbound, outbound

    async def enter() -> None:
        with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="no session"), flatten_subgroups=True):
            async with mcp.Client(streams(), mode="auto", extensions=[advertise(TASKS)]):
                raise AssertionError("no server")

    async with to_client, from_client, anyio.create_task_group() as group:
        group.start_soon(enter)
        for method, why in (("server/discover", "no"), ("initialize", "no session")):
            item = await from_client.receive()
            asked = item.message
            assert isinstance(asked, JSONRPCRequest)
            assert asked.method == method, moved("mode='auto'", "client/modern_era.py")
            if method == "server/discover":
                assert isinstance(item.metadata, ClientMessageMetadata)
                assert (item.metadata.headers or {}).get(MCP_METHOD_HEADER) == method, moved("headers", "modern_era.py")
                declared = (asked.params or {})["_meta"][CLIENT_CAPABILITIES_META_KEY]["extensions"]
                assert declared == {TASKS: {}}, moved("advertise", "client/connect.py")
            error = types.ErrorData(code=-32601, message=why)
            await to_client.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=asked.id, error=error)))


def test_the_words_of_the_revision_that_the_client_writes_itself() -> None:
    assert PROTOCOL_VERSION_META_KEY.startswith(ENVELOPE), moved("the envelope", "_core/envelope.py")
    assert SUBSCRIPTION_ID_META_KEY == "io.modelcontextprotocol/subscriptionId"
    assert (MCP_METHOD_HEADER.lower(), MCP_NAME_HEADER.lower()) == ("mcp-method", "mcp-name")
    assert encode_header_value("täsk").startswith("=?base64?"), moved("encode_header_value", "_core/envelope.py")


async def test_the_handshake_is_one_request_and_one_notification_over_plain_streams() -> None:
    """`client/transport.py` is such a pair of streams: it answers the first itself when a session goes on."""
    to_client, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](9)
    outbound, from_client = anyio.create_memory_object_stream[SessionMessage](9)
    result = types.InitializeResult(
        protocol_version=LATEST_HANDSHAKE_VERSION,
        capabilities=types.ServerCapabilities(),
        server_info=types.Implementation(name="s", version="1"),
    )
    async with to_client, from_client, ClientSession(inbound, outbound) as session, anyio.create_task_group() as group:
        group.start_soon(session.initialize)
        asked = (await from_client.receive()).message
        assert isinstance(asked, JSONRPCRequest)
        assert (asked.method, type(asked.id)) == ("initialize", int), moved("integer ids", "client/transport.py")
        wire = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        await to_client.send(SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=asked.id, result=wire)))
        told = (await from_client.receive()).message
        assert isinstance(told, JSONRPCNotification)
        assert told.method == "notifications/initialized"
        assert session.protocol_version == LATEST_HANDSHAKE_VERSION


async def test_the_id_doubles_as_progress_token_and_an_exception_reaches_the_message_handler() -> None:
    """`client/transport.py` has other names for both on the wire, and reports gaps that way."""
    to_client, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](9)
    outbound, from_client = anyio.create_memory_object_stream[SessionMessage](9)
    heard: list[object] = []
    seen: list[float] = []
    done = anyio.Event()

    async def handle(message: object) -> None:
        heard.append(message)
        done.set()

    async def report(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async def call(session: ClientSession) -> None:
        await session.send_request(
            types.CallToolRequest(params=types.CallToolRequestParams(name="t")),
            types.CallToolResult,
            progress_callback=report,
        )

    async with to_client, from_client, ClientSession(inbound, outbound, message_handler=handle) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(call, session)
            asked = (await from_client.receive()).message
            assert isinstance(asked, JSONRPCRequest)
            assert progress_token_from_params(asked.params) == asked.id, moved(
                "the progress token", "client/transport.py"
            )
            params = {"progressToken": asked.id, "progress": 1}
            note = JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params=params)
            await to_client.send(SessionMessage(note))
            await to_client.send(SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=asked.id, result={"content": []})))
        await done.wait()
        await to_client.send(error := LookupError("mine"))
        with anyio.fail_after(5):
            while error not in heard:
                await anyio.lowlevel.checkpoint()
    assert seen == [1]


def test_cancelled_ids_are_read_as_the_sdk_reads_them() -> None:
    assert cancelled_request_id_from_params({"requestId": "1.7"}) == "1.7"
    assert cancelled_request_id_from_params({"requestId": True}) is None


def test_notifications_are_parsed_by_method_and_version() -> None:
    params = {"progressToken": "1.1", "progress": 2}
    parsed = methods.parse_server_notification("notifications/progress", "2025-11-25", params)
    assert isinstance(parsed, types.ProgressNotification), moved("parse_server_notification", "client/pending.py")
    with pytest.raises(KeyError):
        methods.parse_server_notification("notifications/none", "2025-11-25", None)


def test_an_error_has_code_message_and_data() -> None:
    error = MCPError(-31001, "m", {"a": 1})
    assert (error.code, error.message, error.data) == (-31001, "m", {"a": 1})


def test_the_http_librarys_errors_tell_what_has_left_from_what_may_have() -> None:
    """`remote/endpoint.py`: nothing that is not about connecting may ever stand among the first."""
    not_sent = {httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError}
    perhaps = {httpx2.ReadError, httpx2.ReadTimeout, httpx2.WriteError, httpx2.WriteTimeout, httpx2.RemoteProtocolError}
    assert all(issubclass(error, httpx2.TransportError) for error in not_sent | perhaps)
    assert not any(issubclass(error, tuple(not_sent)) for error in perhaps)
    assert not issubclass(httpx2.StreamError, httpx2.HTTPError), moved("httpx2.StreamError", "remote/endpoint.py")


def test_a_redirect_response_offers_the_request_that_follows() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(307, headers={"location": "/other"})

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:
        response = client.get("http://a/one", follow_redirects=False)
    assert response.next_request is not None, moved("Response.next_request", "remote/endpoint.py")
    assert (response.next_request.method, str(response.next_request.url)) == ("GET", "http://a/other")
