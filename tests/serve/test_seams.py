"""What `serve` takes for granted of uvicorn and uvicorn does not document. A release that moves one of these fails
here, by its name; then `pyproject.toml`'s range says which releases are good."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from perdure.serve.connection import Connection
from perdure.serve.listener import listen

pytestmark = pytest.mark.anyio

CYCLE = ("response_complete", "response_started", "keep_alive", "more_body", "disconnected", "message_event")
CONNECTION = ("cycle", "pipeline", "flow", "transport", "loop", "timeout_keep_alive_task", "scope", "config")
CALLED_BACK = (
    *("connection_made", "connection_lost", "data_received"),
    *("on_message_begin", "on_headers_complete", "on_response_complete", "shutdown"),
)
SERVER = ("server_state", "config", "lifespan", "servers", "started", "should_exit", "force_exit")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"there"})


def missing(thing: object, *names: str) -> list[str]:
    return [name for name in names if not hasattr(thing, name)]


async def test_a_server_and_its_connections_have_the_fields_that_serve_uses() -> None:
    config = uvicorn.Config(app, http=Connection, lifespan="off", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    listener = listen("127.0.0.1", 0)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"there")
        assert missing(server, *SERVER) == []
        assert missing(server.server_state, "connections", "default_headers") == []
        assert missing(config, "encoded_headers", "h11_max_incomplete_event_size") == []
        assert missing(server.lifespan, "state", "shutdown", "should_exit") == []
        [connection] = server.server_state.connections
        assert isinstance(connection, Connection)
        assert missing(connection, *CONNECTION) == []
        assert missing(connection.flow, "pause_reading", "resume_reading") == []
        assert isinstance(connection.cycle, RequestResponseCycle)
        assert missing(connection.cycle, *CYCLE) == []
        assert connection.cycle.response_complete, "uvicorn says otherwise when a response is complete"
    finally:
        writer.close()
        server.should_exit = True
        await running


def test_uvicorn_calls_back_what_serve_overrides() -> None:
    assert missing(HttpToolsProtocol, *CALLED_BACK) == []
    assert missing(uvicorn.Server, "startup", "shutdown", "handle_exit") == []


async def test_an_app_that_does_not_start_ends_uvicorn_s_startup() -> None:
    """Before 0.50 it returned from there, and the server would have said that it serves."""

    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no wind"})

    server = uvicorn.Server(uvicorn.Config(fails, lifespan="on", ws="none", log_config=None))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with pytest.raises(SystemExit):
        await server.startup()
