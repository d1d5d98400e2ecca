"""A proxy between a store and a PostgreSQL server that a test tells what to lose, and when.

Of PostgreSQL's protocol it knows where a message ends, which messages make up one request (all up to a Sync, or one
simple Query), and that ReadyForQuery ends the answer. So it counts requests by the connection that makes them, and can
lose a connection *before* a request reaches the server, or *after* the server has done it and before the answer reaches
the store. Besides it can stand still, be slow, and lose what is sent without closing anything:

- `cut`, `cut_at`: both ends get a reset;
- `refuse`: so do all connections that are open, and all that are made until `heal` is called;
- `hang`: nothing is forwarded and nothing is closed; what was sent arrives when `heal` is called, as on a network whose
  packets are sent again;
- `swallow`: what is sent in one direction, or both, is gone, and no end learns that the other one has closed. These
  connections stay so for ever; after `heal` new ones work, as behind a firewall that forgot the flows.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from perdure.store.postgres.address import parse_address
from tests.support.proxies.cutting_proxy import CHUNK, PATIENCE, reset

SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102
"""What may come in place of the message that begins a session."""

PARSE, QUERY, SYNC, TERMINATE = b"P", b"Q", b"S", b"X"
READY, KEY = b"Z", b"K"


class Role(enum.Enum):
    """What the store uses a connection for. It is known by its first statement."""

    NEW = "new"
    WRITER = "writer"
    READER = "reader"
    LISTENER = "listener"


class When(enum.Enum):
    """A connection is lost before its request reaches the server; or after that was done, without the answer."""

    BEFORE = "before"
    AFTER = "after"


class Direction(enum.Enum):
    UP = "to the server"
    DOWN = "to the store"


_MARKS = {b"pg_advisory_lock_shared": Role.LISTENER, b".commit_1(": Role.WRITER}
"""What only the first statements of such a connection have in them. All others are readers."""

EVERY = frozenset(Role)


@dataclass(kw_only=True, eq=False)
class Cut:
    """Where a connection is to be lost: at the n-th request of this role from now on."""

    role: Role
    number: int
    when: When
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    async def passed(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.happened.wait()


@dataclass(kw_only=True, eq=False)
class Link:
    """One connection, and what is known of it."""

    store: asyncio.StreamWriter
    server: asyncio.StreamWriter
    role: Role = Role.NEW
    is_idle: bool = True
    #: The present request has been sent to its end. (The driver waits for a statement to be parsed before that.)
    is_asked: bool = False
    #: The answer to the present request is not for the store.
    cut: Cut | None = None
    swallowed: set[Direction] = field(default_factory=set)


class PostgresProxy:
    """Forwards connections to a server; see the module for what it can lose."""

    def __init__(self, host: str, server: int) -> None:
        self._host, self._server = host, server
        self.port = 0
        #: The roles of all requests so far, in their order. A session that begins is a request of a NEW connection.
        self.requests: list[Role] = []
        #: It says another number for the server's process than that has, by which poolers are known.
        self.is_pooler = False
        #: Seconds by which bytes to the server are late.
        self.delay = 0.0
        self._links: set[Link] = set()
        self._lost: set[Link] = set()
        self._cuts: list[tuple[int, Cut]] = []
        self._hanging: frozenset[Role] = frozenset()
        self._swallowing: frozenset[Direction] = frozenset()
        self._refuses = False
        self._changed = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()

    def url(self, store: str) -> str:
        """The address of a store, by way of this proxy."""
        head, at, rest = store.partition("@")
        return f"{head}{at}127.0.0.1:{self.port}/{rest.partition('/')[2]}"

    def links(self, *roles: Role) -> list[Link]:
        """The connections that are open and undisturbed."""
        return [link for link in self._links if link.role in (roles or EVERY) and not link.swallowed]

    def count(self, role: Role) -> int:
        return self.requests.count(role)

    # Losing

    def cut(self, *roles: Role) -> int:
        """Lose the connections of these roles now, or all; returns how many."""
        links = self.links(*roles)
        for link in links:
            self._lose(link)
        return len(links)

    def refuse(self) -> None:
        """Lose all connections, and every one that is made from now on."""
        self._refuses = True
        self.cut()

    def cut_at(self, role: Role, number: int, when: When) -> Cut:
        """Lose a connection at the n-th request of a role from now on."""
        cut = Cut(role=role, number=number, when=when)
        self._cuts.append((self.count(role) + number, cut))
        return cut

    def forget_cuts(self) -> None:
        """What has not been lost until now is not to be."""
        self._cuts.clear()

    def hang(self, *roles: Role) -> None:
        self._hanging = frozenset(roles or EVERY)

    def swallow(self, *directions: Direction) -> None:
        self._swallowing = frozenset(directions or Direction)

    def heal(self) -> None:
        """Forward again. Connections that were cut, or of which something was swallowed, stay lost."""
        self.delay, self._hanging, self._swallowing, self._refuses = 0.0, frozenset(), frozenset(), False
        self._tell()

    # Serving

    async def serve(self, from_store: asyncio.StreamReader, to_store: asyncio.StreamWriter) -> None:
        """One connection, from accept to its end."""
        if self._refuses:
            reset(to_store)
            return
        try:
            from_server, to_server = await asyncio.open_connection(self._host, self._server)
        except OSError:
            reset(to_store)
            return
        link = Link(store=to_store, server=to_server)
        self._links.add(link)
        async with asyncio.TaskGroup() as group:
            for direction in (self._up(from_store, link), self._down(from_server, link)):
                task = group.create_task(direction)
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def aclose(self) -> None:
        self._hanging = frozenset()
        for link in {*self._links, *self._lost}:
            self._lose(link)
        self._tell()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _up(self, reader: asyncio.StreamReader, link: Link) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            if await self._begin(reader, link):
                await self._each(reader, link, self._pass_up)
            else:
                while data := await reader.read(CHUNK):  # a request to cancel
                    link.server.write(data)
        await self._part(link, Direction.UP)

    async def _down(self, reader: asyncio.StreamReader, link: Link) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._each(reader, link, self._pass_down)
        await self._part(link, Direction.DOWN)

    async def _begin(self, reader: asyncio.StreamReader, link: Link) -> bool:
        """Pass on what begins a session; whether it does."""
        while True:
            length = await reader.readexactly(4)
            body = await reader.readexactly(int.from_bytes(length, "big") - 4)
            code = int.from_bytes(body[:4], "big")
            if code in (SSL_REQUEST, GSS_REQUEST):
                link.store.write(b"N")  # it reads along
                continue
            if await self._may_pass(link, Direction.UP):
                if code != CANCEL_REQUEST:
                    self._request(link)
                if link in self._links:
                    link.server.write(length + body)
            return code != CANCEL_REQUEST

    async def _each(
        self, reader: asyncio.StreamReader, link: Link, forward: Callable[[Link, bytes, bytes], Awaitable[None]]
    ) -> None:
        while True:
            head = await reader.readexactly(5)
            await forward(link, head[:1], head + await reader.readexactly(int.from_bytes(head[1:], "big") - 4))

    async def _pass_up(self, link: Link, kind: bytes, message: bytes) -> None:
        if link.role in (Role.NEW, Role.READER) and kind in (PARSE, QUERY):
            link.role = next((role for mark, role in _MARKS.items() if mark in message), Role.READER)
        if self.delay and link.is_idle:
            await asyncio.sleep(self.delay)
        if not await self._may_pass(link, Direction.UP):
            return
        # What comes while the server asks for a password belongs to the beginning.
        if link.is_idle and link.role is not Role.NEW and kind != TERMINATE:
            self._request(link)
        link.is_asked = kind in (SYNC, QUERY)
        if link in self._links:
            link.server.write(message)

    async def _pass_down(self, link: Link, kind: bytes, message: bytes) -> None:
        if not await self._may_pass(link, Direction.DOWN):
            return
        if kind == READY:
            link.is_idle = True
            if link.cut is not None:
                link.cut.happened.set()
                self._lose(link)
        if kind == KEY and self.is_pooler:
            message = message[:5] + (1).to_bytes(4, "big") + message[9:]
        if link in self._links and not (link.cut and link.is_asked):
            link.store.write(message)

    def _request(self, link: Link) -> None:
        """A request begins: note it, and lose it if it is the one."""
        link.is_idle = False
        self.requests.append(link.role)
        number = self.count(link.role)
        for due, cut in self._cuts:
            if (cut.role, due) == (link.role, number):
                if cut.when is When.AFTER:
                    link.cut = cut
                else:
                    cut.happened.set()
                    self._lose(link)

    async def _may_pass(self, link: Link, direction: Direction) -> bool:
        while link.role in self._hanging and link in self._links:
            await self._changed.wait()
        if direction in self._swallowing:
            link.swallowed.add(direction)
        return link in self._links and direction not in link.swallowed

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _lose(self, link: Link) -> None:
        for known in (self._links, self._lost):
            known.discard(link)
        reset(link.store)
        reset(link.server)
        self._tell()

    async def _part(self, link: Link, direction: Direction) -> None:
        """One end has closed: so does the other one, unless it cannot learn that."""
        if await self._may_pass(link, direction):
            self._links.discard(link)
            link.store.close()
            link.server.close()
        elif link in self._links:
            self._links.discard(link)
            self._lost.add(link)


@asynccontextmanager
async def postgres_proxy(store: str) -> AsyncIterator[PostgresProxy]:
    """A proxy on a free port of the loopback, on the way to the server of a store."""
    host, _, port = parse_address(store).dsn.partition("@")[2].partition("/")[0].partition(":")
    proxy = PostgresProxy(host, int(port or 5432))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.aclose()
