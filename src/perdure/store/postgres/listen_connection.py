"""Keeps the listen connection of a process: the one connection that needs a session of its own on the server.

It listens (LISTEN), it notifies (NOTIFY), and it holds an advisory lock for as long as the process lives: when the
process dies, its operating system closes the connection, and the server frees the lock. Beats and reads of the other
nodes use it too, so they wait for no reader and no commit. If the connection is lost, they use the others, and the
process beats more often until it has a lock again: other nodes see that it lives.

A pooler that lends a session to one transaction at a time delivers no notifications, although LISTEN succeeds there. So
the listen connection tries it when it opens. If none arrives, it is closed, and the process polls. The lock is taken
after that, because a pooler would keep it in a session that it lends to others.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import asyncpg

from perdure._core.ids import NodeId
from perdure.errors import StoreError, StoreUnavailable
from perdure.store.postgres.connections import Connection, Connections, Connector, named
from perdure.store.time_limit import TimeLimit

TRIAL_SECONDS = 2.0
"""Seconds that the listen connection waits for a notification of its own when it opens."""

FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to connect again, doubled each time. They are short because other nodes soon take a
process whose lock is free for dead."""

SHOW_SECONDS = 0.5
"""Seconds between two beats without a lock: at least three in the time after which a free lock means a dead process
(`_core.leases.FREE_SECONDS`)."""

_NOTIFY = """
SELECT pg_notify(c, w) FROM set_config('synchronous_commit', 'off', true), unnest($1::text[], $2::text[]) AS x (c, w)
"""
"""A notification is a transaction of its own that writes nothing, so it need not wait for the disk."""

_log = logging.getLogger(__name__)


def channel_of(schema: str, node: NodeId) -> str:
    """Return the channel of a node. PostgreSQL takes 63 bytes, and a node's name may be longer."""
    return f"{schema}_{hashlib.sha256(node.encode()).hexdigest()[:20]}"


async def delivers_notifications(connection: Connection, others: Connections, limit: TimeLimit, schema: str) -> bool:
    """Whether a notification that another connection sends arrives on this one.

    This connection sends nothing meanwhile: with the answer a pooler might deliver a notification that it would keep
    back otherwise. If a pooler was seen to lend its session to another connection, none is awaited, and nothing stays
    in the session. (A pooler may lend it without being seen.)
    """
    own = await limit.wait(connection.fetchval("SELECT pg_backend_pid()"))
    if own != connection.get_server_pid() and own == (await others.fetch("SELECT pg_backend_pid()"))[0][0]:
        return False
    arrived = asyncio.Event()
    channel = f"{schema}_{secrets.token_hex(8)}"

    def on_notification(*_: object) -> None:
        arrived.set()

    await limit.wait(connection.add_listener(channel, on_notification))
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            await others.fetch("SELECT pg_notify($1, 'hello')", channel)
            await arrived.wait()
    except TimeoutError:
        if connection.is_closed():
            raise ConnectionError("the connection was lost") from None
        return False
    await connection.remove_listener(channel, on_notification)
    return True


class ListenConnection:
    """Listens for the nodes of one process.

    `on_notification`: called in the event loop with a channel and a payload; with two empty texts when notifications
    may have been missed. `show_life`: called when the connection, and so the lock, is lost, and repeatedly until it is
    back; then with the number of the new lock. (Every role can see the old number, and may have taken that lock.)
    """

    def __init__(
        self,
        connector: Connector,
        others: Connections,
        limit: TimeLimit,
        *,
        schema: str,
        on_notification: Callable[[str, str], None],
        show_life: Callable[[int | None], Awaitable[None]],
    ) -> None:
        self._connector = connector
        self._others = others
        self._limit = limit
        self._schema = schema
        self._notified = on_notification
        self._show_life = show_life
        self._own = Connections(connector, limit, size=1, prepare=self._take_over)
        self._connection: Connection | None = None
        """The one of `_own`."""
        self.lock = 0
        """The number of the lock; each connection has another one."""
        self.has_notifications = True
        self._channels: set[str] = set()
        self._opening = asyncio.Lock()
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_open = False

    @property
    def has_connection(self) -> bool:
        return self._is_open and self._connection is not None and not self._connection.is_closed()

    def channel(self, node: NodeId) -> str:
        return channel_of(self._schema, node)

    async def open(self) -> None:
        async with self._opening:
            if self._is_open:
                return
            with named(self._connector.shown, "listened to"):
                async with self._connector.connected() as connection:
                    self.has_notifications = await delivers_notifications(
                        connection, self._others, self._limit, self._schema
                    )
            self._is_open = True
            if self.has_notifications:
                self._own.open()
                try:
                    await self._own.run("listened to", _nothing)
                except BaseException:
                    await self.aclose()
                    raise
                return
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
            self._reconnecting = None
        await self._own.aclose()
        self._connection = None
        self._channels.clear()

    async def listen(self, node: NodeId) -> None:
        channel = self.channel(node)
        if channel not in self._channels and self.has_notifications:
            await self._own.run("listened to", lambda own: own.add_listener(channel, self._on_notification))
        self._channels.add(channel)

    async def stop_listening(self, node: NodeId) -> None:
        channel = self.channel(node)
        if channel in self._channels and self.has_notifications:
            self._channels.discard(channel)
            with contextlib.suppress(StoreUnavailable):
                await self._own.run("reached", lambda own: own.remove_listener(channel, self._on_notification))

    async def fetch(self, query: str, *values: Any) -> list[asyncpg.Record]:
        """Read on this connection; without one, on another."""
        return await (self._own if self.has_connection else self._others).fetch(query, *values)

    async def notify(self, words: Iterable[tuple[str, str]]) -> None:
        """Send payloads on channels. Never in a transaction that writes: each such commit would wait for all others."""
        channels, payloads = zip(*words, strict=True)
        await self.fetch(_NOTIFY, list(channels), list(payloads))

    # The connection

    async def _take_over(self, connection: Connection) -> None:
        """Take the lock and the channels on a new connection."""
        self.lock = secrets.randbits(63)
        await connection.execute("SELECT pg_advisory_lock_shared($1)", self.lock)
        for channel in self._channels:
            await connection.add_listener(channel, self._on_notification)
        connection.add_termination_listener(self._on_lost)
        self._connection = connection

    def _on_notification(self, _: object, __: int, channel: str, payload: object) -> None:
        self._notified(channel, str(payload))

    def _on_lost(self, connection: object) -> None:
        if self._is_open and connection is self._connection and self._reconnecting is None:
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE
        showing = asyncio.create_task(self._keep_showing())
        try:
            while True:
                try:
                    await self._own.run("reached", _nothing)
                    await self._show_life(self.lock)
                    if self.has_connection:  # else it was lost again meanwhile
                        break
                except StoreError:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE)
        finally:
            showing.cancel()
        self._reconnecting = None
        self._notified("", "")

    async def _keep_showing(self) -> None:
        """Show by the other connections that this process lives."""
        while True:
            # A statement that runs when the listen connection is back is not cut off: that would cost a connection.
            await asyncio.shield(asyncio.gather(self._show_life(None), return_exceptions=True))
            await asyncio.sleep(SHOW_SECONDS)


async def _nothing(_: Connection) -> None:
    """The work that only makes the connection."""
