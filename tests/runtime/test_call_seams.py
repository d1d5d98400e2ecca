"""The public names of the SDK that calls of 2026-07-28 lean on: when a release moves one, this says which."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import mcp_types
import pytest
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import serve_one
from mcp.shared.dispatcher import CallOptions, DispatchContext
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    MCP_NAME_HEADER,
    InboundLadderRejection,
    InboundModernRoute,
    classify_inbound_request,
    decode_header_value,
    find_duplicated_routing_header,
    validate_mcp_param_headers,
)
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from pydantic import ValidationError

from perdure._core.envelope import CALLS, TASKS
from perdure.runtime.sdk import HandlerContext
from perdure.runtime.server import announce_extensions
from perdure.settings import Settings
from tests.runtime.test_seams import moved, parameters
from tests.support.clients.modern_requests import modern

pytestmark = pytest.mark.anyio


def context() -> Any:
    """That of a request which no client hears."""
    transport = TransportContext(kind="streamable-http", can_send_request=False)
    return HandlerContext(None, 1, transport, ServerMessageMetadata())  # type: ignore[arg-type]


def params_of(method: str) -> dict[str, Any]:
    """The params of a request that says of its client what it has to."""
    params: dict[str, Any] = json.loads(modern(method)[0])["params"]
    return params


def test_a_request_is_served_by_one_function_with_a_context_of_ours() -> None:
    names = list(parameters(serve_one))
    wanted = ["server", "dctx", "method", "params", "connection", "lifespan_state"]
    assert names == wanted, moved("serve_one(…)", "runtime/sdk.py, runtime/own_requests.py")
    members = {name for name in dir(DispatchContext) if not name.startswith("_")}
    ours = {name for name in dir(HandlerContext) if not name.startswith("_")}
    assert members <= ours, moved(f"DispatchContext.{members - ours}", "HandlerContext in runtime/sdk.py")
    fields = {"kind", "can_send_request", "headers"}
    assert fields <= set(parameters(TransportContext)), moved("TransportContext(…)", "runtime/sdk.py")
    options = {"timeout", "on_progress", "cancel_on_abandon"}
    assert options <= set(CallOptions.__annotations__), moved("CallOptions", "HandlerRuntime.ask")


def test_a_connection_is_built_from_what_a_request_says_of_its_client() -> None:
    names = list(parameters(Connection.from_envelope))
    wanted = ["protocol_version", "client_info", "client_capabilities", "outbound"]
    assert names == wanted, moved("Connection.from_envelope(…)", "runtime/sdk.py")
    connection = Connection.from_envelope("2026-07-28", {"name": "c", "version": "1"}, {"roots": {}})
    assert connection.client_capabilities is not None
    assert connection.client_capabilities.roots is not None


async def test_a_request_without_the_envelope_is_refused_by_the_server() -> None:
    """So requests of this process bring it as well (`runtime/own_requests.py`)."""
    server: Server[Any] = Server("s", version="1")

    async def tools(ctx: Any, params: Any) -> mcp_types.ListToolsResult:
        return mcp_types.ListToolsResult(tools=[])

    server.add_request_handler("tools/list", mcp_types.PaginatedRequestParams, tools)

    async def served(params: dict[str, Any]) -> dict[str, Any]:
        connection = Connection.from_envelope("2026-07-28", None, {})
        return await serve_one(server, context(), "tools/list", params, connection=connection, lifespan_state=None)

    with pytest.raises(ValidationError):
        await served({})
    result = await served(params_of("tools/list"))
    assert (result["tools"], result["resultType"]) == ([], "complete"), moved(
        "the envelope", "_META in runtime/own_requests.py"
    )


def test_the_functions_that_judge_requests_take_what_we_give_them() -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "pay", "_meta": {}}}
    assert list(parameters(classify_inbound_request))[:2] == ["body", "headers"], moved(
        "classify_inbound_request", "http/request.py"
    )
    refusal = classify_inbound_request(body, headers={})
    assert isinstance(refusal, InboundLadderRejection), moved("InboundLadderRejection", "http/request.py")
    assert refusal.code == -32602
    text, headers = modern("tools/call", {"name": "pay"})
    route = classify_inbound_request(json.loads(text), headers=headers)
    assert isinstance(route, InboundModernRoute)
    found = route.protocol_version, route.client_info, route.client_capabilities
    assert found == ("2026-07-28", {"name": "peer", "version": "1"}, {}), moved("InboundModernRoute", "read_modern()")
    twice = [("Mcp-Method", "a"), ("mcp-method", "b")]
    assert find_duplicated_routing_header(twice) is not None, moved("find_duplicated_routing_header", "read_modern()")
    assert find_duplicated_routing_header(twice[:1]) is None


def test_headers_that_repeat_arguments_are_compared_by_the_sdk() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "x-mcp-header": "City"}}}
    told = moved("validate_mcp_param_headers", "http/durable_calls.py")
    assert validate_mcp_param_headers(schema, {"city": "Rome"}, {"mcp-param-city": "Rome"}) is None, told
    refusal = validate_mcp_param_headers(schema, {"city": "Rome"}, {"mcp-param-city": "Oslo"})
    assert refusal is not None, told
    assert refusal.code == -32020, told
    assert decode_header_value("=?base64?w6Q=?=") == "\xe4", moved("decode_header_value", "http/durable_calls.py")
    assert MCP_NAME_HEADER == "mcp-name", moved("MCP_NAME_HEADER", "http/durable_calls.py")


def test_the_sdk_says_which_errors_have_which_status() -> None:
    told = moved("ERROR_CODE_HTTP_STATUS", "http/event_stream.py")
    assert {code: ERROR_CODE_HTTP_STATUS.get(code) for code in (-32602, -32021, -32601, -31001)} == {
        -32602: 400,
        -32021: 400,
        -32601: 404,
        -31001: None,
    }, told


async def test_middleware_in_front_sees_the_method_and_the_result_of_discovery() -> None:
    """`announce_extensions` adds to what `server/discover` says."""
    assert list(parameters(announce_extensions))[-2:] == ["ctx", "call_next"]
    server: Server[Any] = Server("s", version="1")
    twin = copy.copy(server)
    twin.middleware = [partial(announce_extensions, Settings()), *twin.middleware]
    connection = Connection.from_envelope("2026-07-28", None, {})
    params = params_of("server/discover")
    result = await serve_one(twin, context(), "server/discover", params, connection=connection, lifespan_state=None)
    extensions = result["capabilities"]["extensions"]
    assert {TASKS, CALLS} <= set(extensions), moved("Server.middleware", "announce_extensions()")


def test_a_server_tells_its_name_and_which_handlers_it_has() -> None:
    server: Server[Any] = Server("s", version="7")
    assert server.get_request_handler("tasks/get") is None, moved("Server.get_request_handler", "ToolCatalog")
    assert server.server_info_stamp == {"name": "s", "version": "7"}, moved("Server.server_info_stamp", "ToolCatalog")
    token = progress_token_from_params({"_meta": {"progressToken": 7}})
    assert token == 7, moved("progress_token_from_params", "CallRuntime")
    refused = NoBackChannelError("roots/list")
    assert isinstance(refused, MCPError), moved("NoBackChannelError", "ToolCatalog")
