"""Limits the waits of uvicorn on a connection that have no end otherwise.

uvicorn with httptools collects headers without limit and waits for them for ever. The endpoint judges complete
headers; the limit here is for headers that never become complete.
"""

import asyncio
import re
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from perdure.http.event_stream import BREAK_OFF

#: A client that has connected sends its headers at once; nginx and Apache give it 60 and 20 to 40 seconds.
HEAD_SECONDS = 30.0

#: The connection of a peer that takes nothing of an answer for so long is closed.
UNREAD_SECONDS = 60.0

#: The interval in which a connection that is handed over is checked for unsent bytes of its last answer.
FLUSH_SECONDS = 0.005

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
#: The same, cut off by the end of a segment.
_UPGRADE_BEGUN = re.compile(rb"\r(\n(u(p(g(r(a(d(e)?)?)?)?)?)?)?)?\Z", re.IGNORECASE)
_TOO_LARGE = b"the request's headers are too large"
_ANSWER_431 = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


def _without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """Take the upgrade header out of a request's head, as a server that does not know the protocol may (RFC 9110, 7.8).

    httptools would take the body for that protocol's. Java's HTTP client asks for HTTP/2 with every request. Returns
    what may be parsed now, and the few bytes at the end that only the next segment makes clear.
    """
    end = data.find(b"\r\n\r\n")
    held = b""
    if end < 0:
        if begun := _UPGRADE_BEGUN.search(data):
            data, held = data[: begun.start()], begun[0]
        end = len(data)
    if b"upgrade:" in data[:end].lower():
        data = _UPGRADE.sub(b"\r\nx-upgrade:", data[:end]) + data[end:]
    return data, held


class _HeadWithBody(asyncio.Transport):
    """The transport of one response: writes its head together with the first part of its body, if that follows in the
    same turn of the event loop. uvicorn writes each by itself, and a quick call has no more than the two."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: bytes | None = None
        """The head; empty once it is written."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._held is None:
            self._held = bytes(data)
            self._loop.call_soon(self._flush)
        else:
            held, self._held = self._held, b""
            self._transport.write(held + data if held else data)

    def _flush(self) -> None:
        if self._held and not self._transport.is_closing():
            held, self._held = self._held, b""
            self._transport.write(held)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()


class Connection(HttpToolsProtocol):
    """An HTTP connection with limits for what uvicorn would wait for without end: headers that are not complete, and
    answers that the peer does not read."""

    # Not in the object's dictionary: with uvicorn's own it would take 1,600 bytes more, of each open event stream.
    __slots__ = ("giving", "head", "head_timer", "held", "overtaken", "unread_timer")

    head_seconds = HEAD_SECONDS
    unread_seconds = UNREAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head: int | None = None
        """Bytes of headers so far, without the chunk in which they began; None when no headers are under way."""
        self.head_timer: asyncio.TimerHandle | None = None
        self.unread_timer: asyncio.TimerHandle | None = None
        self.held = b""
        """The end of the last segment, if it may be the beginning of an upgrade header."""
        self.giving: socket.socket | None = None
        """The socket to the processes with newer code, one of which gets this connection as soon as it is idle."""
        self.overtaken: tuple[RequestResponseCycle, ...] = ()
        """Requests that were not answered yet when another one came after them on the same connection."""

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def announce_close(self) -> None:
        """Close after the answer to the current request, and say so in its head. If the head was sent already the
        connection stays: the head says that the client may use it again, and perhaps it does so in this moment."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def hand_over(self, giving: socket.socket) -> None:
        """Give this connection to another process as soon as it is idle. Its peer does not notice.

        Nothing is lost: further bytes of the peer wait in the system until the other process reads them.
        """
        self.giving = giving
        self._hand_over_if_idle()

    def _hand_over_if_idle(self) -> None:
        has_begun = self.head is not None or self.held or self.pipeline or (self.cycle and self.cycle.more_body)
        is_answered = self.is_idle and all(cycle.response_complete for cycle in self.overtaken)
        if self.giving is None or has_begun or not is_answered or self.transport.is_closing():
            return
        self.flow.pause_reading()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(FLUSH_SECONDS, self._hand_over_if_idle)
            return
        try:
            socket.send_fds(self.giving, [b"c"], [self.transport.get_extra_info("socket").fileno()])
        except OSError:  # no process has read what was sent before: the connection is served here
            self.flow.resume_reading()
        else:
            self.transport.close()  # this process's part of it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_complete()
        if self.unread_timer is not None:
            self.unread_timer.cancel()
        if self.timeout_keep_alive_task is not None:  # uvicorn forgets it when the peer resets the connection
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)
        # uvicorn disconnects the last request only; an earlier event stream would stay without a reader for ever.
        for cycle in self.overtaken:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def on_message_begin(self) -> None:
        self.head = -1
        super().on_message_begin()
        self.scope[BREAK_OFF] = self.transport.abort  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._head_is_complete()
        before = self.cycle
        super().on_headers_complete()
        self.cycle.transport = _HeadWithBody(self.transport, self.loop)
        if before is not None and not before.response_complete:
            self.overtaken = (*(cycle for cycle in self.overtaken if not cycle.response_complete), before)

    def data_received(self, data: bytes) -> None:
        if self.head is not None or self.cycle is None or not self.cycle.more_body:
            data, self.held = _without_upgrade(self.held + data)
        super().data_received(data)
        if self.head is None:
            # Line ends between two requests begin no head, but stop uvicorn's clock for idle connections.
            if self.head_timer is None and self.cycle is not None and self.is_idle and not self.cycle.more_body:
                self._wait_for_head()
            return
        # The first chunk may carry the end of an earlier request, so it does not count.
        self.head = 0 if self.head < 0 else self.head + len(data)
        if self.head > (self.config.h11_max_incomplete_event_size or 0):
            self._head_is_complete()
            # While an answer is on its way there is no room for another one.
            if self.is_idle:
                self.transport.write(_ANSWER_431)
            self.transport.close()
        elif self.head_timer is None:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._hand_over_if_idle()
        # Closing, now or when the connection has been idle, waits until all is sent: for ever, if it is not read.
        if self.unread_timer is None and (unread := self.transport.get_write_buffer_size()):
            self.unread_timer = self.loop.call_later(self.unread_seconds, self._check_unread, unread)

    def _check_unread(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        self.unread_timer = None
        if unread >= before and self.is_idle:
            self.transport.abort()
        elif unread:
            self.unread_timer = self.loop.call_later(self.unread_seconds, self._check_unread, unread)

    def _wait_for_head(self) -> None:
        self.head_timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def _head_is_complete(self) -> None:
        self.head = None
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
