"""Reads lines from the host, and writes lines to it.

Each has its own thread that does nothing but read or write. Pipes are not set to non-blocking: that would hold for
every other process that has the same file open, as with a terminal, and plain files and Windows have no such mode.

Nothing piles up here. The reading thread waits until what it read was taken; each writer waits until the host's pipe
has its line, so that there is at most one line for each stream and each call that is followed.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import select
import threading
from collections.abc import AsyncIterator, Callable

import anyio

from perdure._core.lines import MAX_LINE_BYTES, Cutter, Line

_CHUNK = 1 << 16
#: Bytes that are written in one go, if that many wait: the pipe itself takes 64 KiB.
_BATCH = 1 << 20
#: Seconds without progress after which the bridge checks whether the host has left. Longer
#: than a message waits for a server that answers (`DEPARTURE`), shorter than hosts wait for us to end (2 s).
STUCK = 0.75
#: Seconds for a host that leaves to take what is being written. It may have stopped reading, and waits 2 s for our end.
SETTLE_SECONDS = 0.5


class HostGone(Exception):
    """The host has closed the pipe that the bridge writes to."""


async def lines(descriptor: int, *, on_left: Callable[[], None] = lambda: None) -> AsyncIterator[Line]:
    """Yield the host's lines, until it closes the pipe. `on_left` is called if it has and its lines are not taken."""
    loop = asyncio.get_running_loop()
    handed: asyncio.Queue[list[Line] | None] = asyncio.Queue(maxsize=1)
    taken = 0

    def hand(found: list[Line] | None, *, is_end: bool = False) -> None:
        handing, before = asyncio.run_coroutine_threadsafe(handed.put(found), loop), -1
        while True:
            try:
                return handing.result(STUCK)
            except TimeoutError:
                if taken == before and (is_end or _is_left(descriptor)):
                    loop.call_soon_threadsafe(on_left)
                before = taken

    def read_chunk() -> bytes:
        while True:
            try:
                return os.read(descriptor, _CHUNK)
            except BlockingIOError:  # another process that has the same file open made it so
                select.select([descriptor], [], [])
            except OSError:
                return b""  # a pipe that cannot be read has ended

    def read() -> None:
        cutter = Cutter(MAX_LINE_BYTES)
        try:
            while chunk := read_chunk():
                if found := cutter.feed(chunk):
                    hand(found)
            # What came after the last line end: a host that closes the pipe right after a message meant it.
            hand(cutter.feed(b"\n"), is_end=True)
            hand(None, is_end=True)
        except (RuntimeError, asyncio.CancelledError, concurrent.futures.CancelledError):
            return  # the loop is closed: this process ends

    threading.Thread(target=read, name="perdure-stdin", daemon=True).start()
    while (found := await handed.get()) is not None:
        for line in found:
            yield line
            taken += 1


def _is_left(descriptor: int) -> bool:
    """Whether the other end is closed, whatever still waits to be read."""
    if not hasattr(select, "poll"):
        return False  # Windows: seen when all is read
    closed = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
    poll = select.poll()
    poll.register(descriptor, closed)
    return any(event & closed for _, event in poll.poll(0))


class Output:
    """Writes to the host, one batch of lines at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        self._gone = False
        self._is_settling = False
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="perdure-stdout", daemon=True).start()

    async def write(self, text: str) -> None:
        """Returns when the host's pipe has the line; raises `HostGone` when it never will. "" waits for those ahead."""
        if self._gone:
            raise HostGone
        written: asyncio.Future[None] = self._loop.create_future()
        self._waiting.put((text.encode("utf-8", "surrogatepass") + b"\n" if text else b"", written))
        await written

    async def deliver(self, text: str) -> None:
        """Write a message; the caller then notes its position. One that arrives while the output settles belongs to the
        next process."""
        if self._is_settling:
            await anyio.sleep_forever()
        await self.write(text)

    async def settle(self) -> None:
        """Wait until all pending lines are written, and noted by their writers.

        A host can have a line, and close the pipe, before the thread that wrote the line gets to say so.
        """
        self._is_settling = True
        with anyio.move_on_after(SETTLE_SECONDS), contextlib.suppress(HostGone):
            await self.write("")
        self._is_settling = False

    def _run(self) -> None:
        while not self._gone:
            taken, size = [self._waiting.get()], 0
            while not self._waiting.empty() and size < _BATCH:
                taken.append(self._waiting.get())
                size += len(taken[-1][0])
            try:
                self._write(b"".join(line for line, _ in taken))
            except OSError:
                self._gone = True
            try:
                self._loop.call_soon_threadsafe(self._tell, taken)
            except RuntimeError:
                return  # the loop is closed: this process ends

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])

    def _tell(self, taken: list[tuple[bytes, asyncio.Future[None]]]) -> None:
        """Notify the writers. This runs in the loop, as `write` does: lines that were put in before `_gone` was seen
        are taken out here."""
        while self._gone and not self._waiting.empty():
            taken.append(self._waiting.get())
        for _, written in taken:
            if not written.done():
                written.set_exception(HostGone()) if self._gone else written.set_result(None)
