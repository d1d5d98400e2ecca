"""A Perdure application under uvicorn, in the test's own process and event loop, on a free port of the loopback.

What must not happen in silence (an error in a log, an exception that no task's owner has read) fails the test, unless
the test has declared that it expects it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.auth.provider import TokenVerifier
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from starlette.types import ASGIApp

import perdure
from perdure import App, Settings
from perdure.gateway.host import host_upstream
from perdure.serve.connection import Connection
from perdure.serve.listener import listen
from perdure.sessions.registry import SessionInfo
from perdure.store import MemoryStore
from perdure.store.interface import Store
from tests.support.clients.wire_client import Peer, Web, Wire
from tests.support.servers.behind_gateway import IS_EVERYWHERE, upstream_over_stdio
from tests.support.stores.shared_store import SharedStore

#: Bytes that the system may keep of what we send, for tests of clients that do not read.
SMALL_BUFFER = 8192
#: Seconds in which the requests that still run at a test's end must end; that they do not is a complaint.
STOP_SECONDS = 30
#: Seconds between two reads of a state. They grow, because frequent reads take the time that the state needs to come.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.01


class Site(Web):
    """An application that answers, with the parts that tests read directly."""

    def __init__(self, app: App, store: Store, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}{app.path}")
        self.app = app
        self.store = store
        self.port = port


@asynccontextmanager
async def serve(
    server: object,
    *,
    store: Store | None = None,
    auth: TokenVerifier | None = None,
    path: str = "/mcp",
    small_buffers: bool = False,
    complaint: str | None = None,
    behind_gateway: bool = IS_EVERYWHERE,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Serve an MCP server; settings by their names. `complaint` is a pattern of errors that the test expects.

    Without a store of its own a test runs on one in memory; with PERDURE_TEST_STORE=sqlite or postgres on one in a
    file, or in a schema of a PostgreSQL server.
    """
    settings.setdefault("store_timeout", 20.0)  # a busy machine is not a failing store
    settings.setdefault("heartbeat", 0.0)  # and what a tool said is compared with what its client was sent
    with tempfile.TemporaryDirectory() as folder:
        if store is None:
            stays = os.environ.get("PERDURE_TEST_STORE") in ("sqlite", "postgres")
            store = SharedStore(f"{folder}/log.db") if stays else MemoryStore()
        async with contextlib.AsyncExitStack() as stack:
            if behind_gateway and isinstance(server, MCPServer | Server):
                upstream = await stack.enter_async_context(upstream_over_stdio(server, Path(folder)))
                server = host_upstream(upstream, Settings(**settings))
            app = perdure.asgi(server, store=store, settings=Settings(**settings), auth=auth, path=path)
            port = await stack.enter_async_context(under_uvicorn(app, small_buffers=small_buffers, complaint=complaint))
            site = Site(app, store, port)
            try:
                yield site
            finally:
                await site.aclose()
                app.begin_stop()


@asynccontextmanager
async def under_uvicorn(
    app: ASGIApp, *, small_buffers: bool = False, complaint: str | None = None
) -> AsyncIterator[int]:
    """Serve an ASGI application; yields the port."""
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="on", log_config=None, access_log=False)
    server = _Server(config)
    with _no_complaints(complaint), listen("127.0.0.1", 0) as listener:
        if small_buffers:  # connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        serving = asyncio.create_task(_run(server, listener))
        try:
            await until(lambda: server.started or serving.done())
            if serving.done():
                await serving
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            server.told.set()
            await serving
            gc.collect()  # an exception that no code has read is reported when its task is collected


async def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        await server.serve(sockets=[listener])
    except SystemExit as end:  # which would end the event loop of all later tests
        raise RuntimeError("the server did not start; the log says why") from end


def info_of(app: App, session: str) -> SessionInfo:
    """A session that the application has in memory."""
    info = app.session_info(session)
    assert info is not None
    return info


def read_calls(site: Site, peer: Peer) -> int:
    """How many running calls of a session have a reader, at whichever node."""
    streams = info_of(site.app, peer.session).streams
    return sum(stream.state == "live" for stream in streams if stream.kind == "call")


async def lose(site: Site, peer: Peer, wire: Wire) -> None:
    """Drop a call's connection, and wait until the server knows."""
    before = read_calls(site, peer)
    await wire.drop()
    await until(lambda: read_calls(site, peer) < before)


async def until(state: Callable[[], object | Awaitable[object]]) -> None:
    """Wait until a state is reached; the test's own timeout is the bound (`tests/conftest.py`)."""
    pause = SHORTEST_PAUSE
    while True:
        reached = state()
        if await reached if inspect.isawaitable(reached) else reached:
            return
        await asyncio.sleep(pause)  # what is waited for has no event of its own
        pause = min(pause * 1.3, LONGEST_PAUSE)


class _Server(uvicorn.Server):
    """uvicorn inside a test: the signals stay pytest's, and it stops at once, not at its next tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The base class polls ten times a second, and begins with a pause; tests end a thousand servers."""
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await until(lambda: not (state.connections or state.tasks))
        except TimeoutError:
            logging.getLogger("uvicorn.error").error("%d requests did not end", len(state.tasks))
            for task in state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@contextlib.contextmanager
def _no_complaints(expected: str | None) -> Iterator[None]:
    heard = _Complaints()
    loop = asyncio.get_running_loop()
    loggers = [logging.getLogger(name) for name in ("perdure", "uvicorn.error")]
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: heard.sentences.append(f"event loop: {context!r}"))
    for logger in loggers:
        logger.addHandler(heard)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
        loop.set_exception_handler(before)
    unexpected = [s for s in heard.sentences if expected is None or not re.search(expected, s)]
    assert not unexpected, "\n".join(unexpected)


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(f"{record.name}: {self.format(record)}")
