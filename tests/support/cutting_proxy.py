"""A TCP proxy on the loopback that a test tells when to lose connections.

It knows nothing of HTTP but one thing: what the bytes of a Server-Sent Event look like, so that a test can say "lose the
connection after the fourth message". Three ways to lose one:

- both ends learn it (`Loss.BOTH`): a reset, as when a process in the middle dies;
- only the client learns it (`Loss.CLIENT`): the server goes on believing in the connection, as after a lost network;
- nobody learns it (`hold`): bytes stop, and nothing is closed, as behind a firewall that forgot the flow.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CHUNK = 65536

#: The end of an SSE event that carries a JSON-RPC message. Priming events have no data and do not count.
MESSAGE = re.compile(rb"data: ?\{[^\n]*\n\r?\n")
#: The end of any SSE event with an id, priming events included.
EVENT = re.compile(rb"id: ?[^\n]*\n(?:[^\r\n][^\n]*\n)*\r?\n")


class Loss(enum.Enum):
    """Who learns of a lost connection."""

    BOTH = "both"
    CLIENT = "client"


@dataclass(kw_only=True)
class Cut:
    """One cut that was asked for: the n-th match of a pattern within one connection, on its way to the client."""

    pattern: re.Pattern[bytes]
    times: int
    loss: Loss
    happened: asyncio.Event = field(default_factory=asyncio.Event)


class CuttingProxy:
    """Forwards connections to `127.0.0.1:upstream` until told otherwise; see the module for the ways to lose them."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.port = 0
        #: How many connections were accepted so far; retries of a client are seen here.
        self.accepted = 0
        self._links: set[_Link] = set()
        self._ghosts: list[_Link] = []
        self._cuts: list[Cut] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        return len(self._links)

    def cut(self, *, loss: Loss = Loss.BOTH) -> int:
        """Lose every open connection now; returns how many."""
        links = list(self._links)
        for link in links:
            self._lose(link, loss)
        return len(links)

    def cut_after(self, what: int | bytes | re.Pattern[bytes], *, times: int = 1, loss: Loss = Loss.BOTH) -> Cut:
        """Lose the next connection that has carried `what` to the client: n messages, or a pattern for the n-th time.

        The byte that completes it still goes out, the one after it does not. Each cut happens once; several cuts happen
        in the order in which they were asked for.
        """
        if isinstance(what, int):
            pattern, times = MESSAGE, what
        else:
            pattern = re.compile(re.escape(what)) if isinstance(what, bytes) else what
        cut = Cut(pattern=pattern, times=times, loss=loss)
        self._cuts.append(cut)
        return cut

    def hold(self) -> None:
        """Forward nothing more in either direction and close nothing. New connections are accepted and held as well."""
        self._flowing.clear()

    def release(self) -> None:
        """Forward again, beginning with what was held."""
        self._flowing.set()

    def refuse(self) -> None:
        """Reset every new connection until `accept`; those that are open stay as they are."""
        self._refusing = True

    def accept(self) -> None:
        self._refusing = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, from accept to its end."""
        self.accepted += 1
        if self._refusing:
            _reset(writer)
            return
        link = _Link(client=writer)
        self._links.add(link)
        try:
            from_server, link.server = await asyncio.open_connection("127.0.0.1", self.upstream)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._upstream(reader, link))
                group.create_task(self._downstream(from_server, link))
        except* (ConnectionError, TimeoutError):
            self._lose(link, Loss.BOTH)
        finally:
            self._links.discard(link)
            if link not in self._ghosts:
                link.close()

    def close(self) -> None:
        self.cut()
        for ghost in self._ghosts:
            ghost.reset_server()
        self._ghosts.clear()
        self.release()

    async def _upstream(self, reader: asyncio.StreamReader, link: _Link) -> None:
        while data := await reader.read(CHUNK):
            await self._flowing.wait()
            assert link.server is not None
            link.server.write(data)
            await link.server.drain()
        if link not in self._ghosts:
            link.end_server()

    async def _downstream(self, reader: asyncio.StreamReader, link: _Link) -> None:
        while data := await reader.read(CHUNK):
            await self._flowing.wait()
            if link.lost:
                return  # the rest of what the server sends is for nobody
            link.sent += data
            cut, end = self._due(link)
            link.client.write(data[: len(data) - (len(link.sent) - end)])
            if cut is not None:
                self._cuts.remove(cut)
                self._lose(link, cut.loss)
                cut.happened.set()
                return
            await link.client.drain()
        link.client.close()

    def _due(self, link: _Link) -> tuple[Cut | None, int]:
        """The cut that this connection has reached, and up to which byte of all it carried the client may see."""
        for cut in self._cuts[:1]:
            for number, match in enumerate(cut.pattern.finditer(link.sent), start=1):
                if number == cut.times:
                    return cut, match.end()
        return None, len(link.sent)

    def _lose(self, link: _Link, loss: Loss) -> None:
        link.lost = True
        self._links.discard(link)
        link.reset_client()
        if loss is Loss.CLIENT:
            self._ghosts.append(link)
        else:
            link.reset_server()


@dataclass(kw_only=True, eq=False)
class _Link:
    """The two sockets of one connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    sent: bytearray = field(default_factory=bytearray)
    lost: bool = False

    def reset_client(self) -> None:
        _reset(self.client)

    def reset_server(self) -> None:
        if self.server is not None:
            _reset(self.server)

    def end_server(self) -> None:
        if self.server is not None and self.server.can_write_eof() and not self.server.is_closing():
            self.server.write_eof()

    def close(self) -> None:
        self.client.close()
        if self.server is not None:
            self.server.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset, what was written before included in what the peer may still read."""
    sock = writer.get_extra_info("socket")
    if isinstance(sock, socket.socket) or hasattr(sock, "setsockopt"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def cutting_proxy(upstream: int) -> AsyncIterator[CuttingProxy]:
    """A proxy on a free port of the loopback, in front of the server on port `upstream`."""
    proxy = CuttingProxy(upstream)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.close()
