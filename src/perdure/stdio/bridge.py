"""Between a host that speaks MCP over a pipe and a session on a server: every message, both ways, in order.

**Ids.** Hosts count their requests from 0 or 1 each time they start their server. On the wire a request has a name that
is never used again, made of this instance's random part and a number, and the host gets its answer under the id that it
gave. Progress tokens are treated alike. So nothing of an earlier instance can be taken for something of this one.

**Order.** A pipe keeps the order of messages, and HTTP requests do not. So each message leaves when the server has
taken the one before it (`departed`). While the server is away all of them wait, each no longer than `patience` from the
moment it was read. Answers to what the server asked and cancellations are sent at once: what stands in front of them
may be waiting for them.

**What the host gets** is written by one writer, and whoever has something for the host waits until it is written: only
then the position of its stream moves on, so that the next instance repeats nothing that was written and leaves out
nothing that was not.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

from perdure._core import splice
from perdure._core.reconnect import Patience
from perdure.remote.heartbeat import Heartbeat as Pulse
from perdure.remote.old_wire import Wire
from perdure.remote.state import Handshake
from perdure.stdio import failures as troubles
from perdure.stdio.before import Before
from perdure.stdio.call import DEPARTURE
from perdure.stdio.departures import Departures, Job
from perdure.stdio.handshaking import Handshaking
from perdure.stdio.host_side import HostSide
from perdure.stdio.messages import FromServer
from perdure.stdio.notes import Notes
from perdure.stdio.pipes import HostGone, Line, Output
from perdure.stdio.renewing import Renewing
from perdure.stdio.resuming import Resuming
from perdure.stdio.standalone import Standalone
from perdure.telemetry.events import log_event

REVOKED = "notifications/perdure/resume_revoked"


class Bridge:
    """One host's connection to one session, for as long as the host keeps the pipe open."""

    def __init__(
        self, wire: Wire, output: Output, resuming: Resuming, notes: Notes, *, patience: Patience, credentials: bool
    ) -> None:
        self.wire = wire
        self.resuming = resuming
        self.notes = notes
        self.patience = patience
        self.credentials = credentials
        self.teller = troubles.Teller()
        self._output = output
        self.handshaking = Handshaking(self)
        self._renewing = Renewing(self, self.handshaking)
        self.pulse = Pulse()
        self.before = Before(self)
        self._instance = secrets.token_urlsafe(9)
        self._numbers = itertools.count(1)
        self._departures = Departures(self._start_job)
        self._host = HostSide(self, self._departures)
        self._reading = anyio.CancelScope()
        self._hearing: set[anyio.CancelScope] = set()
        self._tasks: anyio.abc.TaskGroup

    @property
    def handshake(self) -> Handshake | None:
        return self.handshaking.handshake

    async def run(self, lines: AsyncIterator[Line], leaving: Callable[[], None]) -> None:
        """Until the host closes the pipe. `leaving` is called before the last messages are waited for."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._departures.run)
            self.start(self.resuming.start)
            with self._reading:
                await self._read(lines)
            self._hear_no_more()
            leaving()
            # What the host said before it closed the pipe still leaves; answers are not waited for.
            await self._departures.empty()
            self._tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """End as if the host had closed the pipe."""
        self._reading.cancel()

    async def _read(self, lines: AsyncIterator[Line]) -> None:
        try:
            async for line in lines:
                await self._host.take(line)
        except HostGone:
            return

    def _hear_no_more(self) -> None:
        """What comes from now on is for the next instance, which must not find its streams taken from it."""
        for scope in list(self._hearing):
            scope.cancel()
        self._host.end()

    def start(self, task: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run something for as long as the bridge lives. Whatever it raises costs that alone."""

        async def run() -> None:
            try:
                await task(*arguments)
            except HostGone:
                self.stop()
            except Exception as failure:
                log_event(logging.ERROR, "stdio.failed", f"something unforeseen: {type(failure).__name__}: {failure}")

        self._tasks.start_soon(run)

    def _start_job(self, job: Job, left: anyio.Event) -> None:
        self.start(job, left)

    def new_id(self) -> str:
        # Not a number, also not as a string: the SDK takes "7" for 7.
        return f"{self._instance}.{next(self._numbers)}"

    async def renew(self, gone: Handshake | None) -> Exception | None:
        return await self._renewing.renew(gone)

    async def listen(self, *, is_new: bool) -> None:
        """Read the standalone stream from now on. Returns when somebody listens to what the server may ask there."""
        if self.handshake is not None and self.handshake.session:
            standalone = Standalone(self, self.handshake, is_new=is_new)
            self.hear(standalone.run)
            with anyio.move_on_after(DEPARTURE):
                await standalone.has_begun.wait()

    def hear(self, task: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run something for as long as the host listens."""

        async def run() -> None:
            with anyio.CancelScope() as scope:
                self._hearing.add(scope)
                try:
                    await task(*arguments)
                finally:
                    self._hearing.discard(scope)

        self.start(run)

    def changed(self) -> None:
        self.notes.changed()

    def moved(self) -> None:
        self.notes.moved()

    # From the server

    async def take(self, message: FromServer) -> None:
        """What a stream brought, before its position moves on."""
        text: str | None = message.text
        if message.is_request:
            self._host.asked(splice.cut(message.text, "id") or "null")
        elif message.method == "notifications/progress":
            text = self._with_own_token(message)
        elif message.method == "notifications/cancelled":
            text = self._ask_cancelled(message)
        elif message.method == REVOKED:
            self.start(self._open_again)
            text = None
        elif message.method is None:
            text = None  # an answer that nobody waits for on this stream
        if text is not None:
            await self.give(text)

    def _with_own_token(self, message: FromServer) -> str | None:
        own = self._host.token(message.params.get("progressToken"))
        if own is None:
            log_event(logging.DEBUG, "stdio.progress_dropped", "progress of a call that this instance has not made")
            return None
        return splice.replaced(message.text, own, "params", "progressToken")

    def _ask_cancelled(self, message: FromServer) -> str | None:
        """For the host only if it was asked: an earlier instance's questions it has never seen."""
        return message.text if self._host.unasked(splice.cut(message.text, "params", "requestId") or "null") else None

    async def forget_asks(self) -> None:
        """The session is another one: nobody waits for these answers any more."""
        for key in self._host.forget_asks():
            params = f'{{"requestId":{key},"reason":"the session is gone"}}'
            await self.give(f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}')

    async def _open_again(self) -> None:
        log_event(
            logging.WARNING,
            "stdio.revoked",
            "somebody else used a resume token of this session; a new one is asked for",
        )
        if self.handshake is not None:
            await self.handshaking.opened(self.handshake.session)

    async def give(self, text: str) -> None:
        """Hand a message to the host."""
        await self._output.write(text)

    def misheard(self, reason: str) -> None:
        log_event(logging.WARNING, "stdio.misheard", f"the server sent what is no message: {reason}")
