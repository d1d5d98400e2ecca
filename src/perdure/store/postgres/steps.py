"""Turns the steps of a commit into the arguments of `commit_1`, and its answer into refusals."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from perdure._core import retention
from perdure._core.ids import NodeId, SessionId
from perdure._core.states import CallState
from perdure.store import rows
from perdure.store.codec import Payloads
from perdure.store.records import MAX_FORWARDED, MAX_FORWARDED_BYTES, MAX_MAIL, RECORD_VERSION
from perdure.store.steps import (
    Append,
    ChangeSession,
    CloseAsk,
    DropStream,
    EndSession,
    Forward,
    LeaveReader,
    MailReceived,
    OpenAsk,
    OpenStream,
    PutCall,
    PutReader,
    PutSession,
    Reached,
    Release,
    SendMail,
    Step,
    Trim,
)

_OPEN = (CallState.RUNNING, CallState.WAITING)

MAX_SEQ: Final = 2**31 - 1
"""The highest sequence number that a row can hold."""

LONGEST_KEY = 200
"""Bytes of a request's id that are compared as they are. PostgreSQL indexes 2,700 bytes; of a longer id the hash is."""


def stored(text: str) -> bytes:
    """Give a text that a peer may have made as the database holds it."""
    return text.encode("utf-8", "surrogatepass")


def id_key(request_id: int | str) -> bytes:
    """Give the form in which ids of requests are compared."""
    key = rows.id_key(request_id)
    key = key if isinstance(key, bytes) else stored(key)
    # No text begins with this byte.
    return key if len(key) <= LONGEST_KEY else b"\xff" + hashlib.sha256(key).digest()


def caller_key(owner: str, address: str) -> bytes:
    """Give the form in which callers are compared: their names may be long."""
    return hashlib.sha256(stored(owner) + b"\0" + stored(address)).digest()[:16]


# --- Order ----------------------------------------------------------------------------------------------------------

_SESSION_STEPS = (ChangeSession, CloseAsk)
_STREAM_STEPS = (
    Append,
    Trim,
    PutCall,
    Release,
    Reached,
    LeaveReader,
    Forward,
)


def lock_order(steps: Sequence[Step]) -> list[int]:
    """Give the places of the steps in an order in which two commits seldom wait for each other.

    Rows are locked in the order of the steps, until the commit. Steps about different sessions or streams may change
    places; so they are sorted, between those that may not. A stream is opened, and a session put, behind whatever
    came before it: an id may have become free.
    """
    if len(steps) < 2:
        return list(range(len(steps)))
    order: list[int] = []
    run: list[tuple[int, str, int]] = []

    def end_run() -> None:
        order.extend(place for _, _, place in sorted(run))
        run.clear()

    highest = 0
    for place, step in enumerate(steps):
        rank, name = _rank(step)
        if rank < 0 or (isinstance(step, OpenStream | PutSession) and highest > rank):
            end_run()
            highest = 0
        if rank < 0:
            order.append(place)
        else:
            run.append((rank, name, place))
            highest = max(highest, rank)
    end_run()
    return order


def _rank(step: Step) -> tuple[int, str]:
    match step:
        case PutSession():
            return 0, step.record.id
        case OpenStream() | OpenAsk():
            return 1, step.record.session
        case PutReader():
            return 2, step.record.stream
        case SendMail() | MailReceived():
            return 3, step.node
    if isinstance(step, _SESSION_STEPS):
        return 1, step.session
    return (2, step.stream) if isinstance(step, _STREAM_STEPS) else (-1, "")


# --- Arguments ------------------------------------------------------------------------------------------------------


class CommitArguments:
    """The arguments of one commit. The letters, and what each takes from the pools, stand in `schema_1.sql`."""

    def __init__(self, payloads: Payloads, sticky: Mapping[SessionId, tuple[bytes, ...]]) -> None:
        self._payloads = payloads
        self._sticky = dict(sticky)
        self._kinds: list[str] = []
        self._texts: list[str] = []
        self._numbers: list[int] = []
        self._times: list[float] = []
        self._blobs: list[bytes] = []
        self._appends = 0
        self._events: tuple[list[int], list[int], list[float], list[bytes]] = ([], [], [], [])
        self._answers: tuple[list[int], list[int], list[float], list[bytes]] = ([], [], [], [])
        self._mail: tuple[list[int], list[str], list[bytes]] = ([], [], [])

    def add(self, step: Step) -> None:
        _ADD[type(step)](self, step)

    def values(self, writer: int, members: Sequence[NodeId]) -> tuple[Any, ...]:
        pools = (self._texts, self._numbers, self._times, self._blobs)
        steps = ("".join(self._kinds), *pools, *self._events, *self._answers, *self._mail)
        return (writer, members, *steps, MAX_MAIL)

    def _put(
        self,
        kind: str,
        texts: Iterable[str] = (),
        numbers: Iterable[int] = (),
        times: Iterable[float] = (),
        blobs: Iterable[bytes] = (),
    ) -> None:
        self._kinds.append(kind)
        self._texts.extend(texts)
        self._numbers.extend(numbers)
        self._times.extend(times)
        self._blobs.extend(blobs)

    def append(self, step: Append) -> None:
        events = step.events
        first = last = 0
        if events and not step.lost:
            # Of events with a hole those behind it decide: they follow what is there, or the step is refused.
            tail = len(events)
            while tail > 1 and events[tail - 2].seq == events[tail - 1].seq - 1:
                tail -= 1
            events = events[tail - 1 :] if tail > 1 else events
        if events:
            first, last = events[0].seq, events[-1].seq
        numbers = (step.fence, first, last, int(step.lost), int(step.seal), step.taken, len(step.ends))
        self._put("a", (step.stream,), numbers)
        for end in step.ends:
            self._texts += (rows.request_id_text(end.request_id), end.state.value)
            self._numbers.append(end.incarnation)
        self._appends += 1
        for event in events:
            of, seqs, times, payloads = self._answers if event.final else self._events
            of.append(self._appends)
            seqs.append(event.seq)
            times.append(event.time)
            payloads.append(event.payload)

    def open_stream(self, step: OpenStream) -> None:
        record = step.record
        listed = not any(call.state in _OPEN for call in step.calls)
        most = -1 if step.most_calls is None else step.most_calls
        numbers = (RECORD_VERSION, record.fence, record.generation, record.last)
        seen = -1 if step.seen is None else step.seen
        flags = (int(record.sealed), int(listed), most, len(step.calls), seen, int(step.unique))
        texts = (record.id, record.session, record.kind.value, record.node)
        self._put("o", texts, (*numbers, *flags), (record.opened,))
        for call in step.calls:
            self._texts += (rows.request_id_text(call.request_id), call.state.value)
            self._numbers += (call.incarnation, call.attempt, int(call.progress is not None))
            self._times.append(call.progress or 0.0)
            said = (stored(call.method), call.request, stored(call.principal))
            self._blobs += (id_key(call.request_id), *said, call.digest, stored(call.name))

    def put_call(self, step: PutCall) -> None:
        texts = (step.stream, rows.request_id_text(step.request_id), step.state.value)
        numbers = (step.fence, RECORD_VERSION, step.incarnation, step.attempt, int(step.progress is not None))
        self._put("p", texts, numbers, (step.progress or 0.0,))

    def put_session(self, step: PutSession) -> None:
        record, limits = step.record, step.limits
        self._sticky.setdefault(record.id, record.sticky)
        most: tuple[int, ...] = (0, 0, 0, 0)
        if limits is not None:
            has_caller = int(bool(record.owner or record.address))
            most = (1, has_caller, limits.caller, -1 if limits.total is None else limits.total)
        texts = (record.id, record.state.value, record.version, record.standalone, record.ended, record.kind.value)
        numbers: tuple[int, ...] = (RECORD_VERSION, int(record.initialized), record.incarnation, *most)
        caller = caller_key(record.owner, record.address)
        blobs = (
            stored(record.owner),
            stored(record.address),
            caller,
            record.client_params,
            record.result,
            record.digest,
        )
        self._put(
            "s",
            texts,
            (*numbers, len(record.sticky), record.revision),
            (record.created, record.active),
            (*blobs, *record.sticky),
        )

    def change_session(self, step: ChangeSession) -> None:
        initialized = -1 if step.initialized is None else int(step.initialized)
        flags = (int(step.version is not None), int(step.result is not None), initialized)
        seen = after = self._sticky.get(step.session, ())  # nothing, if there is no such session, or it has ended
        if step.stick is not None:
            after = self._sticky[step.session] = self._payloads.stick(seen, step.stick)
        sticky = (int(step.stick is not None), len(seen), len(after))
        texts = (step.session, "" if step.state is None else step.state.value, step.version or "")
        active = float("-inf") if step.active is None else step.active
        self._put("c", texts, (RECORD_VERSION, *flags, *sticky), (active,), (step.result or b"", *seen, *after))

    def end_session(self, step: EndSession) -> None:
        keeps = retention.keeps_params(step.reason, retention.MAX_ENDED_PARAMS)
        params = retention.MAX_ENDED_PARAMS + self._payloads.overhead if keeps else -1
        numbers = (int(step.unused_since is not None), params, retention.MAX_ENDED_OF_CALLER, retention.MAX_ENDED)
        self._put("e", (step.session, step.reason), numbers, (step.time, step.unused_since or 0.0))

    def open_ask(self, step: OpenAsk) -> None:
        record = step.record
        texts = (record.session, record.id, record.stream, record.node)
        self._put("q", texts, (RECORD_VERSION,), blobs=(record.request,))

    def put_reader(self, step: PutReader) -> None:
        record = step.record
        self._put("h", (record.stream, record.reader, record.node), (RECORD_VERSION, record.seq, int(step.attaches)))

    def forward(self, step: Forward) -> None:
        limits = (self._payloads.overhead, MAX_FORWARDED, MAX_FORWARDED_BYTES)
        numbers = (step.first, len(step.payloads), *limits)
        self._put("f", (step.stream, step.node, step.sender), numbers, blobs=step.payloads)

    def send_mail(self, step: SendMail) -> None:
        places, nodes, messages = self._mail
        places.append(len(self._kinds))
        nodes.append(step.node)
        messages.append(step.message)
        self._put("-")

    def put(self, kind: str, step: Any, texts: Sequence[str], numbers: Sequence[str] = ()) -> None:
        """A step that is its letter and some of its fields."""
        self._put(kind, [getattr(step, name) for name in texts], [int(getattr(step, name)) for name in numbers])


def _plain(kind: str, texts: Sequence[str], numbers: Sequence[str] = ()) -> Callable[[CommitArguments, Any], None]:
    return lambda arguments, step: arguments.put(kind, step, texts, numbers)


_ADD: Mapping[type[Step], Callable[[CommitArguments, Any], None]] = {
    Append: CommitArguments.append,
    OpenStream: CommitArguments.open_stream,
    PutCall: CommitArguments.put_call,
    Release: _plain("r", ("stream",), ("fence",)),
    PutSession: CommitArguments.put_session,
    ChangeSession: CommitArguments.change_session,
    EndSession: CommitArguments.end_session,
    Trim: _plain("t", ("stream",), ("through",)),
    DropStream: _plain("d", ("stream",)),
    OpenAsk: CommitArguments.open_ask,
    CloseAsk: _plain("Q", ("session", "id")),
    PutReader: CommitArguments.put_reader,
    LeaveReader: _plain("l", ("stream", "reader")),
    Reached: _plain("R", ("stream",), ("generation", "through", "unread")),
    Forward: CommitArguments.forward,
    SendMail: CommitArguments.send_mail,
    MailReceived: _plain("T", ("node",), ("through",)),
}
