"""The public names that we lean on and whose shape nobody promised: when a release moves one, this says which.

Each test is one seam, with the place that uses it. A failure here is not a bug of that release: it is work for us.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import mcp_types
import pytest
import uvicorn
from fastmcp import FastMCP
from mcp.server.auth.middleware.auth_context import AuthContextMiddleware, auth_context_var, get_access_token
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import AccessToken, principal_components
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.request_state import AESGCMRequestStateCodec, RequestStateBoundary, RequestStateSecurity
from mcp.server.runner import ServerRunner, aclose_shielded, serve_one
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared import inbound
from mcp.shared.dispatcher import DispatchContext, Outbound, coerce_request_id
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import handler_exception_to_error_data
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.subscriptions import LISTEN_STREAM_METHODS, SUBSCRIPTION_ID_META_KEY
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.applications import Starlette
from starlette.authentication import AuthenticationBackend
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from perdure._core.envelope import SUBSCRIPTION
from perdure._core.jsonrpc import coerce_id
from perdure._core.listening import LISTS, METHODS, URIS, ChangeFilter
from perdure._core.revisions import REVISIONS, is_sessionless
from perdure.runtime.hosted import authenticates, endpoint_of
from perdure.runtime.own_requests import SdkChanges
from perdure.runtime.sdk import SdkRuntime
from perdure.runtime.server import host
from perdure.settings import Settings

pytestmark = pytest.mark.anyio


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def moved(seam: str, used_by: str) -> str:
    return f"the seam {seam} has moved; {used_by} leans on it"


@pytest.mark.parametrize("value", [8, "8", " 8 ", "+8", "08", "8.0", "", "a", "-3", "٣", "1_0", 0, -1])
def test_we_compare_ids_as_the_sdk_does(value: Any) -> None:
    assert coerce_id(value) == coerce_request_id(value), moved("coerce_request_id", "_core/jsonrpc.py")


# --- Messages and metadata


def test_metadata_carries_what_a_transport_tells() -> None:
    names = {field.name for field in dataclasses.fields(ServerMessageMetadata)}
    wanted = {
        "request_context",
        "close_sse_stream",
        "close_standalone_sse_stream",
        "can_send_request",
    }
    assert wanted <= names, moved(f"ServerMessageMetadata.{wanted - names}", "runtime/sdk.py")


# --- The connection and the server


def test_a_connection_is_built_from_what_is_recorded() -> None:
    names = parameters(Connection.__init__)
    wanted = {"outbound", "protocol_version", "session_id", "client_params"}
    assert wanted <= set(names), moved("Connection(…)", "runtime/sdk.py")
    assert {"outbound", "session_id"} <= set(parameters(Connection.for_loop)), moved("Connection.for_loop", "sdk.py")


async def test_a_restored_connection_knows_its_client_and_is_initialized() -> None:
    recorded = {
        "protocolVersion": "2025-06-18",
        "capabilities": {"sampling": {}},
        "clientInfo": {"name": "c", "version": "1"},
    }
    params = mcp_types.InitializeRequestParams.model_validate(recorded, by_name=False)
    connection = Connection(None, protocol_version="2025-06-18", session_id="s", client_params=params)  # type: ignore[arg-type]
    assert connection.initialize_accepted
    connection.initialized.set()
    assert connection.client_capabilities is not None
    assert connection.client_capabilities.sampling is not None
    assert connection.state == {}, moved("Connection.state", "Runtime.keeps_state")


def test_a_runner_takes_a_server_a_connection_and_the_lifespans_state() -> None:
    names = list(parameters(ServerRunner))
    assert names[:3] == ["server", "connection", "lifespan_state"], moved("ServerRunner(server, …)", "Runtime")
    assert list(parameters(aclose_shielded)) == ["connection"], moved("aclose_shielded(connection)", "Runtime")


def test_a_connection_sends_through_two_methods_of_ours() -> None:
    members = {name for name in dir(Outbound) if not name.startswith("_")}
    assert members <= set(dir(SdkRuntime)), moved(f"Outbound.{members - set(dir(SdkRuntime))}", "SdkRuntime")


def test_a_runner_has_a_callback_for_requests_and_one_for_notifications() -> None:
    runner = ServerRunner(Server("s"), Connection(None, protocol_version="2025-06-18"), None)  # type: ignore[arg-type]
    assert callable(runner.on_request), moved("ServerRunner.on_request", "Runtime")
    assert callable(runner.on_notify), moved("ServerRunner.on_notify", "Runtime")
    assert {"on_request", "on_notify"} <= set(vars(runner)), moved("ServerRunner's cached callbacks", "SdkRuntime._end")
    for callback in (runner.on_request, runner.on_notify):
        assert list(parameters(callback)) == ["dctx", "method", "params"], moved("ServerRunner.on_request", "Runtime")
    error = handler_exception_to_error_data(MCPError(code=7, message="no"))
    assert error is not None, moved("handler_exception_to_error_data", "runtime/sdk.py")
    assert handler_exception_to_error_data(LookupError()) is None
    assert MCPError(code=7, message="no").error.code == 7, moved("MCPError.error", "runtime/own_requests.py")


def test_a_servers_lifespan_is_an_attribute_that_a_copy_may_replace() -> None:
    server: Server[Any] = Server("x")
    twin = copy.copy(server)
    twin.lifespan = lambda _: None  # type: ignore[assignment, return-value]
    assert server.lifespan is not twin.lifespan, moved("Server.lifespan", "runtime/server.py")
    assert twin.middleware is server.middleware


# --- Web applications


def test_mcpserver_gives_its_web_application_and_the_server_behind_it() -> None:
    server = MCPServer("x")
    web = server.streamable_http_app(streamable_http_path="/here")
    assert isinstance(web, Starlette)
    assert isinstance(server.session_manager.app, Server), moved("MCPServer.session_manager.app", "host()")
    [route] = [route for route in web.routes if isinstance(route, Route) and route.path == "/here"]
    assert isinstance(route.endpoint, StreamableHTTPASGIApp)
    assert route.endpoint.session_manager is server.session_manager, moved("StreamableHTTPASGIApp", "endpoint_of()")
    assert endpoint_of(web) is route.endpoint


async def test_the_sdks_endpoint_calls_whatever_stands_in_for_its_session_manager() -> None:
    web = MCPServer("x").streamable_http_app()
    called = []

    class Stand:
        async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
            called.append(scope["path"])

    endpoint = endpoint_of(web)
    endpoint.session_manager = Stand()
    await endpoint({"type": "http", "path": "/mcp", "method": "POST", "headers": []}, None, None)
    assert called == ["/mcp"], moved("StreamableHTTPASGIApp → session_manager.asgi_app", "App.lifespan()")


def test_the_sessionless_handler_takes_these_options() -> None:
    names = set(parameters(StreamableHTTPSessionManager.__init__))
    wanted = {"app", "stateless", "json_response", "max_request_body_size"}
    assert wanted <= names, moved("StreamableHTTPSessionManager(…)", "runtime/server.py")
    assert callable(StreamableHTTPSessionManager.handle_request)
    assert callable(StreamableHTTPSessionManager.run)


async def test_fastmcp_keeps_its_endpoint_in_its_web_application() -> None:
    """Inside the lifespan its session manager is set, and the low-level server is behind it."""
    web = FastMCP("x").http_app(path="/here")
    endpoint = endpoint_of(web)
    assert hasattr(endpoint, "session_manager"), moved("FastMCP's StreamableHTTPASGIApp", "endpoint_of()")
    async with web.router.lifespan_context(web):
        assert isinstance(endpoint.session_manager.app, Server), moved("session_manager.app", "_host_fastmcp()")


async def test_fastmcps_endpoint_calls_whatever_stands_in_for_its_session_manager() -> None:
    web = FastMCP("x").http_app()
    called = []

    class Stand:
        async def handle_request(self, scope: Any, receive: Any, send: Any) -> None:
            called.append(scope["path"])

    endpoint = endpoint_of(web)
    endpoint.session_manager = Stand()
    await endpoint({"type": "http", "path": "/mcp", "method": "POST", "headers": []}, None, None)
    assert called == ["/mcp"], moved("FastMCP's StreamableHTTPASGIApp → handle_request", "App.lifespan()")


@pytest.mark.parametrize("server", [MCPServer(), FastMCP()], ids=["MCPServer", "FastMCP"])
def test_a_server_without_a_name_has_a_default_that_we_know(server: Any) -> None:
    assert host(server, Settings(), path="/mcp").name == "", moved(f"the default name {server.name}", "host()")


# --- Auth


def test_a_web_application_lists_its_middleware() -> None:
    web = MCPServer("x").streamable_http_app()
    assert not authenticates(web)
    guarded = Starlette(
        routes=web.routes, middleware=[Middleware(AuthenticationMiddleware, backend=AuthenticationBackend())]
    )
    assert authenticates(guarded), moved("Starlette.user_middleware", "authenticates()")


def test_a_principal_is_client_issuer_and_subject() -> None:
    token = AccessToken(token="t", client_id="c", scopes=[], subject="s")
    other = AccessToken(token="another", client_id="c", scopes=["more"], subject="s")
    assert principal_components(token) == principal_components(other), moved("principal_components", "principal_of()")
    assert principal_components(token) != principal_components(AccessToken(token="t", client_id="c", scopes=[]))
    assert AuthenticatedUser(token).access_token is token, moved("AuthenticatedUser.access_token", "principal_of()")


def test_a_tool_s_token_is_that_of_the_user_in_the_context() -> None:
    first, second = (AccessToken(token=text, client_id="c", scopes=[]) for text in ("first", "second"))
    user = AuthenticatedUser(first)
    undo = auth_context_var.set(user)
    try:
        user.access_token = second
        assert get_access_token() is second, moved("auth_context_var, AuthenticatedUser.access_token", "renew()")
    finally:
        auth_context_var.reset(undo)


def test_the_parts_of_the_sdks_bearer_auth_are_there() -> None:
    assert "token_verifier" in parameters(BearerAuthBackend.__init__), moved("BearerAuthBackend", "App")
    assert list(parameters(RequireAuthMiddleware.__init__))[1:3] == ["app", "required_scopes"]
    assert list(parameters(AuthContextMiddleware.__init__))[1] == "app"


# --- Revisions


def test_we_know_every_revision_that_the_sdk_negotiates() -> None:
    assert set(HANDSHAKE_PROTOCOL_VERSIONS) == set(REVISIONS), "the SDK serves other revisions with sessions than we do"
    assert all(is_sessionless(version) for version in MODERN_PROTOCOL_VERSIONS)
    assert not any(is_sessionless(version) for version in HANDSHAKE_PROTOCOL_VERSIONS)


# --- uvicorn


def test_the_http_protocol_of_uvicorn_can_be_watched() -> None:
    hooks = ["connection_made", "connection_lost", "data_received"]
    for name in [*hooks, "on_message_begin", "on_headers_complete", "on_response_complete"]:
        assert callable(getattr(HttpToolsProtocol, name, None)), moved(f"HttpToolsProtocol.{name}", "listener.py")


async def test_uvicorn_keeps_the_state_of_a_response_where_we_look_for_it() -> None:
    arguments = dict.fromkeys(list(parameters(RequestResponseCycle.__init__))[1:], None)
    cycle = RequestResponseCycle(**arguments)  # type: ignore[arg-type]
    for name in ("response_complete", "disconnected", "more_body", "message_event"):
        assert hasattr(cycle, name), moved(f"RequestResponseCycle.{name}", "listener.py")
    config = uvicorn.Config(_nothing, interface="asgi3", log_config=None, h11_max_incomplete_event_size=7)
    assert config.h11_max_incomplete_event_size == 7, moved("Config.h11_max_incomplete_event_size", "listener.py")
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {})
    for name in ("cycle", "loop", "transport", "flow"):
        assert hasattr(protocol, name), moved(f"HttpToolsProtocol.{name}", "listener.py")


async def _nothing(scope: object, receive: object, send: object) -> None:
    pass


def test_request_state_is_sealed_by_a_part_of_the_public_list_of_middleware() -> None:
    """`perdure.runtime.request_state` puts another one in its place, on a copy of the server."""
    server = MCPServer("seam")
    server.streamable_http_app()
    lowlevel = server.session_manager.app
    told = moved("Server.middleware", "perdure.runtime.request_state")
    assert [type(part) for part in lowlevel.middleware].count(RequestStateBoundary) == 1, told
    assert list(parameters(RequestStateBoundary.__init__)) == ["self", "security", "default_audience"], told
    assert {"keys", "codec"} <= set(parameters(RequestStateSecurity)), told
    codec = AESGCMRequestStateCodec([bytes(32), bytes([1]) * 32])
    assert AESGCMRequestStateCodec([bytes([1]) * 32, bytes(32)]).unseal(codec.seal(b"state")) == b"state", told


# --- Listening


async def test_a_request_to_listen_can_be_served_in_this_process_on_a_dispatch_context_of_ours() -> None:
    """`perdure.runtime.own_requests` hears what the server publishes, on whatever bus it has."""
    told = moved("serve_one, DispatchContext", "perdure.runtime.own_requests")
    assert list(parameters(serve_one)) == ["server", "dctx", "method", "params", "connection", "lifespan_state"], told
    assert [name for name in dir(DispatchContext) if not name.startswith("_")] == [
        "can_send_request",
        "cancel_requested",
        "message_metadata",
        "notify",
        "progress",
        "request_id",
        "send_raw_request",
        "transport",
    ], told
    bus = InMemorySubscriptionBus()
    server: Server[Any] = Server("seam", on_subscriptions_listen=ListenHandler(bus))
    honoured: list[ChangeFilter] = []
    heard: list[tuple[str, Any]] = []

    async def hear(method: str, params: Any) -> None:
        heard.append((method, params["uri"]))

    changes = SdkChanges(server=server, lifespan_state=None)
    async with anyio.create_task_group() as group:
        listen = functools.partial(changes.listen, ["a:b"], on_acknowledged=honoured.append, on_notification=hear)
        group.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        assert [one.wire for one in honoured] == [{**dict.fromkeys(LISTS, True), URIS: ["a:b"]}], told
        await bus.publish(ResourceUpdated(uri="a:b"))
        await bus.publish(ResourceUpdated(uri="a:c"))
        await anyio.wait_all_tasks_blocked()
        assert heard == [("notifications/resources/updated", "a:b")], told
        group.cancel_scope.cancel()


def test_requests_without_a_session_are_checked_by_public_functions_of_the_sdk() -> None:
    """`perdure.http.listening` leaves to the SDK's handler what they refuse, so both must be of one mind."""
    for name in ("classify_inbound_request", "find_duplicated_routing_header", "InboundModernRoute"):
        assert name in inbound.__all__, moved(name, "http/listening.py")
    assert LISTEN_STREAM_METHODS == METHODS, moved("LISTEN_STREAM_METHODS", "perdure._core.listening")
    assert SUBSCRIPTION_ID_META_KEY == SUBSCRIPTION
