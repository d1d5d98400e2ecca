"""Serves one session in this process: its record, its streams and its runtime.

Several processes may hold the same session, and share what is in the store.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

from perdure._core import mail, session_tasks, sticky
from perdure._core.codes import POSITION_LOST
from perdure._core.durable_calls import client_of
from perdure._core.early_answers import OwnTools, call_named, is_cancelled_by_id
from perdure._core.ids import Kind, NodeId, SessionId, StreamId, parse_stream_id
from perdure._core.jsonrpc import Notification, Request, Response, coerce_id, error_payload
from perdure._core.losses import Visits, incarnation_of, read_call
from perdure._core.settling import NOTHING_KEPT, UpstreamCall
from perdure._core.states import SESSION, CallState, SessionState, SessionStep, advance
from perdure.errors import NodeGone, PerdureError, SessionEnded, StoreError, StoreUnavailable
from perdure.log.nodes import mail_to
from perdure.log.stream import Stream, Streams
from perdure.sessions.context import ServerContext, Stamp
from perdure.sessions.early_answers import OWN_CALL
from perdure.sessions.home import Home, NoHome
from perdure.sessions.keyed_calls import CallKey
from perdure.sessions.ledger import Call, kept_name, name_of, progress_token, request_of
from perdure.sessions.orphans import Orphans
from perdure.sessions.record_keeper import RecordKeeper
from perdure.sessions.retention import RetainedStreams
from perdure.sessions.runtime_link import OnEnd, RuntimeLink, node_of_ask
from perdure.store.interface import open_call, paged, stream_by_id
from perdure.store.records import CallRecord, Event, SessionRecord, StreamRecord, UsageRecord
from perdure.store.steps import Append, ChangeSession, DropStream, EndSession, LeaveReader, OpenStream, Release, Step
from perdure.telemetry.log_records import log_event

CancelWaiting = Callable[[mail.Cancelled], Awaitable[None]]

FirstAnswer = Callable[[StreamRecord], bytes]
"""Makes the response that a request gets at once, of the record of its stream."""


class Session:
    __slots__ = (
        "_users",
        "call_streams",
        "context",
        "home",
        "id",
        "is_durable_call",
        "keeper",
        "link",
        "name",
        "orphans",
        "retained",
        "seen",
        "standalone",
        "waits",
    )

    def __init__(
        self,
        context: ServerContext,
        record: SessionRecord,
        standalone: StreamRecord | None,
        call_streams: Streams,
        on_end: OnEnd,
        *,
        stamp: Stamp,
        waits: bool = False,
        kept: Sequence[UsageRecord] = (),
    ) -> None:
        self.context = context
        self.id: SessionId = record.id
        self.keeper = RecordKeeper(context, record, stamp)
        """The owner of the session's record; all parts of the session share it."""
        self.name = self.keeper.name
        self.is_durable_call = self.keeper.is_durable_call
        self.seen = context.clock()  # the caller has it loaded because its client, or a call, is about to use it
        """When its client last used the session here."""
        is_opening = record.state is SessionState.OPENING
        self.home: Home | NoHome = (
            NoHome(context, record.id)
            if standalone is None
            else Home(context, self.keeper, lambda: self.link.runtime.on_home_moved(), standalone, is_opening)
        )
        self.standalone = self.home.standalone
        self.call_streams = call_streams
        """The table of this node; the session's own are `streams`."""
        self.retained = RetainedStreams(context.limits, kept)
        visits = Visits()
        self.link = RuntimeLink(context, self.keeper, self.home, call_streams, visits, on_end)
        self.orphans = Orphans(context, self.keeper, self.home, self.link, visits)
        self.waits = waits
        """Calls of this session wait for their principal to come back."""
        self._users = 0

    @property
    def record(self) -> SessionRecord:
        return self.keeper.record

    @property
    def state(self) -> SessionState:
        return self.keeper.record.state

    def in_use(self) -> Self:
        """Keep the session in memory during a `with` block."""
        return self

    def __enter__(self) -> None:
        self._users += 1

    def __exit__(self, *_: object) -> None:
        self._users -= 1

    @property
    def streams(self) -> Mapping[StreamId, Stream]:
        return self.call_streams.of(self.id)

    @property
    def is_connected(self) -> bool:
        return self.standalone.readers.present or any(s.readers.present for s in self.streams.values())

    @property
    def is_busy(self) -> bool:
        """Whether it must stay in memory, because only this object knows of something under way."""
        return bool(self._users or len(self.link.calls) or self.home.waiting) or self.is_connected

    def touch(self) -> None:
        keeper = self.keeper
        self.seen = keeper.active = self.context.clock()
        if keeper.record.state is SessionState.DORMANT:
            keeper.update(state=advance(SESSION, keeper.record.state, SessionStep.CLIENT_CAME_BACK))

    async def come_back(self) -> None:
        """Note that the client is here. If it was away for so long that the home was released, this node becomes it."""
        rested = self.keeper.record.state is SessionState.DORMANT
        self.touch()
        if rested:
            await self.home.claim()

    def held_stream(self, stream_id: StreamId) -> Stream | None:
        return self.standalone if self.standalone.id == stream_id else self.streams.get(stream_id)

    @property
    def asks_by_round(self) -> bool:
        """Whether it is a durable call that waits for input of a client without tasks, which may never come again."""
        if not self.record.is_task or not self.link.asks.open:
            return False
        return not client_of(self.record.client_params).takes_tasks and not self.is_connected

    async def show_to_client(self) -> None:
        """Keep a durable call after its end, because its client is about to learn its id. Raises `StoreError`."""
        if not self.record.is_task:
            step = self.keeper.change(ChangeSession(session=self.id, is_task=True))
            try:
                await self.context.journal.write(step)
            finally:
                self.keeper.on_written(step)

    # The record, and what follows from it

    def refresh(self, stored: SessionRecord, stamp: Stamp | None, *, reattached: bool = False) -> None:
        """Take over the changes of other processes, or (`reattached`) of the client that comes back here."""
        before = self.record
        self.keeper.stamp = stamp
        if before.state is SessionState.OPENING or stored.incarnation < before.incarnation:
            return  # still this node's alone; or read before the client reattached
        self.keeper.take_in(stored)
        stored = self.record
        if level := sticky.changed_log_level(before.sticky, stored.sticky):
            self.link.runtime.repeat(level)
        if stored.incarnation > before.incarnation:
            self.begin_again(reattached=reattached)
        if stored.initialized and not before.initialized:
            self.link.runtime.mark_initialized()

    def begin_again(self, *, reattached: bool) -> None:
        """End the readers of a client that has begun again, here (`reattached`) or at another node, and repeat the open
        asks."""
        hub = self.context.hub
        for stream in (self.standalone, *self.streams.values()):
            if stream.is_sealed:
                continue  # what is over ends by itself, with its answer
            if (reader := stream.readers.reader) is not None:
                reader.end()
                hub.detach(reader)  # at once, as if it had left in this moment
            # A reader at another node may be of this incarnation already, unless the client came here.
            if reattached and stream.writer is not None and (remote := stream.readers.remote) is not None:
                stream.set_remote_reader(None, arrival=hub.arrive())
                reading = mail.Reading(session=self.id, stream=stream.id)
                self.context.put(LeaveReader(stream=stream.id, reader=remote.reader), *mail_to([remote.node], reading))
        self.orphans.reattached()  # after its readers have left, so that they count as lost before
        if reattached:
            self.orphans.give_time()
        self.link.asks.repeat(list(self.link.asks.open))

    async def rest(self) -> None:
        """Drop the runtime and release the home of an unused session; record and answers stay (R8). The runtime goes
        first, because its messages after the release would be refused."""
        self.orphans.close()
        await self.link.runtime.drop()
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
        """End the session: answer its running calls, end its readers, and delete everything stored."""
        if self.state is SessionState.ENDED:
            return
        advance(SESSION, self.state, step)
        self.keeper.end(step.value)
        await self._close(reason)
        self.context.counters.sessions_ended += 1
        end = EndSession(session=self.id, time=self.context.clock(), reason=step.value)
        posts = mail_to(self.context.nodes.others, mail.Ended(session=self.id, reason=step.value))
        try:
            await self.context.journal.write(end, *posts)  # from then on every process answers 404
        except StoreError:
            self.context.put(end)  # it is written when the store is back; or only a node was gone, and it is written

    async def was_ended(self, reason: str) -> None:
        if self.state is not SessionState.ENDED:
            self.keeper.end(reason)
            for stream in list(self.streams.values()):
                stream.unlog()
            await self._close("The session has ended")

    async def _close(self, reason: str) -> None:
        self.orphans.close()
        await self.link.aclose(reason)
        for stream in (self.standalone, *self.streams.values()):
            if not stream.is_sealed:
                stream.expire()
            if stream.readers.reader is not None and not (stream.writer is not None and stream.is_sealed):
                stream.readers.reader.end()

    # What the client sends beside its requests: it may come to one node and concern another

    async def receive(
        self, message: Notification | Response, origin: object, *, size: int, cancel_waiting: CancelWaiting
    ) -> None:
        """Take a message that is not a request, at the node where it belongs. Late and unknown answers and
        cancellations are dropped, because a client may send them. `size`: the bytes of memory that the message takes.
        `cancel_waiting` is called for a call that waits at this node for its principal."""
        here = self.context.node
        if isinstance(message, Response):
            if await self.link.asks.answer(message, origin):
                return
            node, answer = node_of_ask(message.id), mail.AskAnswered(session=self.id, response=message.raw)
            asked = node not in (None, here) and await self._may_be_asked(message.id, node)
            if node is None or not asked or not await self._send_mail(node, answer):
                log_event(logging.DEBUG, "ask.unknown", "an answer to no open ask was dropped", session=self.name)
            return
        params = message.params or {}
        if message.method == "notifications/cancelled":
            request_id = params.get("requestId")
            if isinstance(request_id, str | int) and not isinstance(request_id, bool):
                # An id of this incarnation; or the name of a call that is an orphan, which holds in any incarnation.
                numbers = self.link.calls.numbers(self.record.incarnation, request_id)
                named = [*((number, request_id) for number in numbers), read_call(request_id)]
                for incarnation, name in filter(None, named):
                    cancelled = mail.Cancelled(session=self.id, incarnation=incarnation, request_id=name, params=params)
                    if await self.cancel_call(cancelled, cancel_waiting):
                        return
            return
        # Progress of an ask is for the node that waits for it.
        ask = params.get("progressToken") if message.method == "notifications/progress" else None
        node = node_of_ask(ask) if ask is not None else await self.runner()
        if node in (None, here):
            self.link.pass_on(message, origin, size=size)
        elif (node is not None and ask is None) or (node is not None and await self._may_be_asked(ask, node)):
            notified = mail.Notified(session=self.id, method=message.method, params=message.params)
            await self._send_mail(node, notified)

    async def runner(self) -> NodeId | None:
        """The node that runs the session's requests, if that is another one: its home."""
        if not self.context.runtimes.runs_at_home or self.is_durable_call or await self.home.claim():
            return None
        return self.standalone.node

    async def asker(self, request: Request) -> NodeId | None:
        """The other node, where there are any, that runs the call of this session for whose end a request waits, if
        that call may ask its client there: only that node can write on the stream of the request. A wait ends in any
        case, so it goes there only for a question that is open: the node may be stuck."""
        params, wanted, store = request.params or {}, None, self.context.store
        is_result = request.method == session_tasks.RESULT and self.link.serves_tasks
        if is_result:
            wanted = params.get("taskId")
        elif request.method == "tools/call" and str(params.get("name")).startswith(OwnTools().wait):
            wanted = None if self.context.early is None else call_named(params)
        stream_id = parse_stream_id(wanted)
        stream = None if stream_id is None else await stream_by_id(store, stream_id)
        if stream is None or stream.session != self.id or stream.sealed or stream.node == self.context.node:
            return None
        return stream.node if is_result or any(ask.call == stream.id for ask in await store.asks(self.id)) else None

    async def _may_be_asked(self, ask: object, node: NodeId | None) -> bool:
        """Whether an ask may wait at a node: a node that holds may have asks that are not in the store yet."""

        async def is_stored() -> bool:
            return any(record.id == ask for record in await self.context.store.asks(self.id))

        # Read twice: it may have been written before nothing was held.
        return await is_stored() or node in await self.context.nodes.holders() or await is_stored()

    async def cancel_call(self, cancelled: mail.Cancelled, cancel_waiting: CancelWaiting) -> bool:
        """Cancel a call, in any process. Returns whether it exists."""
        context, incarnation, request_id = self.context, cancelled.incarnation, cancelled.request_id
        if self.link.cancel(request_id, incarnation=incarnation, params=cancelled.params):
            return True
        if context.nodes.alone and not self.waits:
            return False
        row = await open_call(context.store, self.id, incarnation=incarnation, request_id=request_id)
        if row is None:
            for node in (holders := await context.nodes.holders()):
                await self._send_mail(node, cancelled)  # one of them may run it, and have its row in memory alone
            if not holders:
                row = await open_call(context.store, self.id, incarnation=incarnation, request_id=request_id)
        stream = None if row is None else await stream_by_id(context.store, row.stream)
        if stream is None or not stream.node:
            return False
        if stream.answered and not is_cancelled_by_id(cancelled.params, stream.id):
            return True  # its request has its answer
        if stream.node == context.node:
            await cancel_waiting(cancelled)
        else:
            await self._send_mail(stream.node, cancelled)
        return True

    async def _send_mail(self, node: NodeId, message: mail.Message) -> bool:
        """Send mail. Returns whether the node still exists."""
        if self.context.journal.refuses:
            raise StoreUnavailable  # as requests are refused, so that what clients send does not pile up
        try:
            await self.context.journal.write(*mail_to([node], message))
        except NodeGone:
            return False
        return True

    # Streams that are over

    def on_call_settled(self, stream: Stream) -> None:
        """Count a call's stream that has left memory: it is over and not read, or another node writes it."""
        if stream.writer is not None and not self.is_durable_call:  # else the node that writes it retains it
            self.orphans.ended(stream)
            self.retained.add(stream.usage(idle=stream.readers.remote is None), time=self.context.clock())
            self.enforce_limits()

    def enforce_limits(self) -> None:
        if steps := self.retained.enforce([self.standalone, *self.streams.values()]):
            self.context.put(*steps)

    # `log.reader.History`

    @property
    def tells_by_log(self) -> bool:
        return self.keeper.tells_by_log

    async def lost_answers(self, stream: Stream) -> Sequence[bytes]:
        # Read memory first, because held events move from there to the store.
        finals = stream.tail.finals
        stored = paged(lambda after: self.context.store.read(stream.id, after=after, limit=1_000))
        finals += [event async for event in stored if event.final]
        answered = {json.loads(event.payload).get("id") for event in finals}
        message = "The answer to this request is no longer retained"
        return [
            error_payload(call.request_id, POSITION_LOST, message, {"method": call.method})
            for call in await self.context.store.calls(stream.session, stream=stream.id)
            if call.request_id not in answered
        ]

    async def progress_token(self, stream: Stream) -> int | str | None:
        here = [call for call in self.link.calls.all_running() if call.stream is stream]
        if here:
            return self.link.token_at_client(here[0])
        rows = await self.context.store.calls(self.id, stream=stream.id)
        request = request_of(rows[0]) if len(rows) == 1 else None
        token = None if request is None else progress_token(request)
        if token is None or incarnation_of(rows[0].incarnation) == self.record.incarnation:
            return token
        return f"{rows[0].incarnation}:{token}"

    async def closed_asks(self, events: Sequence[Event]) -> set[int]:
        # Every ask contains these letters; what does not contain them need not be read.
        marked = {event.seq: json.loads(event.payload) for event in events if b'"ask-' in event.payload}
        asked = {
            seq: ask for seq, message in marked.items() if "method" in message and node_of_ask(ask := message.get("id"))
        }
        if not asked:
            return set()
        nodes, still = self.context.nodes, set(self.link.asks.open)
        for waiting in await self.context.store.asks(self.id):
            if waiting.node in (self.context.node, *nodes.others) or not await nodes.is_dead(waiting.node):
                still.add(waiting.id)
        return {seq for seq, ask in asked.items() if ask not in still}


class Intake:
    """Accepts new requests of a session: reserves their ids, writes their rows with the stream for the answers, and
    opens the calls. Leaving its block frees ids that were reserved and not opened. Requests belong to the incarnation
    in which they came; the session may move to a later one meanwhile."""

    def __init__(
        self,
        session: Session,
        requests: Sequence[Request],
        *,
        incarnation: int | None = None,
        size: int = 0,
        key: CallKey | None = None,
    ) -> None:
        """`size`: the bytes of memory that the requests take together. `key`: of the one request, in a session."""
        self._session = session
        self._is_joined = key is not None and key.is_taken
        self._own_key = None if self._is_joined else key
        """The key that determines the stream's id: that of the first request with a key."""
        self._requests = requests
        self._incarnation = session.keeper.record.incarnation if incarnation is None else incarnation
        self._keys = [(self._incarnation, coerce_id(request.id)) for request in requests]
        self._size = size
        self._is_open = False

    def __enter__(self) -> Self:
        """Reserve the ids. Raises `Duplicate`."""
        self._session.link.calls.reserve(self._keys, self._requests, size=self._size)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_open:
            self._session.link.calls.release(*self._keys)

    async def accept(
        self,
        bodies: Sequence[bytes],
        *steps: Step,
        most_calls: int | None = None,
        seen: int | None = None,
        stream_id: StreamId | None = None,
        digest: bytes = b"",
        first: FirstAnswer | None = None,
        node: NodeId | None = None,
    ) -> tuple[Stream, list[Call]]:
        """Write the rows and the stream, after other steps; only then may the runtime see the requests. `most_calls`:
        the limit for all processes; the caller has counted the calls here. `seen`: raise `StaleRecord` if the session's
        record has another revision by now. `stream_id`: the stream's id where it is made of a key; raise `StaleFence`
        if the stream exists. `digest`: of the request. `first`: the answer that the request gets at once, in the same
        commit, while the call goes on. `node`: another node, which is mailed in the same commit and runs the requests;
        until it does, the rows say that they wait, and the stream is followed here: the caller pins it in the same turn
        of the event loop."""
        session, context, own = self._session, self._session.context, self._own_key
        if own is not None:
            stream_id, digest = own.stream, own.digest
        unique, record = stream_id is not None, session.keeper.record
        stream = context.new_stream(session.id, Kind.CALL)
        stream = stream if stream_id is None else replace(stream, id=stream_id)
        stream = stream if node is None else replace(stream, node=node)
        hints = [self._hint(request) for request in self._requests]
        rows = tuple(
            [
                CallRecord(
                    session=session.id,
                    incarnation=self._incarnation,
                    request_id=request.id,
                    stream=stream.id,
                    method=request.method,
                    request=body,
                    principal=record.owner,
                    state=CallState.RUNNING if node is None else CallState.WAITING,
                    digest=digest,
                    name=kept_name(request.params),
                    upstream=hint.encode(),
                )
                for request, body, hint in zip(self._requests, bodies, hints, strict=True)
            ]
        )
        steps += (OpenStream(record=stream, calls=rows, most_calls=most_calls, seen=seen, unique=unique),)
        if first is not None:
            event = Event(1, stream.opened, first(stream), True)
            steps += (Append(stream=stream.id, fence=stream.fence, events=(event,), answered=1),)
        if node is not None:
            steps += (*mail_to([node], mail.HandedOver(session=session.id, stream=stream.id)),)
        try:
            # Only the store can tell whether a key is taken. A client that is told an id at once may come back with it.
            await context.journal.write(*steps, may_be_held=not unique and first is None)
            if session.keeper.record.state is SessionState.ENDED:
                raise SessionEnded
        except BaseException:
            if not unique:  # else it may be another writer's
                context.put(DropStream(stream=stream.id))  # it may have been written all the same
            raise
        if own is not None:
            context.keyed.keep(context, record, own)
        context.counters.call_streams += 1
        context.counters.calls_accepted += len(rows)
        if first is not None:
            stream = replace(stream, last=1, answered=1)
        if node is not None:
            return session.call_streams.follow(stream), []
        entered = session.call_streams.write(stream, owed=len(rows), calls=rows)
        self._is_open = True
        calls = session.link.calls.open(self._keys, self._requests, stream=entered)
        for call, hint in zip(calls, hints, strict=True):
            call.upstream = hint
        return entered, calls

    def _hint(self, request: Request) -> UpstreamCall:
        """Whether the request's tool may run again, if the runtime knows that now: it may be gone when it is asked."""
        if request.method != "tools/call":
            return NOTHING_KEPT
        if self._is_joined:
            return OWN_CALL
        session = self._session
        name = name_of(request.params) or ""
        if name in (session.link.own_tools or ()):
            return OWN_CALL
        may = session.context.runtimes.may_run_again(session.keeper.record, name)
        return NOTHING_KEPT if may is None else UpstreamCall(may_run_again=may)
