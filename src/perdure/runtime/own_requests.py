"""Makes requests of this process to its own server: lists its tools as each caller sees them, and listens to it.

The SDK's public `serve_one` runs the server's handler on a dispatch context of ours, without a client. So the process
hears the server's changes on any bus, without touching the bus.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import serve_one
from mcp.shared.dispatcher import CallOptions, Outbound
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import MessageMetadata, ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    METHOD_NOT_FOUND,
    PROTOCOL_VERSION_META_KEY,
    SERVER_INFO_META_KEY,
    InitializeRequestParams,
    RequestId,
)
from mcp_types.version import LATEST_MODERN_VERSION
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from perdure._core.durable_calls import CallClient
from perdure._core.early_answers import RESUMES
from perdure._core.envelope import LISTEN
from perdure._core.jsonrpc import JsonObject
from perdure._core.listening import ACKNOWLEDGED, LISTS, URIS, ChangeFilter, read_honoured
from perdure._core.pages import Cursors
from perdure.runtime.base import NoListening

NAME = "perdure"
"""The id of a request of this process, and the name of its client."""

OnNotification = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


@dataclass(slots=True, eq=False)
class OwnRequestContext:
    """The SDK's `DispatchContext` of a request of this process: takes its notifications, or drops them."""

    _on_notification: OnNotification | None = None
    transport: TransportContext = field(default=TransportContext(kind="perdure", can_send_request=False))
    message_metadata: MessageMetadata = None
    can_send_request: bool = False
    request_id: RequestId | None = NAME
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        if self._on_notification is not None:
            await self._on_notification(method, params)

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """The request brings no progress token."""


def http_request(origin: object, session: str = "") -> HttpRequest:
    """The HTTP request of a message. A message without one (a repeated sticky request, a call that runs again, mail)
    gets a request without credentials."""
    if isinstance(origin, HttpRequest):
        return origin
    headers = [(b"mcp-session-id", session.encode())] if session else []
    return HttpRequest({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers})


async def pages(
    server: Server[Any],
    lifespan_state: object,
    method: str,
    context: OwnRequestContext,
    connect: Callable[[], Connection],
    params: Mapping[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    cursors = Cursors()
    while True:
        page = await serve_one(server, context, method, params, connection=connect(), lifespan_state=lifespan_state)
        cursor = cursors.after(page)
        yield page
        if cursor is None:
            return
        params = {**params, "cursor": cursor}


# --- The lists of tools

KEEP_SECONDS = 60.0
"""The age at which a list is read again. A tool rarely changes its description, and each call would list all tools
otherwise. The old list counts until the new one has come."""

WAIT_SECONDS = 1.0
"""Seconds for which a call waits for a list, from its request on: longer than a server takes that reads its tools from
elsewhere, and short for a user. After that the tool is served as one without a description."""

READ_SECONDS = 60.0
"""Seconds that reading a list may take, before it is given up and read again. As long as a list counts."""

READ_AGAIN_SECONDS = 1.0
"""The age at which a list without the tool is read again, because the tool may be new. Callers that make up names cause
no more reads than this."""

MAX_OWNERS = 256
"""Callers whose lists are kept, the most recent ones."""

LISTED_AS = "2025-11-25"
"""The revision in which tools are listed: the last one in which the SDK lists a tool's `execution`, which declares
whether the tool runs as a task."""

_logger = logging.getLogger("perdure")


@dataclass(slots=True)
class _Listed:
    """The last known tools of one caller."""

    tools: Mapping[str, JsonObject] = field(default_factory=dict)
    since: float = -math.inf
    """When the list was last requested."""
    reading: asyncio.Task[None] | None = None


class ToolCatalog:
    """Keeps the lists of tools of one server, by caller: the `Tools` of a server in this process."""

    def __init__(self, server: Server[Any], lifespan_state: object) -> None:
        self._server = server
        self._lifespan_state = lifespan_state
        self._lists: OrderedDict[str, _Listed] = OrderedDict()

    @property
    def serves_tasks(self) -> bool:
        return self._server.get_request_handler("tasks/get") is not None

    @property
    def server_info(self) -> JsonObject:
        info: JsonObject = {SERVER_INFO_META_KEY: self._server.server_info_stamp}
        return info

    async def tool(self, name: str, owner: str, client: CallClient, origin: HttpRequest) -> JsonObject | None:
        listed = self._listed(owner)
        await self._refresh(listed, client, origin, is_known=name in listed.tools)
        return listed.tools.get(name)

    async def tools(self, owner: str, client: CallClient, origin: HttpRequest) -> Sequence[JsonObject]:
        listed = self._listed(owner)
        await self._refresh(listed, client, origin, is_known=listed.since > -math.inf and listed.reading is None)
        return list(listed.tools.values())

    def _listed(self, owner: str) -> _Listed:
        if (listed := self._lists.get(owner)) is None:
            listed = self._lists[owner] = _Listed()
            if len(self._lists) > MAX_OWNERS:
                self._lists.popitem(last=False)
        self._lists.move_to_end(owner)
        return listed

    async def _refresh(self, listed: _Listed, client: CallClient, origin: HttpRequest, *, is_known: bool) -> None:
        """Read a list again that is old. What is not known is waited for, for some time."""
        now = asyncio.get_running_loop().time()
        age = now - listed.since
        if listed.reading is None and age >= (KEEP_SECONDS if is_known else READ_AGAIN_SECONDS):
            age, listed.since = 0.0, now
            listed.reading = asyncio.create_task(self._read(listed, client, origin), name="perdure-tools")
        if not is_known and listed.reading is not None:
            await asyncio.wait({listed.reading}, timeout=max(0.0, WAIT_SECONDS - age))

    async def _read(self, listed: _Listed, client: CallClient, origin: HttpRequest) -> None:
        """Read a list. If the server fails, the last known tools stay."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                listed.tools = await list_tools(self._server, self._lifespan_state, client, origin)
        except Exception:
            _logger.exception("the server did not list its tools", extra={"action": "tools.unlisted"})
        finally:
            listed.reading = None


async def list_tools(
    server: Server[Any], lifespan_state: object, client: CallClient, origin: HttpRequest
) -> Mapping[str, JsonObject]:
    """The tools that `tools/list` shows a client, by name. The list is read with the credentials of `origin`."""
    tools: dict[str, JsonObject] = {}
    if server.get_request_handler("tools/list") is None:
        return tools
    context = OwnRequestContext(
        transport=TransportContext(kind="streamable-http", can_send_request=False, headers=origin.headers),
        message_metadata=ServerMessageMetadata(request_context=origin),
    )
    try:
        told = initialize_params(client, LISTED_AS)
    except ValidationError:
        # The call of a client that describes itself wrongly is refused when it runs. The list counts for other clients
        # of the same caller as well.
        told = initialize_params(CallClient(version="", info=None, capabilities={}), LISTED_AS)
    connect = partial(connect_session, context, told)
    with _as_caller(origin):
        async for page in pages(server, lifespan_state, "tools/list", context, connect, {}):
            tools |= {str(tool.get("name")): tool for tool in page.get("tools", ())}
    return tools


@contextmanager
def _as_caller(origin: HttpRequest) -> Iterator[None]:
    """Show handlers the access token of a request, also where another task than that of the request asks."""
    user = origin.scope.get("user")
    if user is not None:
        from mcp.server.auth.middleware.auth_context import auth_context_var
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser

        if isinstance(user, AuthenticatedUser):
            before = auth_context_var.set(user)
            try:
                yield
            finally:
                auth_context_var.reset(before)
            return
    yield


def initialize_params(client: CallClient, version: str) -> InitializeRequestParams:
    """The params with which a client of a durable call would have opened a session."""
    info = client.info or {"name": "unknown", "version": ""}
    told = {"protocolVersion": version, "capabilities": client.capabilities, "clientInfo": info}
    return InitializeRequestParams.model_validate(told, by_name=False)


def connect_session(outbound: Outbound, told: InitializeRequestParams) -> Connection:
    """A connection that is initialized, as in a session."""
    connection = Connection(outbound, protocol_version=told.protocol_version, client_params=told)
    connection.initialized.set()
    return connection


# --- Changes

_READ_BY = {
    "notifications/tools/list_changed": ("tools/list",),
    "notifications/prompts/list_changed": ("prompts/list",),
    "notifications/resources/list_changed": ("resources/list", "resources/templates/list"),
}
"""The requests that a client reads a list by, by the notification that the list has changed."""

_INFO = {"name": NAME, "version": "1"}
_META = {
    PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
    CLIENT_CAPABILITIES_META_KEY: {"experimental": {RESUMES: {}}},
    CLIENT_INFO_META_KEY: _INFO,
}


def _connect() -> Connection:
    return Connection.from_envelope(LATEST_MODERN_VERSION, _INFO, {})


@dataclass(frozen=True, kw_only=True)
class SdkChanges:
    server: Server[Any]
    lifespan_state: Any
    may_be_silent: bool = False
    may_recover = False
    acknowledges_within = 5.0
    """The server is in this process, and has nothing to wait for."""

    async def listen(
        self, uris: Sequence[str], *, on_acknowledged: Callable[[ChangeFilter], None], on_notification: OnNotification
    ) -> None:
        acknowledged = False

        async def take(method: str, params: Mapping[str, Any] | None) -> None:
            nonlocal acknowledged
            if method == ACKNOWLEDGED:
                acknowledged = True
                on_acknowledged(read_honoured((params or {}).get("notifications") or {}))
            else:
                await on_notification(method, params)

        wanted: dict[str, Any] = dict.fromkeys(LISTS, True)
        if uris:
            wanted[URIS] = list(uris)
        context = OwnRequestContext(take)
        try:
            await serve_one(
                self.server,
                context,
                LISTEN,
                {"notifications": wanted, "_meta": _META},
                connection=_connect(),
                lifespan_state=self.lifespan_state,
            )
        except MCPError as error:
            if error.error.code == METHOD_NOT_FOUND:
                raise NoListening from None
            raise
        if not acknowledged:
            raise RuntimeError("the server answered subscriptions/listen without an acknowledgement")

    async def digest(self, method: str) -> bytes | None:
        digest = hashlib.sha256()
        for request in _READ_BY[method]:
            if self.server.get_request_handler(request) is not None:
                async for page in pages(
                    self.server, self.lifespan_state, request, OwnRequestContext(), _connect, {"_meta": _META}
                ):
                    page.pop("_meta", None)
                    digest.update(json.dumps(page, sort_keys=True).encode())
            digest.update(b"\0")
        return digest.digest()
