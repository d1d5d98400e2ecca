"""Shares the event loop and the log between calls that send without a pause and everything else of the process.

A call may run ahead of the log by hundreds of events. If hundreds of calls did so in one turn of the event loop, that
turn would take seconds, and so would the commit behind it, for which every quick call waits twice: with its row, and
with its answer. So all calls together have a share of each turn, and of what is queued to be written. A call that is a
little ahead when the share is used up waits in a line, in which each has its turn.

Events and bytes are counted, not time: a busy machine does not make the shares smaller.
"""

import asyncio
from collections import deque

AHEAD = 4
"""Events that a call may be ahead of the log without a place in the line: one that sends now and then never waits."""

CROWD = 64
"""Events of all calls in one turn while others wait in the line, nearly: about five milliseconds. A request takes about
ten turns. Fewer would make commits small, and those cost more for each event."""

ALONE = 256
"""Events in one turn while none waits: as many as a call may run ahead (`RUN_AHEAD`), so one that is alone does not
notice."""

QUEUED_BYTES = 256 * 1024
"""Bytes of events that may be queued to be written; again as many as a call may run ahead."""


class Turns:
    """The turns of the event loop, as far as calls send in them."""

    __slots__ = ("_line", "_queued", "_scheduled", "_sent")

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._scheduled = False
        self._sent = 0
        """Events in this turn."""
        self._queued = 0
        """Bytes of the events that were sent since the journal last took everything."""

    def sent(self, size: int) -> None:
        """A call has sent an event."""
        self._sent += 1
        self._queued += size

    @property
    def is_over(self) -> bool:
        """The share of this turn is used up."""
        if not self._scheduled:
            self._schedule()  # somebody sends, so the next turn is another one
        return self._sent >= (CROWD if self._line else ALONE) or self._queued >= QUEUED_BYTES

    async def wait(self) -> None:
        """Wait in the line."""
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        if not self._scheduled:
            self._schedule()
        await place

    def on_taken(self) -> None:
        """The journal has taken everything that was queued."""
        self._queued = 0
        if self._line and not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """The next turn has come. One goes on in it, and sends as much as there is a share of; if it sends less, this
        is called again all the same, and the turn was a short one."""
        self._scheduled = False
        self._sent = 0
        if self._queued >= QUEUED_BYTES:
            return  # `on_taken` goes on
        while self._line:
            if not (place := self._line.popleft()).done():  # it may have been cancelled
                place.set_result(None)
                break
        if self._line:
            self._schedule()
