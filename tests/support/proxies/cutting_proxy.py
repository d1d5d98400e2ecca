"""A TCP proxy on the loopback that a test tells when to lose connections.

Of HTTP it knows the method at the head of a request, and how a Server-Sent Event looks in bytes, so that a test can say
"lose the GET" or "lose the connection after the fourth message". Three ways to lose one:

- both ends learn it (`Loss.BOTH`): a reset, as when a process in the middle dies;
- only the client learns it (`Loss.CLIENT`): the server continues to believe in the connection, as after a lost network;
- neither side learns it (`hold`): bytes stop, and nothing is closed, as behind a firewall that forgot the flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CHUNK = 65536
#: What a test waits for comes within milliseconds, or never; seconds are for a busy machine.
PATIENCE = 60

METHOD = re.compile(rb"(GET|POST|DELETE) ")
#: An SSE event with an id and without data. (A line of its own: `mcp-session-id: …` is a header.)
PRIMING = re.compile(rb"(?:^|(?<=\n))id: ?[^\n]+\n(?:(?!data:(?! ?\r?\n))[^\r\n][^\n]*\n)*\r?\n")
#: An SSE event that carries a JSON-RPC message.
MESSAGE = re.compile(rb"data: ?\{[^\n]*\n(?:[^\r\n][^\n]*\n)*\r?\n")


class Loss(enum.Enum):
    """The sides that learn of a lost connection."""

    BOTH = "both"
    CLIENT = "client"


@dataclass(kw_only=True, eq=False)
class Mark:
    """The n-th match of a pattern on one connection's way to the client, and what shall be lost there, if anything."""

    pattern: re.Pattern[bytes]
    times: int
    #: Only on connections whose newest request has this method.
    only: str | None
    loss: Loss | None
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    async def passed(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.happened.wait()

    def end(self, sent: bytes | bytearray) -> int | None:
        """Where in `sent` the n-th match ends."""
        for number, match in enumerate(self.pattern.finditer(sent), start=1):
            if number == self.times:
                return match.end()
        return None


@dataclass(kw_only=True, eq=False)
class _Link:
    """One connection: its two sockets and what is remembered of it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    #: The method of the newest request, and whether its answer has begun.
    method: str = ""
    answered: bool = False
    #: What went to the client since the mark before the next one.
    sent: bytearray = field(default_factory=bytearray)


class CuttingProxy:
    """Forwards connections to `127.0.0.1:upstream` until a test loses them; the module lists the ways.

    With several upstreams each new connection is led to the next of them, as behind a balancer that knows no sessions.
    """

    def __init__(self, *upstreams: int) -> None:
        self.upstreams = upstreams
        self.port = 0
        #: Connections accepted so far, and requests forwarded so far by method: a client's retries are seen here.
        self.accepted = 0
        self.requests: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._answer_began = asyncio.Event()
        self._links: set[_Link] = set()
        self._unread: list[_Link] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._marks: list[Mark] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @property
    def connections(self) -> int:
        """How many connections are open now, as the client sees it."""
        return len(self._links)

    def cut(self, *, only: str | None = None, loss: Loss = Loss.BOTH) -> int:
        """Lose every open connection now, or those whose newest request has the method `only`; returns how many."""
        links = [link for link in self._links if only in (None, link.method)]
        for link in links:
            self._lose(link, loss)
        return len(links)

    def cut_after(self, what: int | bytes | re.Pattern[bytes], *, times: int = 1, only: str | None = None) -> Mark:
        """Lose the connection that carries `what` to the client: n messages, or a pattern for the n-th time.

        Counting begins now. The byte that completes it is still sent, the one after it is not. Each mark is passed
        once; several are passed in the order in which they were asked for.
        """
        return self._mark(what, times, only, Loss.BOTH)

    def passing(self, what: int | bytes | re.Pattern[bytes], *, times: int = 1, only: str | None = None) -> Mark:
        """Return a mark that is passed when a connection has carried `what` to the client. Nothing is lost."""
        return self._mark(what, times, only, None)

    def hold(self) -> None:
        """Forward nothing more in either direction and close nothing; new connections are accepted and held as well,
        so that they reach the server that exists at the release."""
        self._flowing.clear()

    def release(self) -> None:
        """Forward again, beginning with what was held."""
        self._flowing.set()

    def refuse(self) -> None:
        """Reset every new connection until `accept`; those that are open stay as they are."""
        self._refusing = True

    def accept(self) -> None:
        self._refusing = False

    async def answered(self, method: str, *, times: int = 1) -> None:
        """Wait until the answer to the n-th request with this method has begun to go to the client."""
        async with asyncio.timeout(PATIENCE):
            while self._answers[method] < times:
                self._answer_began.clear()
                await self._answer_began.wait()

    async def serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One client's connection, from accept to its end."""
        number, self.accepted = self.accepted, self.accepted + 1
        if not self._refusing:
            await self._flowing.wait()
        if self._refusing:
            reset(to_client)
            return
        try:
            upstream = self.upstreams[number % len(self.upstreams)]
            from_server, to_server = await asyncio.open_connection("127.0.0.1", upstream)
        except ConnectionError:
            reset(to_client)
            return
        if self._refusing:  # closed in the meantime
            reset(to_client)
            reset(to_server)
            return
        link = _Link(client=to_client, server=to_server)
        self._links.add(link)
        async with asyncio.TaskGroup() as group:
            for direction in (self._upstream(from_client, link), self._downstream(from_server, link)):
                task = group.create_task(direction)
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def aclose(self) -> None:
        self.refuse()
        self.cut()
        for link in self._unread:
            reset(link.server)
        self.release()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _upstream(self, reader: asyncio.StreamReader, link: _Link) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                if link not in self._links:
                    return
                self._note_request(link, data)
                link.server.write(data)
                await link.server.drain()
        self._part(link)

    async def _downstream(self, reader: asyncio.StreamReader, link: _Link) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                if link not in self._links:
                    return  # lost: no client reads what the server sends from now on
                mark, data = self._reached(link, data)
                link.client.write(data)
                self._note_answer(link)
                if mark is not None:
                    self._pass(mark, link)
                if link in self._links:
                    await link.client.drain()
        self._part(link)

    def _note_request(self, link: _Link, data: bytes) -> None:
        # Clients do not pipeline, so a request begins where a read begins.
        if found := METHOD.match(data):
            link.method, link.answered = found[1].decode(), False
            self.requests[link.method] += 1

    def _note_answer(self, link: _Link) -> None:
        if not link.answered:
            link.answered = True
            self._answers[link.method] += 1
            self._answer_began.set()

    def _mark(self, what: int | bytes | re.Pattern[bytes], times: int, only: str | None, loss: Loss | None) -> Mark:
        if isinstance(what, int):
            pattern, times = MESSAGE, what
        else:
            pattern = re.compile(re.escape(what)) if isinstance(what, bytes) else what
        self._marks.append(Mark(pattern=pattern, times=times, only=only, loss=loss))
        return self._marks[-1]

    def _reached(self, link: _Link, data: bytes) -> tuple[Mark | None, bytes]:
        """The mark that `data` reaches on this connection, and as much of `data` as may go out."""
        if not self._marks or self._marks[0].only not in (None, link.method):
            return None, data
        mark = self._marks[0]
        link.sent += data
        end = mark.end(link.sent)
        if end is None:
            return None, data
        return mark, data if mark.loss is None else data[: len(data) - (len(link.sent) - end)]

    def _pass(self, mark: Mark, link: _Link) -> None:
        self._marks.remove(mark)
        for other in self._links:
            other.sent.clear()  # the next mark counts from here
        if mark.loss is not None:
            self._lose(link, mark.loss)
        mark.happened.set()

    def _lose(self, link: _Link, loss: Loss) -> None:
        self._links.discard(link)
        reset(link.client)
        if loss is Loss.CLIENT:
            self._unread.append(link)
        else:
            reset(link.server)

    def _part(self, link: _Link) -> None:
        """One end closed in the ordinary way: close the other in the ordinary way too."""
        if link in self._links:
            self._links.discard(link)
            link.client.close()
            link.server.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset instead of a farewell."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def cutting_proxy(*upstreams: int) -> AsyncIterator[CuttingProxy]:
    """A proxy on a free port of the loopback, in front of the servers on these ports."""
    proxy = CuttingProxy(*upstreams)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.aclose()
