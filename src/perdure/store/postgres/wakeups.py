"""Sends wake-ups between the processes of one database.

A hint is a notification on the channel of its node, sent apart from any commit: a notification inside a writing
transaction makes it wait for all others that have one. The first hint is sent at once, and those that follow soon after
are sent together. A hint names the streams to read, and nothing else in it is used, because any role that may connect
can send one. Where no notifications arrive, and where each would wake too many nodes, every node polls instead, many
times a second, whether anything was written.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from perdure._core.ids import NodeId, StreamId
from perdure.errors import StoreError
from perdure.store.interface import HintListener
from perdure.store.postgres.listen_connection import ListenConnection

APART = 0.01
"""Seconds between two notifications of a process: PostgreSQL takes one lock for each, on the whole server."""

MAX_PAYLOAD = 7_900
"""Bytes in a notification (PostgreSQL takes 8,000). A node with more streams to read reads everything."""

MANY_NODES = 16
"""Nodes beyond which polling costs less: PostgreSQL up to 18 wakes every listening connection for each notification."""

LINGER = 1.5
"""Seconds for which a node both polls and notifies after the number of nodes has crossed `MANY_NODES`: other nodes may
not have noticed yet. Nodes count each other twice a second."""

POLL = 0.05
"""Seconds between two polls. One costs about 15 µs of the server."""

HINT = "h"
"""The first letter of a hint. The ids of streams follow; without any, the node reads everything."""

Hinted = set[StreamId] | None
"""The streams to read; `None`: all."""


class PostgresHints:
    """Notifies listeners. `poll` returns a value that changes whenever a commit becomes visible. (The end of the
    server's log is no such value: a commit is written there a moment before other connections see it.)"""

    def __init__(self, listener: ListenConnection, *, poll: Callable[[], Awaitable[object]]) -> None:
        self._listener = listener
        self._poll = poll
        self._listeners: dict[NodeId, list[HintListener]] = {}
        self._outgoing: dict[NodeId, Hinted] = {}
        self._sending: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._has_many_nodes = False
        self._changed = -math.inf
        """When `_has_many_nodes` changed last, by the monotonic clock."""
        self.sent = self.received = 0
        """Hints to other processes, and from them."""

    @property
    def polls(self) -> bool:
        return not self._listener.has_notifications or self._has_many_nodes or self._lingers

    @property
    def _lingers(self) -> bool:
        return time.monotonic() - self._changed < LINGER

    def count(self, nodes: int) -> None:
        """Note how many nodes have joined."""
        has_many_nodes = nodes > MANY_NODES
        if has_many_nodes != self._has_many_nodes:
            self._has_many_nodes, self._changed = has_many_nodes, time.monotonic()
        self.start_polling()

    def start_polling(self) -> None:
        """Poll from now on, if that is necessary."""
        if self.polls and self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._keep_polling())

    async def aclose(self) -> None:
        self._listeners.clear()
        self._outgoing.clear()
        tasks = [task for task in (self._sending, self._polling) if task is not None]
        self._sending = self._polling = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Listening

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        listeners = self._listeners.setdefault(node, [])
        listeners.append(listener)

        def stop() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return stop

    def on_hint(self, channel: str, streams: Sequence[str]) -> None:
        """Pass on a hint from a channel; from none, to every node."""
        self.received += channel != ""
        for node in list(self._listeners):
            if channel in ("", self._listener.channel(node)):
                self._notify(node, {StreamId(stream) for stream in streams} or None)

    def _notify(self, node: NodeId, hinted: Hinted) -> None:
        for listener in list(self._listeners.get(node, ())):
            listener(tuple(hinted or ()))

    async def _keep_polling(self) -> None:
        seen: object = None
        while self.polls:
            try:
                found = await self._poll()
            except StoreError:
                found = seen  # the nodes notice by themselves that the store fails
            if found != seen:
                seen = found
                self.on_hint("", ())
            await asyncio.sleep(POLL)
        self._polling = None

    # Notifying

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        """Send a hint at the end of this turn of the event loop, with all that are added until then."""
        known = self._outgoing.get(node, set())
        self._outgoing[node] = None if known is None or not streams else known | set(streams)
        if self._sending is None:
            try:
                self._sending = asyncio.get_running_loop().create_task(self._send())
            except RuntimeError:
                self._outgoing.clear()  # without an event loop the nodes find out by themselves

    async def _send(self) -> None:
        try:
            while self._outgoing:
                hints, self._outgoing = self._outgoing, {}
                here = {node: hinted for node, hinted in hints.items() if self._listeners.get(node)}
                for node, hinted in here.items():
                    self._notify(node, hinted)
                words: list[tuple[str, str]] = []
                for node in hints.keys() - here.keys():
                    payload = " ".join([HINT, *(hints[node] or ())])
                    is_short = len(payload.encode()) <= MAX_PAYLOAD
                    words.append((self._listener.channel(node), payload if is_short else HINT))
                if not words or (self._has_many_nodes and not self._lingers):
                    continue
                began = time.monotonic()
                try:
                    await self._listener.notify(words)
                    self.sent += len(words)
                except StoreError:
                    continue  # a hint may be lost (8)
                await asyncio.sleep(max(0.0, began + APART - time.monotonic()))
        finally:
            self._sending = None
