"""What an operator reads from the store, and the one thing that an operator changes: a session is ended.

Whoever does this is no node: the servers may run in other processes, or not at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, SessionId, StreamId
from perdure._core.principals import is_called
from perdure._core.states import SESSION, CallState, IllegalStep, SessionState, SessionStep, advance
from perdure.errors import Misuse
from perdure.store.base import (
    AskRecord,
    CallRecord,
    EndSession,
    KeptRecord,
    ReaderRecord,
    SendMail,
    SessionRecord,
    Store,
    StreamRecord,
)

PAGE = 100
"""Sessions read at a time: a record may carry a quarter of a mebibyte of sticky requests."""

MIN_PREFIX = 8
"""Characters of an id that name a session: as many as log records show of it."""

UNENDED = frozenset({CallState.RUNNING, CallState.WAITING})


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """A session in a list of them."""

    id: SessionId
    owner: str
    state: SessionState
    version: str
    created: float
    active: float
    calls: int
    """That have not ended."""
    streams: int
    """That are not sealed, the standalone stream among them."""
    home: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """All that the store holds of a session (S6)."""

    record: SessionRecord
    streams: Sequence[StreamRecord]
    calls: Sequence[CallRecord]
    asks: Sequence[AskRecord]
    readers: Mapping[StreamId, ReaderRecord]
    kept: Mapping[StreamId, KeptRecord]
    nodes: frozenset[NodeId]
    """Those that have joined the store."""
    resumable: bool
    """Somebody holds a resume token for it."""

    @property
    def home(self) -> NodeId:
        return home(self.record, self.streams)


def home(record: SessionRecord, streams: Sequence[StreamRecord]) -> NodeId:
    """The node that writes the standalone stream; empty if none does."""
    return next((stream.node for stream in streams if stream.id == record.standalone), NodeId(""))


async def overviews(store: Store, *, state: SessionState | None, owner: str | None) -> list[Overview]:
    """The sessions that are asked for, the last active one first."""
    found = [
        await _overview(store, record)
        async for record in _records(store)
        if state in (None, record.state) and (owner is None or is_called(record.owner, owner))
    ]
    return sorted(found, key=lambda session: (-session.active, session.id))


async def _records(store: Store) -> AsyncIterator[SessionRecord]:
    after: SessionId | None = None
    while page := await store.sessions(after=after, limit=PAGE):
        for record in page:
            yield record
        after = page[-1].id


async def _overview(store: Store, record: SessionRecord) -> Overview:
    streams = [stream for stream in await store.streams(record.id) if not stream.sealed]
    # Asked for by stream: a session may have thousands of calls that have ended, and a few that have not.
    calls = [call for stream in streams if stream.kind is Kind.CALL for call in await store.calls_on(stream.id)]
    return Overview(
        id=record.id,
        owner=record.owner,
        state=record.state,
        version=record.version,
        created=record.created,
        active=record.active,
        calls=sum(call.state in UNENDED for call in calls),
        streams=len(streams),
        home=home(record, streams),
    )


async def find(store: Store, text: str) -> SessionRecord:
    """The one session whose id is this, or begins with it."""
    if len(text) < MIN_PREFIX:
        raise Misuse(f"{text!r} is too short for a session; give at least {MIN_PREFIX} characters of its id")
    if (record := await store.session(SessionId(text))) is not None:
        return record
    following = await store.sessions(after=SessionId(text), limit=2)
    found = [record for record in following if record.id.startswith(text)]
    if not found:
        raise Misuse(f"no session {text!r} in the store")
    if len(found) > 1:
        raise Misuse(f"several sessions begin with {text!r}; give more of the id")
    return found[0]


async def picture(store: Store, record: SessionRecord) -> Picture:
    streams = await store.streams(record.id)
    readers = [await store.reader(stream.id) for stream in streams]
    return Picture(
        record=record,
        streams=streams,
        calls=await store.calls(record.id),
        asks=await store.asks(record.id),
        readers={reader.stream: reader for reader in readers if reader is not None},
        kept={kept.stream: kept for kept in await store.kept(record.id)},
        nodes=frozenset(node.id for node in await store.nodes()),
        resumable=await store.chain_of(record.id) is not None,
    )


async def end(store: Store, record: SessionRecord, *, now: float) -> SessionRecord:
    """End a session and have all nodes let go of it. Gives what became of it: it may have ended by itself."""
    step = SessionStep.OPERATOR_ENDED
    try:
        advance(SESSION, record.state, step)
    except IllegalStep:
        raise Misuse(_why_not(record)) from None
    message = mail.encode(mail.Ended(session=record.id, reason=step.value))
    # A node that has left meanwhile is refused its letter and needs none.
    posts = [SendMail(node=node.id, message=message) for node in await store.nodes()]
    await store.commit([EndSession(session=record.id, time=now, reason=step.value), *posts])
    return await store.session(record.id) or record


def _why_not(record: SessionRecord) -> str:
    if record.state is SessionState.ENDED:
        return f"session {record.id} has ended already: {record.ended or 'nobody knows why'}"
    return f"session {record.id} is {record.state.value}; it can be ended once its handshake is done"
