"""What the official SDK and FastMCP do with an event store, run beside Perdure, so that docs/comparison.md stays true.

The store outlives the application object, as one in a database outlives a process; a new object is a restart.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from fastmcp import FastMCP
from fastmcp.server.event_store import EventStore as FastEvents
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage
from starlette.types import ASGIApp

import perdure
from tests.support.servers.in_process import under_uvicorn

pytestmark = pytest.mark.anyio

ACCEPT = {"Accept": "application/json, text/event-stream"}
VERSION = {"MCP-Protocol-Version": "2025-11-25"}
HANDSHAKE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "me", "version": "1"}}
SECRET = "the safe opens at 7-3-9"

Start = Callable[[], AbstractAsyncContextManager[httpx2.AsyncClient]]


class Events(EventStore):
    """The store of the SDK's own documentation: events by their ids."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.events: dict[str, tuple[str, JSONRPCMessage | None]] = {}

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        number = str(next(self.numbers))
        self.events[number] = (stream_id, message)
        return number

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        if last_event_id not in self.events:
            return None
        stream_id = self.events[last_event_id][0]
        for number, (stream, message) in self.events.items():
            if stream == stream_id and int(number) > int(last_event_id) and message is not None:
                await send_callback(EventMessage(message, number))
        return stream_id


def secret() -> str:
    return SECRET


def a_server() -> MCPServer:
    server = MCPServer("bank", log_level="CRITICAL")
    server.add_tool(secret)
    return server


@asynccontextmanager
async def asking(app: ASGIApp) -> AsyncIterator[httpx2.AsyncClient]:
    async with under_uvicorn(app, complaint=".*") as port, httpx2.AsyncClient() as http:
        http.base_url = f"http://127.0.0.1:{port}"
        yield http


def the_sdk() -> Start:
    events = Events()
    return lambda: asking(a_server().streamable_http_app(event_store=events))


def fastmcp_itself() -> Start:
    """FastMCP with its own event store."""
    events = FastEvents()

    def start() -> AbstractAsyncContextManager[httpx2.AsyncClient]:
        server = FastMCP("bank")
        server.tool(secret)
        return asking(server.http_app(event_store=events))

    return start


def perdure_on(folder: Path) -> Start:
    return lambda: asking(perdure.asgi(a_server(), store=f"sqlite:{folder / 'store.db'}"))


async def post(http: httpx2.AsyncClient, session: str, id: int, method: str, **params: object) -> httpx2.Response:  # noqa: A002
    headers = {**ACCEPT, **({**VERSION, "Mcp-Session-Id": session} if session else {})}
    return await http.post(
        "/mcp", json={"jsonrpc": "2.0", "id": id, "method": method, "params": params}, headers=headers
    )


async def join(http: httpx2.AsyncClient) -> str:
    opened = await post(http, "", 1, "initialize", **HANDSHAKE)
    session: str = opened.headers["mcp-session-id"]
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    await http.post("/mcp", json=ready, headers={**ACCEPT, **VERSION, "Mcp-Session-Id": session})
    return session


def first_position(answer: httpx2.Response) -> str:
    return next(line.removeprefix("id: ") for line in answer.text.splitlines() if line.startswith("id: "))


async def resumed(http: httpx2.AsyncClient, session: str, position: str) -> tuple[int, str]:
    """Status and text of a GET from this position, until the secret or the end."""
    headers = {"Accept": "text/event-stream", **VERSION, "Mcp-Session-Id": session, "Last-Event-ID": position}
    said = ""
    async with http.stream("GET", "/mcp", headers=headers) as answer:
        async for chunk in answer.aiter_text():
            said += chunk
            if SECRET in said:
                break
    return answer.status_code, said


async def after_a_restart(start: Start) -> int:
    async with start() as http:
        session = await join(http)
    async with start() as http:
        return (await post(http, session, 2, "tools/list")).status_code


async def test_a_session_survives_a_restart_with_perdure_and_not_with_an_event_store(tmp_path: Path) -> None:
    assert await after_a_restart(the_sdk()) == 404
    assert await after_a_restart(fastmcp_itself()) == 404
    assert await after_a_restart(perdure_on(tmp_path)) == 200


async def with_anothers_position(start: Start) -> tuple[int, str]:
    async with start() as http:
        alice, bob = await join(http), await join(http)
        answer = await post(http, alice, 2, "tools/call", name="secret", arguments={})
        assert SECRET in answer.text
        return await resumed(http, bob, first_position(answer))


async def test_the_position_of_another_session_gives_its_result_from_the_sdk_and_nothing_from_perdure(
    tmp_path: Path,
) -> None:
    status, said = await with_anothers_position(the_sdk())
    assert (status, SECRET in said) == (200, True)
    status, said = await with_anothers_position(fastmcp_itself())
    assert (status, SECRET in said) == (200, False)
    status, said = await with_anothers_position(perdure_on(tmp_path))
    assert (status, SECRET in said) == (400, False)


async def with_a_lost_position(start: Start, position: str) -> tuple[int, bool]:
    async with start() as http:
        status, said = await resumed(http, await join(http), position)
        return status, "-31002" in said


async def test_a_position_that_is_gone_is_told_by_perdure_and_silent_with_the_sdk(tmp_path: Path) -> None:
    assert await with_a_lost_position(the_sdk(), "12345") == (200, False)
    assert await with_a_lost_position(fastmcp_itself(), "12345") == (200, False)
    gone = "cANyW1TsmHBNxu5K91e_dOg.000001.0000000001"
    assert await with_a_lost_position(perdure_on(tmp_path), gone) == (400, True)
