"""Sends wake-ups between the processes of one SQLite file.

Each node that listens has a Unix datagram socket in the folder of the locks; a hint is one datagram with the ids of
streams. Datagrams may be lost, and some systems have none, so each process also polls the number that SQLite changes
when another process has written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from perdure._core.ids import NodeId, StreamId
from perdure.store.interface import HintListener
from perdure.store.sqlite.locks import Locks

POLL = 0.1
"""Seconds between two polls while datagrams work: a lost one costs that much."""

POLL_ALONE = 0.02
"""The same where there are no datagrams: 10 ms in the middle, for half a percent of a core."""

QUIET = 0.25
"""Seconds between two hints to read everything while datagrams work."""

MAX_DATAGRAM = 8 << 10
"""Bytes, about 350 ids. A node with more streams to read reads everything."""

MAX_PATH = 100
"""Bytes in the address of a socket, on every system that has them (104 to 108)."""

AT_ONCE = 64
"""Datagrams read in one go; systems queue 10 to 512."""

FIRST_PAUSE, LAST_PAUSE = 0.001, 0.064
"""Seconds before a hint is sent again to a node whose queue is full, doubled each time; after the last it is lost."""

Hinted = set[StreamId] | None
"""The streams to read; `None`: all."""


@dataclass(slots=True, eq=False)
class _Subscription:
    listeners: list[HintListener] = field(default_factory=list)
    socket: socket.socket | None = None

    def notify(self, hinted: Hinted) -> None:
        streams = () if hinted is None else tuple(hinted)
        for listener in list(self.listeners):
            listener(streams)


class SqliteHints:
    """Notifies listeners. `look` returns a number that changes when another process has written, or `None` if that is
    not known now."""

    def __init__(self, locks: Locks, *, look: Callable[[], int | None]) -> None:
        self._locks = locks
        self._look = look
        self._subscriptions: dict[NodeId, _Subscription] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._seen: int | None = None
        self._news = False
        self._notified = 0.0
        self._out: socket.socket | None = None
        self._outgoing: dict[NodeId, Hinted] = {}
        self._pause = FIRST_PAUSE

    # Listening

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        subscription = self._subscriptions.get(node)
        if subscription is None:
            subscription = self._subscriptions[node] = _Subscription(socket=self._bind(node))
            if subscription.socket is not None:
                loop.add_reader(subscription.socket.fileno(), self._read_datagrams, subscription)
        subscription.listeners.append(listener)
        if self._timer is None:
            self._seen = self._look()
            self._timer = loop.call_later(self._interval(), self._tick, loop)

        def stop() -> None:
            if listener in subscription.listeners:
                subscription.listeners.remove(listener)
                if not subscription.listeners:
                    self._end_subscription(node, loop)

        return stop

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for node in list(self._subscriptions):
            self._subscriptions[node].listeners.clear()
            self._end_subscription(node, loop)
        self._outgoing.clear()
        if self._out is not None:
            self._out.close()
            self._out = None

    def _end_subscription(self, node: NodeId, loop: asyncio.AbstractEventLoop) -> None:
        subscription = self._subscriptions.pop(node)
        if subscription.socket is not None:
            loop.remove_reader(subscription.socket.fileno())
            subscription.socket.close()
            with contextlib.suppress(OSError):
                os.unlink(self._locks.socket_path(node))
        if not self._subscriptions and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _bind(self, node: NodeId) -> socket.socket | None:
        if not hasattr(socket, "AF_UNIX"):
            return None
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            receiver.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._locks.socket_path(node))
            with _reachable(self._locks.socket_path(node)) as address:
                receiver.bind(address)
        except OSError:
            receiver.close()
            return None
        return receiver

    def _read_datagrams(self, subscription: _Subscription) -> None:
        hinted: Hinted = set()
        for _ in range(AT_ONCE):
            try:
                message = subscription.socket.recv(MAX_DATAGRAM) if subscription.socket is not None else b""
            except OSError:
                break
            # What cannot be read is a hint all the same.
            streams = {StreamId(stream) for stream in message.decode(errors="replace").split("\n")}
            hinted = _merged(hinted, streams if message else None)
        if hinted is None or hinted:
            subscription.notify(hinted)

    # Polling

    def _interval(self) -> float:
        return POLL if self._by_datagram() else POLL_ALONE

    def _by_datagram(self) -> bool:
        return all(subscription.socket is not None for subscription in self._subscriptions.values())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._interval(), self._tick, loop)
        number = self._look()
        if number is not None and number != self._seen:
            self._seen = number
            self._news = True
        if self._news and (not self._by_datagram() or time.monotonic() - self._notified >= QUIET):
            self._news = False
            self._notified = time.monotonic()
            for subscription in list(self._subscriptions.values()):
                subscription.notify(None)

    # Notifying

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        """Send a hint at the end of this turn of the event loop, with all that are added until then."""
        if not self._outgoing:
            try:
                asyncio.get_running_loop().call_soon(self._send_all)
            except RuntimeError:
                return  # no event loop runs: the listeners find out by polling
        self._outgoing[node] = _merged(self._outgoing.get(node, set()), set(streams) or None)

    def _send_all(self) -> None:
        waiting = {node: hinted for node, hinted in self._outgoing.items() if not self._send(node, hinted)}
        self._outgoing = waiting
        if not waiting:
            self._pause = FIRST_PAUSE
        elif self._pause > LAST_PAUSE:
            self._pause = FIRST_PAUSE
            self._outgoing = {}
        else:
            asyncio.get_running_loop().call_later(self._pause, self._send_all)
            self._pause *= 2

    def _send(self, node: NodeId, hinted: Hinted) -> bool:
        """Send a hint; returns `False` if it should be sent again."""
        if (subscription := self._subscriptions.get(node)) is not None:
            subscription.notify(hinted)
            return True
        try:
            if self._out is None:
                self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._out.setblocking(False)
            with _reachable(self._locks.socket_path(node)) as address:
                message = b"\n".join(stream.encode() for stream in hinted or ())
                self._out.sendto(message if len(message) <= MAX_DATAGRAM else b"", address)
        except BlockingIOError:
            return False
        except (OSError, AttributeError):
            pass  # it does not listen, or there are no such sockets here
        return True


@contextlib.contextmanager
def _reachable(path: str) -> Iterator[str]:
    """Lend a name for a socket that is short enough: for a long path, one through its open folder (Linux)."""
    if len(os.fsencode(path)) <= MAX_PATH:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _merged(one: Hinted, other: Hinted) -> Hinted:
    return None if one is None or other is None else one | other
