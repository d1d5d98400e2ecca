"""A server in the test's own event loop, over real sockets, watched: what nobody may do in silence is collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

import perdure
from perdure.listener import Connection, listen
from perdure.settings import Settings
from perdure.store.base import Store
from tests.support.raw import Peer
from tests.support.toolbox import server as toolbox

WAIT_SECONDS = 20.0
"""How long a state may take to come: far beyond what it needs, so that a busy machine makes tests slow, not wrong."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to pytest


@dataclass(kw_only=True)
class Live(Peer):
    """A running server."""

    app: perdure.App
    complaints: list[str] = field(default_factory=list)
    """Errors logged by the package or by uvicorn, and exceptions that nobody has taken from a task."""


@asynccontextmanager
async def live(
    *,
    server: object = toolbox,
    store: Store | str = "memory:",
    auth: Any = None,
    quiet: bool = True,
    **settings: Any,
) -> AsyncIterator[Live]:
    """Serve until the block ends. With `quiet` any complaint fails the test."""
    values = Settings(**settings)
    app = perdure.asgi(server, store=store, settings=values, auth=auth)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=values.max_headers,
    )
    listener = listen("127.0.0.1", 0)
    running = Live(port=listener.getsockname()[1], app=app)
    uvicorn_server = _Server(config)
    with _watching(running.complaints):
        serving = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
        ready = asyncio.create_task(uvicorn_server.ready.wait())
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if serving.done():
            listener.close()
            await serving
            raise RuntimeError("the server did not start")
        try:
            yield running
        finally:
            app.begin_stop()
            uvicorn_server.should_exit = True
            await serving
            listener.close()
            gc.collect()  # a task's exception is told when the task goes
            await asyncio.sleep(0)
    if quiet:
        assert running.complaints == []


async def until(state: Callable[[], object], what: str = "the state") -> None:
    """Wait for a state of this process."""
    deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
    while not state():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come"
        await asyncio.sleep(0.002)


@contextlib.contextmanager
def _watching(complaints: list[str]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handler = _Collector(complaints)
    loggers = [logging.getLogger(name) for name in ("perdure", "uvicorn.error", "mcp")]
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: complaints.append(f"loop: {context['message']} {context!r}"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        loop.set_exception_handler(before)


class _Collector(logging.Handler):
    def __init__(self, complaints: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        self._complaints.append(f"{record.name}: {self.format(record)}")
