"""One session: its record, its streams, and what it keeps of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from perdure import sticky
from perdure._core.ids import Kind, StreamId, new_stream_id
from perdure._core.jsonrpc import Request
from perdure._core.revisions import REVISIONS, Revision
from perdure._core.states import SESSION, LogState, SessionState, SessionStep, StreamStep, advance
from perdure.errors import SessionEnded
from perdure.exchange import Exchange
from perdure.house import House
from perdure.journal import Steps
from perdure.ledger import POSITION_LOST, Call, error_payload, rows
from perdure.retained import Retained
from perdure.store.base import DropStream, EndSession, Event, OpenStream, PutSession, SessionRecord, Step, StreamRecord
from perdure.streams import Stream


class Session:
    """A session that this process serves."""

    __slots__ = (
        "_tells_by_log",
        "_written_active",
        "active",
        "exchange",
        "house",
        "record",
        "retained",
        "seen",
        "standalone",
        "streams",
    )

    def __init__(self, house: House, record: SessionRecord, standalone: StreamRecord) -> None:
        self.house = house
        self.record = record
        self.seen = self.active = self._written_active = record.active
        self.standalone = house.stream(standalone)
        self.streams: dict[StreamId, Stream] = {}
        self.retained = Retained(house.limits)
        self.exchange = Exchange(self)
        self._tells_by_log = False

    @property
    def revision(self) -> Revision:
        return REVISIONS[self.record.version]

    @property
    def name(self) -> str:
        """Enough of its id to tell it from others in a log. The whole of it is a secret."""
        return self.record.id[:8]

    @property
    def state(self) -> SessionState:
        return self.record.state

    @property
    def closes_early(self) -> bool:
        """A tool may close its connection before the answer is there."""
        return bool(self.record.version) and self.revision.closes_early and not self.house.settings.json_response

    @property
    def tells_by_log(self) -> bool:
        """The server declared logging, so a log message may tell of a gap."""
        return self._tells_by_log

    @property
    def connected(self) -> bool:
        return self.standalone.reader is not None or any(s.reader is not None for s in self.streams.values())

    @property
    def busy(self) -> bool:
        return bool(len(self.exchange.calls)) or self.connected

    def touch(self) -> None:
        """The client is here."""
        self.seen = self.active = self.house.clock()
        if self.state is SessionState.DORMANT:
            self.update(state=advance(SESSION, self.state, SessionStep.CLIENT_CAME_BACK))

    # Accepting requests

    async def accept(self, requests: Sequence[Request], bodies: Sequence[bytes], *steps: Step) -> list[Call]:
        """Write the ledger rows and the stream that will carry the answers; their ids are reserved already.

        Only then may the runtime see them.
        """
        house, calls = self.house, self.exchange.calls
        record = StreamRecord(
            id=new_stream_id(house.random),
            session=self.record.id,
            kind=Kind.CALL,
            fence=house.fence,
            opened=house.clock(),
        )
        try:
            ledger = rows(requests, bodies, session=self.record, stream=record.id)
            await house.journal.write(*steps, OpenStream(record=record, calls=ledger))
            if self.state is SessionState.ENDED:
                raise SessionEnded
        except BaseException:
            calls.release(requests)
            self.put(DropStream(stream=record.id))  # it may have been written all the same
            raise
        stream = house.stream(record, owed=len(requests))
        stream.on_settled = self._settled
        self.streams[stream.id] = stream
        house.counters.call_streams += 1
        house.counters.calls_accepted += len(requests)
        return calls.open(requests, incarnation=self.record.incarnation, stream=stream)

    def consequence(self, call: Call, result: dict[str, Any]) -> Step | None:
        """What a successful answer changes in the record, to be written together with it."""
        method = call.request.method
        if method == "initialize" and self.state is SessionState.OPENING:
            return self._handshake_done(result)
        if method in sticky.METHODS:
            return PutSession(record=self._changed(sticky=sticky.after(self.record.sticky, call.request)))
        return None

    def _handshake_done(self, result: dict[str, Any]) -> Step | None:
        version = result.get("protocolVersion")
        if version not in REVISIONS:
            return None  # somebody's middleware answered in place of the SDK; the session does not open
        self._tells_by_log = "logging" in result.get("capabilities", {})
        state = advance(SESSION, self.state, SessionStep.HANDSHAKE_DONE)
        return PutSession(
            record=self._changed(state=state, version=version, result=to_json(result, inf_nan_mode="null"))
        )

    # The record

    def put(self, *steps: Step) -> None:
        """Write steps that nobody waits for."""
        self.house.journal.put(Steps(steps))

    def update(self, **changes: Any) -> None:
        """Change the record, and write it."""
        self.put(PutSession(record=self._changed(**changes)))

    def _changed(self, **changes: Any) -> SessionRecord:
        self.record = replace(self.record, active=self.active, **changes)
        self._written_active = self.active
        return self.record

    def keep_fresh(self) -> None:
        """Write the time of the last activity if it has moved; retention goes by it."""
        if self.busy:
            self.active = self.house.clock()
        # Of a session in use it is enough to know the time roughly; the last one is written when it is left.
        slack = self.house.settings.replay_window / 8 if self.busy else 0.0
        # While the store fails this would only add to what is held, round after round.
        if self.active - self._written_active > slack and self.house.journal.state is LogState.HEALTHY:
            self.update()

    def go_dormant(self) -> None:
        self.update(state=advance(SESSION, self.state, SessionStep.GRACE_PASSED))

    async def end(self, step: SessionStep, reason: str) -> None:
        """End the session: running calls get their answer, readers their end, and everything stored goes."""
        self.record = replace(self.record, state=advance(SESSION, self.state, step))
        await self.exchange.aclose(reason)
        self.standalone.advance(StreamStep.SESSION_ENDED)
        if self.standalone.reader is not None:
            self.standalone.reader.end()
        self.put(EndSession(session=self.record.id, time=self.house.clock()))
        self.house.counters.sessions_ended += 1

    # Streams that are over

    def _settled(self, stream: Stream) -> None:
        """A call's stream is over and nobody reads: from now on the store alone knows it."""
        self._let_go(stream)
        if self.state is not SessionState.ENDED:
            self.retained.add(stream.kept, time=self.house.clock())
            self.enforce_limits()

    def _let_go(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        self.streams = self.streams or {}

    def enforce_limits(self) -> None:
        if steps := self.retained.enforce([self.standalone, *self.streams.values()]):
            self.put(*steps)

    async def find_stream(self, stream_id: StreamId) -> Stream | None:
        """A call's stream of this session, from memory or from the store."""
        if (stream := self.streams.get(stream_id)) is not None:
            return stream
        record = await self.house.journal.within_time(self.house.store.stream(stream_id))
        if record is None or record.session != self.record.id or record.kind is not Kind.CALL:
            return None
        if (stream := self.streams.get(stream_id)) is not None:
            return stream  # another resume was faster
        stream = self.house.stream(record)
        stream.on_settled = self._let_go
        self.streams[stream_id] = stream
        return stream

    async def lost_answers(self, stream: Stream) -> Sequence[bytes]:
        """Error responses for the calls of a stream whose answers are no longer retained."""
        answered = {json.loads(event.payload).get("id") for event in await self._finals(stream)}
        asked = await self.house.journal.within_time(self.house.store.requests(stream.id))
        message = "The answer to this request is no longer retained"
        return [
            error_payload(request_id, POSITION_LOST, message, {"method": method})
            for request_id, method in asked
            if request_id not in answered
        ]

    async def _finals(self, stream: Stream) -> list[Event]:
        finals: list[Event] = []
        after = 0
        while events := await self.house.journal.read(stream.id, after=after, limit=1_000):
            finals += [event for event in events if event.final]
            after = events[-1].seq
        return finals
