"""Bridges a host that speaks MCP over a pipe and a session on a server: every message, both ways, in order.

**Order.** A pipe keeps the order of messages, and HTTP requests do not. So each message leaves when the server has
taken the one before it (`SendQueue`). While the server is away all of them wait, each no longer than the patience from
the moment it was read. Answers to the server's asks and cancellations are sent at once: what stands in front of them
may be waiting for them.

**What the host gets** is written by one writer (`pipes`), and each stream waits until its message is written: only then
its position moves on, so that the next process repeats nothing that was written and leaves out nothing that was not. A
bridge that leaves waits for what is being written (`Output.settle`) before it closes its positions file.
"""

import logging
import math
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import anyio

from perdure._core.codes import INTERNAL_ERROR
from perdure._core.lines import MAX_LINE_BYTES, Line
from perdure._core.reconnect import Patience
from perdure._core.sse import EventTooLarge
from perdure.remote.call import DEPARTURE, failure_answer
from perdure.remote.endpoint import Endpoint, Handshake, Refused, Unavailable
from perdure.remote.link import Link
from perdure.remote.message import Message, error
from perdure.remote.route import ClientLimits, ConnectionLog, Notice, Route
from perdure.remote.stream import Attempts, StrayAnswer
from perdure.stdio.host_side import HostSide, bridge_logs, is_set_level, with_logging
from perdure.stdio.modern_host import ModernHost
from perdure.stdio.pipes import HostGone, Output
from perdure.stdio.resume_broker import ResumeBroker
from perdure.stdio.state_files import KeysFile, PositionsFile, RunningCall
from perdure.telemetry.log_records import log_event

REVOKED = "notifications/perdure/resume_revoked"
#: Seconds for a handshake, however patient the bridge is otherwise: hosts give up after 30 (some editors) or 60 (the
#: TypeScript SDK), and the answer with the reason must arrive earlier.
HANDSHAKE_SECONDS = 25.0
#: Seconds between two attempts at a handshake, at most: the host waits.
HANDSHAKE_DELAY = 2.0
#: Seconds for the last messages of a host that has closed the pipe.
FLUSH_SECONDS = 0.5
#: Seconds between two attempts to reach a server that stays away, for the standalone stream.
MAX_LISTEN_DELAY = 30.0


def limits_of(patience: Patience, handshake_seconds: float | None = None) -> ClientLimits:
    """Return the limits of a bridge whose user has this much patience. The standalone stream is never given up."""
    handshake_seconds = handshake_seconds or HANDSHAKE_SECONDS
    soon = min(patience.max_delay, HANDSHAKE_DELAY)
    seldom = max(patience.max_delay, MAX_LISTEN_DELAY)
    return ClientLimits(
        patience=patience,
        listening=replace(patience, max_time=math.inf, max_tries=sys.maxsize, max_delay=seldom),
        handshake=replace(
            patience,
            max_time=min(patience.max_time, handshake_seconds),
            first_delay=min(patience.first_delay, soon),
            max_delay=soon,
        ),
        handshake_seconds=handshake_seconds,
        message_bytes=MAX_LINE_BYTES,
        counts_from_request=True,
    )


def connection_log(url: str) -> ConnectionLog:
    return ConnectionLog(url, level=logging.WARNING, first_wait=math.inf)


class Bridge:
    """Connects one host with one session, for as long as the host keeps the pipe open. It is the link's program."""

    def __init__(
        self,
        endpoint: Endpoint,
        output: Output,
        broker: ResumeBroker,
        positions: PositionsFile,
        keys: KeysFile,
        *,
        patience: Patience,
        handshake_seconds: float | None = None,
    ) -> None:
        self._output = output
        self._broker = broker
        self._positions = positions
        route = Route(
            endpoint=endpoint,
            limits=limits_of(patience, handshake_seconds),
            complain=self._complain,
            report=connection_log(endpoint.url),
            # Random, so that no id of an earlier process is used again.
            prefix=secrets.token_urlsafe(9),
        )
        self._link = Link(route, self, listening_seconds=DEPARTURE)
        self._modern = ModernHost(self._link, output, keys)
        self._host = HostSide(
            self._link,
            positions,
            initialize=self._initialize,
            finish=self._finish,
            output=output,
            modern=self._modern,
        )
        self._text = ""  #: the host's own `initialize`
        self._is_resumed = False
        self._earlier: dict[str, RunningCall] = {}
        """Calls of an earlier process, until the host has finished its handshake."""
        self._reading = anyio.CancelScope()

    async def run(self, lines: AsyncIterator[Line], on_leaving: Callable[[], None]) -> None:
        """Run until the host closes the pipe. `on_leaving` is called before the last messages are waited for."""
        async with self._link.running() as scope:
            self._link.start(self._host.queue.run)
            self._link.start(self._broker.start)
            self._link.start(self._modern.beat)
            with self._reading:
                try:
                    async for line in lines:
                        await self._host.take(line)
                except HostGone:
                    pass
            await self._output.settle()
            # Messages from now on belong to the next process, so this one must not take its streams.
            self._link.stop_listening()
            self._host.stop()
            on_leaving()
            # What the host said before it closed the pipe still leaves; answers are not waited for.
            with anyio.move_on_after(FLUSH_SECONDS):
                await self._host.queue.flush()
                await self._modern.flush()
            scope.cancel()

    def stop(self) -> None:
        """End as if the host had closed the pipe."""
        self._reading.cancel()

    # The handshake of the host

    async def _initialize(self, host_id: str, text: str, params: dict[str, Any]) -> str:
        """Return the answer to the host's `initialize`: a reattach to the earlier session, or a new one."""
        self._text = text
        link, limits = self._link, self._link.route.limits
        current = link.handshake
        try:
            with anyio.move_on_after(limits.handshake_seconds) as scope:  # one limit for both: the host waits for both
                known = current.session if current else await self._broker.session(limits.handshake)
                begun = await link.begin(text, link.route.new_id(), known=known or "")
                answer, session = begun.answer, begun.session
            if scope.cancelled_caught:
                raise Unavailable(f"no answer within {limits.handshake_seconds:.0f} s")
            if answer.is_error:
                return answer.answering(host_id)
            made = Handshake(session=session, request=params, result=answer.result)
            self._is_resumed = known is not None and session == known
            if known is not None and not self._is_resumed:
                sentence = "the earlier session does not fit the host's version or capabilities; a new one has begun"
                log_event(logging.INFO, "stdio.session_other", sentence)
            link.handshake = made
            if not self._is_resumed:
                await self._get_token(session)
                self._positions.begin(session)
            elif current is None or current.session != session:
                log_event(logging.INFO, "token.resumed", "Session resumed successfully")
                self._positions.recall(session)
                self._earlier = dict(self._positions.positions.calls)  # before this process adds its own
            return with_logging(answer.answering(host_id), made)
        except Unavailable as unavailable:
            link.route.report(Notice.WAITING, str(unavailable))
            found = failure_answer(host_id, unavailable)
        except Refused as refused:
            link.route.report(Notice.REFUSED, str(refused), reason=refused.reason)
            found = failure_answer(host_id, refused)
        except Exception as failure:  # any error: the host waits
            self.fail(failure)
            found = error(host_id, INTERNAL_ERROR, f"{type(failure).__name__}: {failure}")
        return found.text

    async def _finish(self, text: str) -> None:
        """Pass on the host's `initialized`. In a resumed session the server ignores it."""
        await self._host.sender.send(text.encode())
        handshake = self._link.handshake
        if handshake is None or handshake.initialized:
            return
        handshake.initialized = True
        if handshake.session:
            await self._link.listen(position=self._positions.positions.position, is_new=not self._is_resumed)
        if self._is_resumed:
            for wire_id, running in self._earlier.items():
                self._link.start(self._host.read_to_end, wire_id, running)
            self._earlier = {}

    async def _get_token(self, session: str) -> None:
        """Get the first resume token of a new session; the host waits for one attempt at most."""

        async def later() -> None:
            attempts = Attempts(self._link.route.limits.listening)
            while self._link.handshake is not None and self._link.handshake.session == session:
                attempts.failed("the broker does not answer")
                await attempts.wait()
                if await self._broker.get_first_token(session):
                    return

        if not await self._broker.get_first_token(session):
            self._link.start(later)

    # The link's program

    async def take(self, message: Message) -> None:
        """Write the messages of a stream to the host, before its position is advanced."""
        if message.method == REVOKED:
            sentence = "another process used a resume token of this session; a new one is asked for"
            log_event(logging.WARNING, "stdio.revoked", sentence)
            if self._link.handshake is not None:
                self._link.start(self._get_token, self._link.handshake.session)
        elif (text := self._host.to_host(message)) is not None:
            await self._output.deliver(text)

    async def _complain(self, error: Exception) -> None:
        if not isinstance(error, StrayAnswer | EventTooLarge):  # a stream that ends with too large an event says so
            log_event(logging.WARNING, "stdio.misheard", f"the server sent something that is not a message: {error}")

    def move(self, position: str | None, retry: int | None) -> None:
        self._positions.move(position)

    async def lose_position(self) -> None:
        return None  # the connection log reports it

    async def replace(self, gone: Handshake) -> Handshake:
        made = await self._link.begin_again(self._text, gone)  # the host judges what the server agrees to
        is_own = bridge_logs(made)
        sticky = [text for text in self._positions.positions.sticky if not (is_own and is_set_level(text))]
        await self._link.bring_up(made, sticky)
        return made

    async def on_replaced(self, handshake: Handshake) -> None:
        self._positions.begin(handshake.session)
        await self._get_token(handshake.session)
        for ask in self._host.close_asks():
            params = f'{{"requestId":{ask},"reason":"the session is gone"}}'
            await self._output.write(f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}')

    def fail(self, error: Exception) -> None:
        """Log the exception of a task; the other tasks continue."""
        if isinstance(error, HostGone):
            self.stop()
        else:
            log_event(logging.ERROR, "stdio.failed", f"something unforeseen: {type(error).__name__}: {error}")
