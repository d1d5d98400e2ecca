"""The server that is fuzzed, in a thread of its own, and the peers that see whether it is still well."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import uvloop
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.message import ServerMessageMetadata
from mcp_types import ListRootsRequest, ListRootsResult

from tests.support.clients.raw_http import VERSION, Answer, Parser, Peer, message
from tests.support.servers.gated_server import live

HANG = 60.0
"""Seconds within which every answer must be there."""

server = MCPServer("fuzzed", version="1", log_level="CRITICAL")


@server.tool()
async def add(a: int, b: float = 0.5) -> float:
    return a + b


@server.tool()
async def say(text: str, n: int, ctx: Context) -> str:
    """Report progress a few times, then answer with the text."""
    for number in range(max(0, min(n, 5))):
        await ctx.report_progress(number, message=text)
    return text


@server.tool()
async def ask(ctx: Context) -> str:
    """Ask the client for its roots."""
    metadata = ServerMessageMetadata(related_request_id=ctx.request_id)
    return str(await ctx.session.send_request(ListRootsRequest(), ListRootsResult, metadata=metadata))


@server.tool()
async def boom() -> str:
    raise RuntimeError("boom")


@server.resource("note://{name}")
def note(name: str) -> str:
    return f"a note about {name}"


@server.prompt()
def greet(name: str) -> str:
    return f"Greet {name}."


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # A handler of the server's own that fails is logged, whatever it was asked for.
        if getattr(record, "action", "") != "call.failed":
            self.seen.append(f"{record.name}: {self.format(record)}")


@dataclass(kw_only=True)
class Target(Peer):
    """The server under attack, from a thread that is not its own."""

    session_id: str
    old_id: str
    witness_id: str
    errors: Errors = field(default_factory=Errors)

    def exchange(self, data: bytes, *, answers: int = 1, method: str = "POST") -> list[Answer]:
        """Send bytes; read so many whole answers. Of a GET the head is enough: an event stream stays open."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=HANG) as connection:
            _send(connection, data)
            return _read(connection, answers, head_only=method in ("GET", "HEAD"))

    def garbage(self, data: bytes) -> list[Answer]:
        """Send bytes and nothing more; read until the server has closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=HANG) as connection:
            _send(connection, data)
            _end_sending(connection)
            return _read(connection, 1_000)

    def valid(self, session_id: str) -> bytes:
        return self.request("POST", message("ping", id="witness"), headers={"mcp-session-id": session_id})

    def check(self, answers: Sequence[Answer]) -> None:
        """The invariant."""
        assert [answer for answer in answers if answer.status >= 500] == []
        witnesses = (self.session_id, self.old_id, self.witness_id)
        valid = self.exchange(b"".join(map(self.valid, witnesses)), answers=len(witnesses))
        assert len(valid) == len(witnesses)
        for answer in valid:
            assert answer.status == 200
            assert answer.messages[-1] == {"jsonrpc": "2.0", "id": "witness", "result": {}}
        errors, self.errors.seen = self.errors.seen, []
        assert errors == []


def _send(connection: socket.socket, data: bytes) -> None:
    # It may be refused before it is all there; the answer can be read all the same.
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def _end_sending(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def _read(connection: socket.socket, wanted: int, *, head_only: bool = False) -> list[Answer]:
    answers: list[Answer] = []
    rest = b""
    while len(answers) < wanted:
        parser, body = Parser(head_only=head_only), bytearray()
        body += parser.feed(rest)
        while not parser.complete:
            data = receive(connection)
            if not data:
                break
            body += parser.feed(data)
        if parser.status:
            answers.append(Answer(status=parser.status, headers=parser.headers, body=bytes(body)))
        if not parser.complete:
            break
        rest = parser.rest
    return answers


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except ConnectionError:
        return b""


@contextlib.contextmanager
def running() -> Iterator[Target]:
    """The server, while the block lasts. An error that it logged, or a task of its that died unheard, is raised."""
    ready: queue.SimpleQueue[Target | BaseException] = queue.SimpleQueue()
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with live(server=server, complaint="the handler of") as served:
            ids = [(await served.session(version)).id for version in (VERSION, "2025-03-26", "2025-06-18")]
            stop.append((asyncio.get_running_loop(), asyncio.Event()))
            ready.put(Target(port=served.port, session_id=ids[0], old_id=ids[1], witness_id=ids[2]))
            await stop[0][1].wait()

    failures: list[BaseException] = []

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as failure:
            failures.append(failure)
            ready.put(failure)

    thread = threading.Thread(target=run)
    thread.start()
    found = ready.get()
    if isinstance(found, BaseException):
        raise found
    loggers = [logging.getLogger(name) for name in ("perdure", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(found.errors)
    try:
        yield found
    finally:
        for logger in loggers:
            logger.removeHandler(found.errors)
        loop, event = stop[0]
        loop.call_soon_threadsafe(event.set)
        thread.join()
    if failures:
        raise failures[0]
