"""Sends wake-ups between the processes of one database.

A hint is a notification on the channel of its node, sent apart from any commit: a notification inside a writing
transaction makes it wait for all others that have one. The first hint is sent at once, those that follow soon after it
together. It names what to look at, and nothing in it is believed: any role that may connect can send one. Where nothing
is heard, and where there are so many nodes that each notification wakes too many, every node looks instead, many times
a second, whether anything was written.
"""

from __future__ import annotations

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

MAX_WORD = 7_900
"""Bytes in a notification (PostgreSQL takes 8,000). A node that has more to look at looks at everything."""

CROWD = 16
"""Nodes beyond which polling costs less: PostgreSQL up to 18 wakes every listening connection for each notification."""

LINGER = 1.5
"""Seconds for which a node goes on with both, looking and telling, after a crowd has gathered or gone: others may not
have noticed yet. Nodes count each other twice a second."""

POLL = 0.05
"""Seconds between two looks. One costs about 15 µs of the server."""

HINT = "h"
"""The first letter of a hint. The ids of streams follow; none: look at everything."""

Hinted = set[StreamId] | None
"""The streams to look at; `None`: all."""


class Hints:
    """Tells listeners. `look` gives a value that changes whenever a commit becomes visible. (The end of the server's
    log would not do: a commit is written there a moment before other connections see it.)"""

    def __init__(self, listener: ListenConnection, *, look: Callable[[], Awaitable[object]]) -> None:
        self._listener = listener
        self._look = look
        self._listeners: dict[NodeId, list[HintListener]] = {}
        self._outgoing: dict[NodeId, Hinted] = {}
        self._sending: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._is_crowded = False
        self._changed = -math.inf
        """When that was another way last, by the monotonic clock."""
        self.sent = self.heard = 0
        """Hints that were sent to other processes, and that came from them."""

    @property
    def polls(self) -> bool:
        return not self._listener.has_notifications or self._is_crowded or self._lingers

    @property
    def tells(self) -> bool:
        return not self._is_crowded or self._lingers

    @property
    def _lingers(self) -> bool:
        return time.monotonic() - self._changed < LINGER

    def count(self, nodes: int) -> None:
        """So many nodes are there."""
        is_crowded = nodes > CROWD
        if is_crowded != self._is_crowded:
            self._is_crowded, self._changed = is_crowded, time.monotonic()
        self.poll()

    def poll(self) -> None:
        """Look from now on, if looking is due."""
        if self.polls and self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._keep_looking())

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
        """A hint came on a channel; on none: for every node."""
        self.heard += channel != ""
        for node in list(self._listeners):
            if channel in ("", self._listener.channel(node)):
                self._tell(node, {StreamId(stream) for stream in streams} or None)

    def _tell(self, node: NodeId, hinted: Hinted) -> None:
        for listener in list(self._listeners.get(node, ())):
            listener(tuple(hinted or ()))

    async def _keep_looking(self) -> None:
        seen: object = None
        while self.polls:
            try:
                found = await self._look()
            except StoreError:
                found = seen  # the nodes notice by themselves that the store fails
            if found != seen:
                seen = found
                self.on_hint("", ())
            await asyncio.sleep(POLL)
        self._polling = None

    # Telling

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        """Sent at the end of this turn of the event loop, with all that is added until then."""
        known = self._outgoing.get(node, set())
        self._outgoing[node] = None if known is None or not streams else known | set(streams)
        if self._sending is None:
            try:
                self._sending = asyncio.get_running_loop().create_task(self._send())
            except RuntimeError:
                self._outgoing.clear()  # no event loop runs: the nodes find out by looking

    async def _send(self) -> None:
        try:
            while self._outgoing:
                hints, self._outgoing = self._outgoing, {}
                here = {node: hinted for node, hinted in hints.items() if self._listeners.get(node)}
                for node, hinted in here.items():
                    self._tell(node, hinted)
                words = [(self._listener.channel(node), _word(hints[node])) for node in hints.keys() - here.keys()]
                if not words or not self.tells:
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


def _word(hinted: Hinted) -> str:
    word = " ".join([HINT, *(hinted or ())])
    return word if len(word.encode()) <= MAX_WORD else HINT
