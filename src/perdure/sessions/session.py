"""A session that this process serves: its record, its streams, its runtime, and what it keeps of them.

Several processes may hold the same session. What they share is in the store; the record here is what was read, with
this process's own changes on top until they are written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from perdure._core import mail, sticky
from perdure._core.ids import SessionId, StreamId
from perdure._core.revisions import REVISIONS
from perdure._core.states import SESSION, SessionState, SessionStep, advance
from perdure.errors import PerdureError, StoreError
from perdure.log.journal import Steps
from perdure.log.stream import Stream, Streams
from perdure.sessions import replay as replayed
from perdure.sessions.context import ServerContext
from perdure.sessions.exchange import Exchange
from perdure.sessions.home import Home
from perdure.sessions.kept_streams import KeptStreams, usage_of
from perdure.sessions.ledger import Call
from perdure.sessions.orphans import Orphans
from perdure.sessions.reattach import begin_incarnation
from perdure.sessions.record import RecordKeeper
from perdure.store.base import (
    ChangeSession,
    EndSession,
    Event,
    KeptRecord,
    Release,
    SendMail,
    SessionRecord,
    Step,
    Stick,
    StreamRecord,
)
from perdure.telemetry.events import log_event


class Session:
    """One session, as this process has it."""

    __slots__ = (
        "_users",
        "call_streams",
        "context",
        "exchange",
        "home",
        "keeper",
        "orphans",
        "retained",
        "seen",
        "standalone",
        "tells_by_log",
        "waits",
    )

    def __init__(
        self,
        context: ServerContext,
        record: SessionRecord,
        standalone: StreamRecord,
        call_streams: Streams,
        *,
        stamp: object,
        waits: bool = False,
        kept: Sequence[KeptRecord] = (),
    ) -> None:
        self.context = context
        self.keeper = RecordKeeper(context, record, stamp)
        self.seen = context.clock()  # the caller has it loaded because its client, or a call, is about to use it
        """When its client was last here."""
        self.home = Home(self, standalone, is_new=record.state is SessionState.OPENING)
        self.standalone = self.home.standalone
        self.call_streams = call_streams
        """The table of this node: those of its own calls are `streams`."""
        self.retained = KeptStreams(context.limits)
        self.retained.load(kept)
        self.exchange = Exchange(self)
        self.orphans = Orphans(self)
        self.waits = waits
        """Calls of it wait for their principal to come back."""
        self.tells_by_log = _declares_logging(record.result)
        """The server declared logging, so a log message may tell of a gap."""
        self._users = 0

    @property
    def record(self) -> SessionRecord:
        return self.keeper.record

    @property
    def id(self) -> SessionId:
        return self.keeper.record.id

    @property
    def name(self) -> str:
        """Enough of its id to tell it from others in a log. The whole of it is a secret."""
        return self.keeper.record.id[:8]

    @property
    def state(self) -> SessionState:
        return self.keeper.record.state

    def put(self, *steps: Step) -> None:
        """Write steps for which no caller waits."""
        self.context.journal.put(Steps(steps))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the session in memory: a request, or a chore, has yet to do something with it."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    @property
    def streams(self) -> Mapping[StreamId, Stream]:
        """The streams of its calls that are in memory."""
        return self.call_streams.of(self.record.id)

    @property
    def is_connected(self) -> bool:
        return self.standalone.readers.present or any(s.readers.present for s in self.streams.values())

    @property
    def is_busy(self) -> bool:
        """Whether it must stay in memory: something is under way that only this object knows of."""
        return bool(self._users or len(self.exchange.calls) or self.home.waiting) or self.is_connected

    def touch(self) -> None:
        """The client is here."""
        self.keeper.touch()
        self.seen = self.keeper.active
        if self.state is SessionState.DORMANT:
            self.keeper.update(state=advance(SESSION, self.state, SessionStep.CLIENT_CAME_BACK))

    def mark_waiting(self, waits: bool) -> None:
        """Calls of it wait for their principal to come back, or do so no longer."""
        self.waits = waits

    async def come_back(self) -> None:
        """The client is here; if it was away for so long that its home went, this node is the home now."""
        rested = self.state is SessionState.DORMANT
        self.touch()
        if rested:
            await self.home.claim()

    def held_stream(self, stream_id: StreamId) -> Stream | None:
        """A stream of it that is in memory."""
        return self.standalone if self.standalone.id == stream_id else self.streams.get(stream_id)

    def record_change(self, call: Call, result: bytes) -> Step | None:
        """What a successful answer changes in the record, to be written together with it."""
        method = call.request.method
        if method == "initialize" and self.state is SessionState.OPENING:
            version = json.loads(result).get("protocolVersion")
            if version not in REVISIONS:
                return None  # a middleware answered in place of the SDK; the session does not open
            state = advance(SESSION, self.state, SessionStep.HANDSHAKE_DONE)
            self.tells_by_log = _declares_logging(result)
            return self.keeper.change(ChangeSession(session=self.id, state=state, version=version, result=result))
        if method in sticky.METHODS:
            request = sticky.encode(call.request)
            self.exchange.runtime.on_sticky_accepted(request)
            return self.keeper.change(Stick(session=self.id, request=request))
        return None

    # The record, and what follows from it

    def refresh(self, stored: SessionRecord, stamp: object, *, reattached: bool = False) -> None:
        """Take over what other processes have changed; or that the client has reattached, here and now."""
        before = self.record
        self.keeper.stamp = stamp
        if before.state is SessionState.OPENING or stored.incarnation < before.incarnation:
            return  # still this node's alone; or read before the client reattached
        self.keeper.take_in(stored)
        stored = self.record
        if level := sticky.changed_log_level(before.sticky, stored.sticky):
            self.exchange.runtime.repeat(level)
        if stored.incarnation > before.incarnation:
            begin_incarnation(self, here=reattached)
        if stored.initialized and not before.initialized:
            self.exchange.runtime.mark_initialized()

    async def rest(self) -> None:
        """No client has used it for long: its runtime and its home go, record and answers stay (R8).

        The runtime goes first, because what it still said behind the release would be refused.
        """
        self.orphans.close()
        await self.exchange.runtime.drop()
        if self.home.is_here:
            steps: list[Step] = [Release(stream=self.standalone.id, fence=self.standalone.fence)]
            if self.state is SessionState.ACTIVE:
                state = advance(SESSION, self.state, SessionStep.GRACE_PASSED)
                steps.insert(0, ChangeSession(session=self.id, active=self.keeper.active, state=state))
            try:
                await self.context.journal.write(*steps)
            except PerdureError as failure:  # another node is the home; or no node will know that this one is not
                log_event(logging.INFO, "session.rest", f"a home could not be let go of: {failure}", session=self.name)

    async def end(self, step: SessionStep, reason: str) -> None:
        """End the session: running calls get their answer, readers their end, and everything stored goes."""
        if self.state is SessionState.ENDED:
            return
        advance(SESSION, self.state, step)
        self.keeper.end(step.value)
        await self._close(reason)
        self.context.counters.sessions_ended += 1
        told = mail.encode(mail.Ended(session=self.id, reason=step.value))
        end = EndSession(session=self.id, time=self.context.clock(), reason=step.value)
        posts = [SendMail(node=node, message=told) for node in self.context.nodes.others]
        try:
            await self.context.journal.write(end, *posts)  # from then on every process answers 404
        except StoreError:
            self.put(end)  # it is written when the store is back; or only a node was gone, and it is written

    async def was_ended(self, reason: str) -> None:
        """It was ended by another process: let go of it."""
        if self.state is not SessionState.ENDED:
            self.keeper.end(reason)
            for stream in list(self.streams.values()):
                stream.unlog()
            await self._close("The session has ended")

    async def _close(self, reason: str) -> None:
        self.orphans.close()
        await self.exchange.aclose(reason)
        for stream in (self.standalone, *self.streams.values()):
            if not stream.is_sealed:
                stream.expire()
            if stream.reader is not None and not (stream.writer is not None and stream.is_sealed):
                stream.reader.end()

    # Streams that are over

    def on_call_settled(self, stream: Stream) -> None:
        """A call's stream is not in memory any more: it is over and not read, or another node writes it."""
        if (writer := stream.writer) is not None:  # else the node that writes it retains it
            self.orphans.ended(stream)
            self.retained.add(usage_of(stream, writer), time=self.context.clock())
            self.enforce_limits()

    async def lost_answers(self, stream: Stream) -> Sequence[bytes]:
        """Error responses for the calls of a stream whose answers are no longer retained."""
        return await replayed.lost_answers(self, stream)

    async def closed_asks(self, events: Sequence[Event]) -> set[int]:
        """Of replayed events, those that are asks which wait for no answer any more."""
        return await replayed.closed_asks(self, events)

    def enforce_limits(self) -> None:
        if steps := self.retained.enforce([self.standalone, *self.streams.values()]):
            self.put(*steps)


def _declares_logging(result: bytes) -> bool:
    return bool(result) and "logging" in json.loads(result).get("capabilities", {})
