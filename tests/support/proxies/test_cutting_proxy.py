"""The proxy itself: what a client and a server see when it cuts, holds and refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.support.proxies.cutting_proxy import PRIMING, CuttingProxy, Loss, cutting_proxy

pytestmark = pytest.mark.anyio


@dataclass(kw_only=True)
class Upstream:
    """A server that sends the given bytes on each of its connections."""

    port: int = 0
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, text: bytes, *, to: int = -1) -> None:
        self.connections[to][1].write(text)

    async def hears(self, *, of: int = -1) -> bytes:
        """The next bytes of that connection; empty when it ended, also by a reset."""
        try:
            return await self.connections[of][0].read(1000)
        except ConnectionResetError:
            return b""


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    it = Upstream()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        it.connections.append((reader, writer))
        it.arrived.set()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        server.close()
        for _, writer in it.connections:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


@pytest.fixture
async def proxy(server: Upstream) -> AsyncIterator[CuttingProxy]:
    async with cutting_proxy(server.port) as it:
        yield it


class Peer:
    """A client of the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def rest(self) -> bytes:
        """All that still comes, up to a reset; fails when the connection ends in the ordinary way."""
        seen = b""
        while True:
            try:
                data = await self.reader.read(1000)
            except ConnectionResetError:
                return seen
            assert data, f"an ordinary end after {seen!r}"
            seen += data


Connect = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def connect(proxy: CuttingProxy, server: Upstream) -> AsyncIterator[Connect]:
    """Makes a connection through the proxy; once it is made, the server has received the request."""
    peers: list[Peer] = []

    async def connected(request: bytes = b"GET / HTTP/1.1\r\n\r\n", *, refused: bool = False) -> Peer:
        server.arrived.clear()
        peers.append(Peer(*await asyncio.open_connection("127.0.0.1", proxy.port)))
        if not refused:
            peers[-1].writer.write(request)
            await server.arrived.wait()
            assert await server.hears() == request
        return peers[-1]

    yield connected
    for peer in peers:
        peer.writer.close()


async def test_bytes_pass_both_ways_and_an_ordinary_end_is_passed_on(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    peer = await connect()
    server.say(b"hello")
    assert await peer.reader.readexactly(5) == b"hello"
    server.connections[0][1].close()
    assert await peer.reader.read() == b""
    assert (proxy.accepted, proxy.connections, proxy.requests) == (1, 0, {"GET": 1})


async def test_a_cut_resets_both_ends(proxy: CuttingProxy, server: Upstream, connect: Connect) -> None:
    peer = await connect()
    assert proxy.cut() == 1
    assert await peer.rest() == b""
    assert await server.hears() == b""
    assert proxy.connections == 0


async def test_a_cut_of_one_method_leaves_the_other_connections(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    get = await connect()
    post = await connect(b"POST / HTTP/1.1\r\n\r\n")
    assert proxy.cut(only="GET") == 1
    assert await get.rest() == b""
    server.say(b"still here", to=1)
    assert await post.reader.readexactly(10) == b"still here"


async def test_a_loss_that_only_the_client_learns_leaves_the_server_believing(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    peer = await connect()
    proxy.cut(loss=Loss.CLIENT)
    assert await peer.rest() == b""
    await connect()
    server.say(b"is anybody there?", to=0)
    await server.connections[0][1].drain()
    hearing = asyncio.create_task(server.hears(of=0))
    await connect()
    assert not hearing.done()
    await proxy.aclose()
    assert await hearing == b""


async def test_a_cut_after_n_messages_passes_exactly_these(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    peer = await connect()
    cut = proxy.cut_after(2)
    primed = b"id: 0\r\ndata: \r\n\r\n"
    messages = [b"id: %d\ndata: {%d}\n\n" % (number, number) for number in (1, 2, 3)]
    server.say(primed + b"".join(messages))
    assert await peer.rest() == primed + messages[0] + messages[1]
    assert cut.happened.is_set()


async def test_a_mark_tells_that_something_passed_and_loses_nothing(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    primed = proxy.passing(PRIMING, only="POST")
    await connect()
    server.say(b"id: 1\ndata: \n\n")
    peer = await connect(b"POST / HTTP/1.1\r\n\r\n")
    message = b"mcp-session-id: 0\n\nid: 1\ndata: {}\n\n"
    server.say(message)
    assert await peer.reader.readexactly(len(message)) == message
    assert not primed.happened.is_set()
    priming = b"id: 2\nretry: 100\ndata: \n\n"
    server.say(priming + message)
    await primed.passed()
    assert await peer.reader.readexactly(len(priming + message)) == priming + message


async def test_a_cut_may_stand_within_an_event_that_comes_in_pieces(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    peer = await connect()
    proxy.cut_after(b'"progress":2')
    server.say(b'data: {"progress":1}\n\ndata: {"prog')
    seen = await peer.reader.readexactly(34)
    server.say(b'ress":2}\n\n')
    assert seen + await peer.rest() == b'data: {"progress":1}\n\ndata: {"progress":2'


async def test_cuts_happen_in_the_order_in_which_they_were_asked_for(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    proxy.cut_after(b"x", times=2)
    proxy.cut_after(b"x")
    for seen in (b"xx", b"x"):
        peer = await connect()
        server.say(b"xxx")
        assert await peer.rest() == seen
    peer = await connect()
    server.say(b"xxx")
    assert await peer.reader.readexactly(3) == b"xxx"


async def test_what_is_held_arrives_after_the_release(proxy: CuttingProxy, server: Upstream, connect: Connect) -> None:
    peer = await connect()
    proxy.hold()
    server.say(b"held")
    reading = asyncio.create_task(peer.reader.read(1000))
    assert not (await asyncio.wait({reading}, timeout=0.1))[0]
    proxy.release()
    assert await reading == b"held"


async def test_a_refused_connection_is_reset_and_those_after_it_pass(
    proxy: CuttingProxy, server: Upstream, connect: Connect
) -> None:
    proxy.refuse()
    peer = await connect(refused=True)
    assert await peer.rest() == b""
    proxy.accept()
    await connect()
    assert (proxy.accepted, len(server.connections)) == (2, 1)


async def test_a_test_can_wait_for_an_answer_to_begin(proxy: CuttingProxy, server: Upstream, connect: Connect) -> None:
    await connect()
    waiting = asyncio.create_task(proxy.answered("GET"))
    await connect(b"POST / HTTP/1.1\r\n\r\n")
    server.say(b"HTTP/1.1 200 OK\r\n", to=1)
    await proxy.answered("POST")
    assert not waiting.done()
    server.say(b"HTTP/1.1 200 OK\r\n", to=0)
    await waiting
