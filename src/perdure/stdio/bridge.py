"""The bridge between a host that speaks MCP over a pipe and a session on a server: every message, both ways, in order.

**Order.** A pipe keeps the order of messages, and HTTP requests do not. So each message leaves when the server has
taken the one before it (`send_queue`). While the server is away all of them wait, each no longer than the patience from
the moment it was read. Answers to the server's asks and cancellations are sent at once: what stands in front of them
may be waiting for them.

**What the host gets** is written by one writer (`pipes`), and each stream waits until its message is written: only then
its position moves on, so that the next process repeats nothing that was written and leaves out nothing that was not.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import anyio

from perdure._core.reconnect import Patience
from perdure._core.sse import EventTooLarge
from perdure.remote.call import DEPARTURE, Sender
from perdure.remote.endpoint import Endpoint, Handshake
from perdure.remote.link import Link
from perdure.remote.message import Message
from perdure.remote.stream import Limits, StrayAnswer
from perdure.stdio import log_capability
from perdure.stdio.connection_log import ConnectionLog
from perdure.stdio.dialogue import Dialogue
from perdure.stdio.earlier_calls import EarlierCalls
from perdure.stdio.handshake import HostHandshake
from perdure.stdio.host_side import HostSide
from perdure.stdio.notes import Notes
from perdure.stdio.pipes import MAX_LINE_BYTES, HostGone, Line, Output
from perdure.stdio.resume_broker import ResumeBroker
from perdure.stdio.send_queue import SendQueue
from perdure.telemetry.events import log_event

REVOKED = "notifications/perdure/resume_revoked"
#: Seconds for a handshake, however patient the bridge is otherwise: hosts give up after 30 (some editors) or 60 (the
#: TypeScript SDK), and an answer that says what is wrong must come before that.
HANDSHAKE_SECONDS = 25.0
#: Seconds between two attempts at a handshake, at most: the host waits.
HANDSHAKE_DELAY = 2.0
#: Seconds between two looks at a server that stays away, for the standalone stream, on which no request waits.
LOOKS = 30.0


def limits_of(patience: Patience) -> Limits:
    """The limits of a bridge whose user has this much patience. The standalone stream is never given up."""
    soon = min(patience.max_delay, HANDSHAKE_DELAY)
    return Limits(
        patience=patience,
        listening=replace(patience, max_time=math.inf, max_tries=sys.maxsize, max_delay=max(patience.max_delay, LOOKS)),
        handshake=replace(
            patience,
            max_time=min(patience.max_time, HANDSHAKE_SECONDS),
            first_delay=min(patience.first_delay, soon),
            max_delay=soon,
        ),
        handshake_seconds=HANDSHAKE_SECONDS,
        message_bytes=MAX_LINE_BYTES,
        counts_from_request=True,
    )


class Bridge:
    """One host's connection to one session, for as long as the host keeps the pipe open. It is the link's program."""

    def __init__(
        self, endpoint: Endpoint, output: Output, broker: ResumeBroker, notes: Notes, *, patience: Patience
    ) -> None:
        self._output = output
        self._broker = broker
        self._notes = notes
        self._dialogue = Dialogue()
        self._link = Link(
            endpoint,
            limits_of(patience),
            self,
            ConnectionLog(endpoint.url),
            # Random, so that no id of an earlier process is used again.
            prefix=secrets.token_urlsafe(9),
            listening_seconds=DEPARTURE,
        )
        sender = Sender(self._link)
        self._earlier = EarlierCalls(self._link, notes, self.take, output.write)
        self._handshake = HostHandshake(self._link, sender, broker, notes, self._earlier)
        self._queue = SendQueue(self._link.start)
        self._host = HostSide(
            self._link, sender, self._queue, self._handshake, self._dialogue, notes, take=self.take, write=output.write
        )
        self._reading = anyio.CancelScope()

    async def run(self, lines: AsyncIterator[Line], on_leaving: Callable[[], None]) -> None:
        """Until the host closes the pipe. `on_leaving` is called before the last messages are waited for."""
        async with self._link.running() as scope:
            self._link.start(self._queue.run)
            self._link.start(self._broker.start)
            with self._reading:
                try:
                    async for line in lines:
                        await self._host.take(line)
                except HostGone:
                    pass
            # What comes from now on is for the next process, which must not find its streams taken from it.
            self._link.stop_listening()
            self._earlier.stop()
            self._host.stop()
            on_leaving()
            # What the host said before it closed the pipe still leaves; answers are not waited for.
            await self._queue.flush()
            scope.cancel()

    def stop(self) -> None:
        """End as if the host had closed the pipe."""
        self._reading.cancel()

    # The link's program

    async def take(self, message: Message) -> None:
        """Write what a stream brought to the host, before its position moves on."""
        if message.method == REVOKED:
            self._link.start(self._replace_token)
        elif (text := self._dialogue.to_host(message)) is not None:
            await self._output.write(text)

    async def complain(self, error: Exception) -> None:
        if not isinstance(error, StrayAnswer | EventTooLarge):  # a stream that ends with too large an event says so
            log_event(logging.WARNING, "stdio.misheard", f"the server sent what is not a message: {error}")

    def move(self, position: str | None, retry: int | None) -> None:
        self._notes.move(position)

    async def lose_position(self) -> None:
        return None  # the connection log has said so

    def initialize(self, gone: Handshake) -> str:
        return self._handshake.text

    async def prepare(self, handshake: Handshake) -> None:
        return None  # the host judges what the server agrees to

    def sticky(self, handshake: Handshake) -> list[str]:
        is_own = log_capability.is_own(handshake)
        return [text for text in self._notes.noted.sticky if not (is_own and log_capability.is_set_level(text))]

    async def adopt(self, handshake: Handshake) -> None:
        self._notes.begin(handshake.session)
        await self._handshake.get_token(handshake.session)
        for ask in self._dialogue.close_asks():
            params = f'{{"requestId":{ask},"reason":"the session is gone"}}'
            await self._output.write(f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}')

    def fail(self, error: Exception) -> None:
        """What a task raises costs that task alone."""
        if isinstance(error, HostGone):
            self.stop()
        else:
            log_event(logging.ERROR, "stdio.failed", f"something unforeseen: {type(error).__name__}: {error}")

    async def _replace_token(self) -> None:
        log_event(
            logging.WARNING,
            "stdio.revoked",
            "another process used a resume token of this session; a new one is asked for",
        )
        if self._link.handshake is not None:
            await self._handshake.get_token(self._link.handshake.session)
