"""Knows who reads a stream, here or at another node, how far that reader has got, and which writers wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from perdure.store.base import ReaderRecord

if TYPE_CHECKING:
    from perdure.log.reader import Reader

RUN_AHEAD = 128
"""Events a call may send before they are accepted. More is faster, and the longer an event waits at full load."""


class Readership:
    """The readers of one stream; there is one at a time."""

    __slots__ = ("delivered", "lost_at", "marked_unread", "pause_at", "reader", "remote", "waiting")

    def __init__(self, *, delivered: int, marked_unread: bool) -> None:
        self.reader: Reader | None = None
        """The one at this node."""
        self.remote: ReaderRecord | None = None
        """The one at another node, as the store tells."""
        self.delivered = delivered
        """How far the readers have got."""
        self.marked_unread = marked_unread
        """The store has the stream down as a call's whose reader was lost before the end."""
        self.lost_at = 0
        """When the last reader was lost, as an arrival number of the hub's."""
        self.pause_at = 0
        """The sequence number at which the writer has to wait."""
        # Mostly empty, and there are thousands of streams at rest: a tuple, which costs nothing when empty.
        self.waiting: tuple[asyncio.Future[bool], ...] = ()

    @property
    def present(self) -> bool:
        """A reader is there, at this node or at another one."""
        return self.reader is not None or self.remote is not None

    @property
    def through(self) -> int | None:
        """As far as the present reader has got; `None` if there is none."""
        if self.reader is not None:
            return self.reader.cursor
        return None if self.remote is None else self.remote.seq

    def advance(self, through: int) -> None:
        """A reader has got this far, at whatever node."""
        if through > self.delivered:
            self.delivered = through

    def lose(self, arrival: int) -> None:
        """The stream has no known reader; if none was lost earlier, one counts as lost at this moment."""
        self.lost_at = self.lost_at or arrival

    def drop_remote(self) -> ReaderRecord | None:
        """The newest reader is at this node: the other one is overtaken, and given back."""
        remote, self.remote = self.remote, None
        return remote

    def end_beyond(self, end: int) -> None:
        """End a reader that was shown what the log will not have: its writer held it, and has lost its claim or died.
        The reader's client learns that from its position, when it comes again."""
        if self.reader is not None and self.reader.cursor > end:
            self.reader.end()

    # Writers that wait

    def update(self, visible: int, most_ahead: int | None, over: bool) -> None:
        """Reckon how far the writer may go, and let those that wait look again; called whenever something that it
        depends on has moved. `most_ahead`: events that it may be ahead of the present reader."""
        pause_at = visible + RUN_AHEAD
        if most_ahead is not None and (through := self.through) is not None and through + most_ahead < pause_at:
            pause_at = through + most_ahead
        self.pause_at = pause_at
        if self.waiting:
            waiting, self.waiting = self.waiting, ()
            for future in waiting:
                if not future.done():
                    future.set_result(over)

    async def wait(self) -> bool:
        """Wait until something has moved. Tells whether the stream was over at that moment."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting += (future,)
        return await future
