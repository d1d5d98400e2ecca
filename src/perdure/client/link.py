"""The transport below the SDK's client: one session, its streams, and what is remembered of it.

What goes out is in `outgoing.py`, what comes in in `incoming.py`, how a session begins in `session.py`. Here is what
they share, and how long it lives.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage

from perdure._core.gap import Gap
from perdure._core.reconnect import Patience
from perdure.client.before import Before
from perdure.client.incoming import Incoming, OnGap
from perdure.client.outgoing import Outgoing
from perdure.client.session import Handshaking
from perdure.client.standalone import Standalone
from perdure.client.teller import Teller
from perdure.remote.endpoint import Wire
from perdure.remote.heartbeat import Pulse
from perdure.remote.state import Handshake, State
from perdure.remote.state_writer import Keeper
from perdure.telemetry.events import log_event

#: Seconds for the farewell: a server that does not answer does not keep the program from ending.
FAREWELL_SECONDS = 5.0

#: Seconds that a new session waits for its standalone stream. Some servers answer a GET only with their first event.
LISTENING_SECONDS = 1.0

Inbound = MemoryObjectReceiveStream[SessionMessage | Exception]
Outbound = MemoryObjectSendStream[SessionMessage]


class Link:
    """One client's connection to one server, for as long as the client lives."""

    def __init__(
        self, wire: Wire, keeper: Keeper, *, patience: Patience, on_gap: OnGap | None, ends_session: bool
    ) -> None:
        self.wire = wire
        self.patience = patience
        self.pulse = Pulse()
        self.teller = Teller(wire, patience)
        self.before = Before(self)
        self.incoming = Incoming(self, on_gap)
        self.on_renewed: Callable[[types.InitializeResult], None] | None = None
        self._keeper = keeper
        self._ends_session = ends_session
        self._handshaking = Handshaking(self)
        self._outgoing = Outgoing(self, self._handshaking)
        self._standalone: Standalone | None = None
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._tasks: anyio.abc.TaskGroup

    @property
    def state(self) -> State:
        return self._keeper.state

    @property
    def handshake(self) -> Handshake | None:
        return self._keeper.state.handshake

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Inbound, Outbound]]:
        """What the SDK's client reads and writes (its `Transport`)."""
        inbox, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outbound, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        self.incoming.inbox = inbox
        async with inbox, inbound, outbound, outbox, anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._outgoing.run, outbox)
            try:
                yield inbound, outbound
            finally:
                with anyio.move_on_after(FAREWELL_SECONDS, shield=True):
                    await self.teller.idle()
                    # Whoever still runs would find the session gone, and begin another.
                    self._tasks.cancel_scope.cancel()
                    await self._farewell()
                self._tasks.cancel_scope.cancel()

    def start(self, task: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run something for as long as the link lives."""
        self._tasks.start_soon(task, *arguments)

    def changed(self) -> None:
        self._keeper.changed()

    def moved(self) -> None:
        self._keeper.moved()

    def new_id(self) -> str:
        # Not a number, also not as a string: the SDK takes "7" for 7.
        return f"{self._keeper.state.start}-{self._run}.{next(self._numbers)}"

    def listen(self, *, is_new: bool = False) -> None:
        """Read the standalone stream of the session that there is now, and no other."""
        if self._standalone is not None:
            self._standalone.scope.cancel()
            self._standalone = None
        if self.handshake is not None and self.handshake.session:
            self._standalone = Standalone(self, self.handshake, is_new=is_new)
            self.start(self._standalone.run)

    async def listening(self) -> None:
        """Wait until the standalone stream is open, or cannot be: what a server without a log says before is lost."""
        if self._standalone is not None:
            with anyio.move_on_after(LISTENING_SECONDS):
                await self._standalone.has_begun.wait()

    def listen_again(self) -> None:
        """The server is there: a standalone stream that was given up is worth another try."""
        if self._standalone is not None and self._standalone.has_given_up:
            self.listen()

    async def renew(self, gone: Handshake | None) -> JSONRPCError | None:
        return await self._handshaking.renew(gone)

    async def tell(self, body: dict[str, Any]) -> bool:
        return await self._outgoing.tell(body)

    async def take(self, message: JSONRPCMessage, call: str | None, tool: str | None) -> None:
        await self.incoming.take(message, call, tool)

    async def deliver(self, message: JSONRPCMessage) -> bool:
        return await self.incoming.deliver(message)

    async def complain(self, error: Exception) -> None:
        await self.incoming.complain(error)

    async def tell_gap(self, gap: Gap) -> None:
        await self.incoming.gap(gap)

    async def _farewell(self) -> None:
        handshake = self.handshake
        self.before.close()
        if handshake is None or not self._ends_session:
            return
        try:
            if handshake.session:
                await self.wire.delete(handshake)
        except Exception as error:  # whatever it is, the client leaves
            log_event(
                logging.INFO, "client.not_deleted", f"the server could not be told that the session has ended: {error}"
            )
        self._keeper.state.forget_session()
