"""The listen connection of a process: the one connection that keeps a session on the server.

It listens (LISTEN), it tells (NOTIFY), and it holds an advisory lock for as long as the process lives: when the process
dies, its operating system closes the connection, and the server frees the lock. Beats and looks at the other nodes use
it too, so they wait for no reader and no commit. If the connection is lost, they use the others, and the process beats
more often until it has its lock again: other nodes see that it lives.

Behind a pooler that lends a session to one transaction at a time there is no such thing. LISTEN succeeds there and
no notification ever comes, so the listen connection tries whether one comes when it opens. If none does, it has no
notifications: it is closed, and the process polls. The lock is taken after that, because a pooler would keep it in a
session that it lends to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import asyncpg

from perdure._core.ids import NodeId
from perdure.errors import StoreUnavailable
from perdure.store.postgres.connections import Connection, Connections, Connector
from perdure.store.postgres.failures import NAMED, failure
from perdure.store.time_limit import TimeLimit

HEARING_SECONDS = 2.0
"""How long the listen connection waits for its own word when it opens."""

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between two tries to connect again, doubled each time: other nodes take a process whose lock is free for dead
soon."""

SHOW_SECONDS = 0.5
"""Seconds between two beats while there is no lock: at least three in the time after which a free lock is a dead
process's (`_core.leases.FREE_SECONDS`)."""

_NOTIFY = """
SELECT pg_notify(c, w) FROM set_config('synchronous_commit', 'off', true), unnest($1::text[], $2::text[]) AS x (c, w)
"""
"""A notification is a transaction of its own, and has nothing that the disk would have to be waited for."""

_log = logging.getLogger(__name__)

Heard = Callable[[str, str], None]
"""Called with a channel and what was said there; with two empty texts when something may have been missed."""


def channel_of(schema: str, node: NodeId) -> str:
    """The channel of a node, whatever its name: PostgreSQL takes 63 bytes."""
    return f"{schema}_{hashlib.sha256(node.encode()).hexdigest()[:20]}"


class ListenConnection:
    """Listens for the nodes of one process. `heard` is called in the event loop.

    `show_life`: called when the connection, and so the lock, is lost, and again and again until it is back.
    `show_lock`: called then with the number of its new lock. Every role can see the old one, and may have taken it.
    """

    def __init__(
        self,
        connector: Connector,
        others: Connections,
        limit: TimeLimit,
        *,
        schema: str,
        heard: Heard,
        show_life: Callable[[], Awaitable[None]],
        show_lock: Callable[[int], Awaitable[None]],
    ) -> None:
        self._connector = connector
        self._others = others
        self._limit = limit
        self._schema = schema
        self._heard = heard
        self._show_life = show_life
        self._show_lock = show_lock
        self.lock = 0
        """The number of its lock, another one for each connection."""
        self.has_notifications = True
        self._channels: set[str] = set()
        self._turn = asyncio.Lock()
        self._connection: Connection | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_open = False

    @property
    def has_connection(self) -> bool:
        return self._is_open and self._connection is not None and not self._connection.is_closed()

    def channel(self, node: NodeId) -> str:
        return channel_of(self._schema, node)

    async def open(self) -> None:
        """Open it, once."""
        async with self._turn:
            if self._is_open:
                return
            self._is_open = True
            try:
                await self._open()
            except NAMED as error:
                self._is_open = False
                raise failure(error, self._connector.shown, "listened to") from error
            except BaseException:
                self._is_open = False
                raise

    async def _open(self) -> None:
        connection = await self._limit.wait(self._connector.connect())
        try:
            self.has_notifications = not await self._is_shared(connection) and await self._hears(connection)
            if self.has_notifications:
                await self._limit.wait(self._take_over(connection))
        except BaseException:
            self._connector.discard(connection)
            raise
        if not self.has_notifications:
            self._connector.discard(connection)
            _log.warning(
                "the database %s delivers no notifications (a pooler is between): this process polls instead; name a"
                " direct connection with ?listen=",
                self._connector.shown,
                extra={"action": "store.no_notifications"},
            )

    async def aclose(self) -> None:
        self._is_open = False
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        async with self._turn:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.remove_termination_listener(self._lost)
            await self._connector.aclose([connection])
        self._channels.clear()

    async def listen(self, node: NodeId) -> None:
        channel = self.channel(node)
        if channel not in self._channels and self.has_notifications:
            await self.run(lambda connection: connection.add_listener(channel, self._on_word))
        self._channels.add(channel)

    async def stop_listening(self, node: NodeId) -> None:
        channel = self.channel(node)
        if channel in self._channels and self.has_notifications:
            self._channels.discard(channel)
            with contextlib.suppress(StoreUnavailable):
                await self.run(lambda connection: connection.remove_listener(channel, self._on_word))

    async def fetch(self, query: str, *values: Any) -> list[asyncpg.Record]:
        """Ask on this connection; if there is none, on one of the others."""
        if not self.has_connection:
            return await self._others.fetch(query, *values)
        found: list[asyncpg.Record] = await self.run(lambda connection: connection.fetch(query, *values))
        return found

    async def notify(self, words: Iterable[tuple[str, str]]) -> None:
        """Say something on channels. Never in a transaction that writes: each such commit would wait for all others."""
        channels, said = zip(*words, strict=True)
        await self.fetch(_NOTIFY, list(channels), list(said))

    async def run(self, work: Callable[[Connection], Any]) -> Any:
        return await self._limit.wait(self._run(work))

    async def _run(self, work: Callable[[Connection], Any]) -> Any:
        async with self._turn:
            connection = self._connection
            if connection is None or connection.is_closed():
                raise StoreUnavailable(f"the database {self._connector.shown} cannot be reached at the moment")
            try:
                return await work(connection)
            except BaseException as error:
                if not isinstance(error, asyncpg.PostgresError):
                    self._connector.discard(connection)
                if isinstance(error, NAMED):
                    raise failure(error, self._connector.shown, "reached") from error
                raise

    # The connection

    async def _connect(self) -> None:
        connection = await self._connector.connect()
        try:
            await self._take_over(connection)
        except BaseException:
            self._connector.discard(connection)
            raise

    async def _take_over(self, connection: Connection) -> None:
        """Make a connection the listen connection's: with its lock and its channels."""
        self.lock = secrets.randbits(63)
        await connection.execute("SELECT pg_advisory_lock_shared($1)", self.lock)
        for channel in self._channels:
            await connection.add_listener(channel, self._on_word)
        connection.add_termination_listener(self._lost)
        self._connection = connection

    async def _is_shared(self, connection: Connection) -> bool:
        """Whether a pooler was seen to lend the session of this connection to another one. That spares the wait for a
        word that does not come, and leaves nothing behind in the session. (If it was not seen, it may be so.)"""
        if not self._connector.is_pooled:
            return False
        own = await self._limit.wait(connection.fetchval("SELECT pg_backend_pid()"))
        [(other,)] = await self._others.fetch("SELECT pg_backend_pid()")
        return bool(own == other)

    async def _hears(self, connection: Connection) -> bool:
        """Whether a word that another connection says arrives here. Nothing is asked on this connection meanwhile: with
        the answer a pooler might deliver the word that it would keep back otherwise."""
        arrived = asyncio.Event()
        channel = f"{self._schema}_{secrets.token_hex(8)}"

        def on_word(*_: object) -> None:
            arrived.set()

        await self._limit.wait(connection.add_listener(channel, on_word))
        try:
            async with asyncio.timeout(HEARING_SECONDS):
                await self._others.fetch("SELECT pg_notify($1, 'hello')", channel)
                await arrived.wait()
        except TimeoutError:
            if connection.is_closed():
                raise ConnectionError("the connection was lost") from None
            return False
        await connection.remove_listener(channel, on_word)
        return True

    def _on_word(self, _: object, __: int, channel: str, word: object) -> None:
        self._heard(channel, str(word))

    def _lost(self, connection: object) -> None:
        if self._is_open and connection is self._connection and self._reconnecting is None:
            self._connector.lost += 1
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE
        showing = asyncio.create_task(self._keep_showing())
        try:
            while True:
                try:
                    if not self.has_connection:
                        async with self._turn:
                            await self._limit.wait(self._connect())
                    await self._show_lock(self.lock)
                    break
                except (*NAMED, StoreUnavailable):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE)
        finally:
            showing.cancel()
        self._reconnecting = None
        self._heard("", "")  # what was said meanwhile was not heard

    async def _keep_showing(self) -> None:
        """Show by the other connections that this process lives."""
        while True:
            # A statement that is under way when the listen connection is back comes to its end: cut off, it would cost
            # a connection.
            await asyncio.shield(self._show_life())
            await asyncio.sleep(SHOW_SECONDS)
