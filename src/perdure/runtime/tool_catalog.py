"""Knows what the server says of its tools, as each caller is shown them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import SERVER_INFO_META_KEY, InitializeRequestParams
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from perdure._core.durable_calls import Client
from perdure._core.jsonrpc import JsonObject
from perdure.runtime.own_requests import OwnRequestContext, pages

KEEP_SECONDS = 60.0
"""How old a list may be before it is read again. A tool rarely changes what it says of itself, and each call would list
them all otherwise. The old list counts until the new one is there."""

WAIT_SECONDS = 1.0
"""How long a list that is not there yet is waited for, from its request on: longer than a server takes that looks its
tools up elsewhere, and short for a user. After that its tools are served as those that say nothing of themselves."""

READ_SECONDS = 60.0
"""How long a list may take to come; one that hangs is given up, and read again. As long as a list counts."""

LOOK_AGAIN_SECONDS = 1.0
"""A tool that is not in a list of this age is looked for again: it may be new. Callers that make names up cause no more
lists than this."""

MAX_OWNERS = 256
"""Lists that are kept, of as many callers; those that have not called for longest go first."""

LISTED_AS = "2025-11-25"
"""The revision in which tools are listed: the last one in which a tool says whether it runs as a task. The SDK leaves
`execution` out of the lists of later revisions."""

_UNKNOWN = {"name": "unknown", "version": ""}
"""A client that does not say what it is."""

_logger = logging.getLogger("perdure")


@dataclass(slots=True)
class _Listed:
    """The tools that one caller is shown, as far as they are known."""

    tools: Mapping[str, JsonObject] = field(default_factory=dict)
    since: float = -math.inf
    """When the list was asked for last."""
    reading: asyncio.Task[None] | None = None


class ToolCatalog:
    """The lists of tools of one server, by caller."""

    def __init__(self, server: Server[Any], lifespan_state: object) -> None:
        self._server = server
        self._lifespan_state = lifespan_state
        self._lists: OrderedDict[str, _Listed] = OrderedDict()

    @property
    def serves_tasks(self) -> bool:
        """The server answers the tasks extension by itself."""
        return self._server.get_request_handler("tasks/get") is not None

    @property
    def server_info(self) -> JsonObject:
        """What results of this server say of it in their `_meta`."""
        info: JsonObject = {SERVER_INFO_META_KEY: self._server.server_info_stamp}
        return info

    async def tool(self, name: str, owner: str, client: Client, origin: HttpRequest) -> JsonObject | None:
        """A tool as the caller's `tools/list` shows it; `None` if it does not, or not in time."""
        now = asyncio.get_running_loop().time()
        listed = self._lists.get(owner) or self._add(owner)
        self._lists.move_to_end(owner)
        age = now - listed.since
        if listed.reading is None and age >= (KEEP_SECONDS if name in listed.tools else LOOK_AGAIN_SECONDS):
            age, listed.since = 0.0, now
            listed.reading = asyncio.create_task(self._read(listed, client, origin), name="perdure-tools")
        if name not in listed.tools and listed.reading is not None:
            await asyncio.wait({listed.reading}, timeout=max(0.0, WAIT_SECONDS - age))
        return listed.tools.get(name)

    def _add(self, owner: str) -> _Listed:
        listed = self._lists[owner] = _Listed()
        if len(self._lists) > MAX_OWNERS:
            self._lists.popitem(last=False)
        return listed

    async def _read(self, listed: _Listed, client: Client, origin: HttpRequest) -> None:
        """Read a list. If the server fails, what is known of its tools stays."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                listed.tools = await self._pages(client, origin)
        except Exception:
            _logger.exception("the server did not list its tools", extra={"action": "tools.unlisted"})
        finally:
            listed.reading = None

    async def _pages(self, client: Client, origin: HttpRequest) -> Mapping[str, JsonObject]:
        tools: dict[str, JsonObject] = {}
        if self._server.get_request_handler("tools/list") is None:
            return tools
        context = OwnRequestContext(
            transport=TransportContext(kind="streamable-http", can_send_request=False, headers=origin.headers),
            message_metadata=ServerMessageMetadata(request_context=origin),
        )
        told = _initialize_params(client)

        def connect(context: OwnRequestContext) -> Connection:
            connection = Connection(context, protocol_version=LISTED_AS, client_params=told)
            connection.initialized.set()
            return connection

        async for page in pages(self._server, self._lifespan_state, "tools/list", context, connect, {}):
            tools |= {str(tool.get("name")): tool for tool in page.get("tools", ())}
        return tools


def _initialize_params(client: Client) -> InitializeRequestParams:
    """What the client would have said of itself at the beginning of a session. One that describes itself wrongly is
    refused when its call runs; the list counts for other clients of the same caller as well."""
    info = client.info or _UNKNOWN
    told = {"protocolVersion": LISTED_AS, "capabilities": client.capabilities, "clientInfo": info}
    try:
        return InitializeRequestParams.model_validate(told, by_name=False)
    except ValidationError:
        told |= {"capabilities": {}, "clientInfo": _UNKNOWN}
        return InitializeRequestParams.model_validate(told, by_name=False)
