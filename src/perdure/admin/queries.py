"""Reads sessions from a store for an operator, and ends one.

The command that runs this is not a node: the servers may run in other processes, or not at all.
"""

from __future__ import annotations

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, SessionId
from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import is_called
from perdure._core.states import SESSION, CallState, IllegalStep, SessionState, SessionStep, advance
from perdure.admin.as_json import list_object, show_object
from perdure.errors import Misuse
from perdure.store.base import EndSession, SendMail, SessionRecord, Store

PAGE = 100
"""Sessions read at a time: a record may carry a quarter of a mebibyte of sticky requests."""

MIN_PREFIX = 8
"""Characters of an id that name a session: as many as log records show of it."""

UNENDED = frozenset({CallState.RUNNING, CallState.WAITING})


async def list_sessions(store: Store, *, state: SessionState | None, owner: str | None) -> list[JsonObject]:
    """The sessions in this state and of this owner, the last active one first."""
    found = []
    after: SessionId | None = None
    while page := await store.sessions(after=after, limit=PAGE):
        after = page[-1].id
        for record in page:
            if state not in (None, record.state) or (owner is not None and not is_called(record.owner, owner)):
                continue
            streams = [stream for stream in await store.streams(record.id) if not stream.sealed]
            # By stream, because a session may have thousands of calls that have ended, and a few that have not.
            calls = [call for stream in streams if stream.kind is Kind.CALL for call in await store.calls_on(stream.id)]
            found.append(list_object(record, streams=streams, calls=sum(call.state in UNENDED for call in calls)))
    return sorted(found, key=lambda session: (-session["active"], session["id"]))


async def find(store: Store, text: str) -> SessionRecord:
    """The session whose id is this text, or begins with it."""
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


async def show_session(store: Store, record: SessionRecord) -> tuple[JsonObject, frozenset[NodeId]]:
    """The session, and the nodes that have joined the store."""
    streams = await store.streams(record.id)
    readers = [await store.reader(stream.id) for stream in streams]
    session = show_object(
        record,
        streams=streams,
        calls=await store.calls(record.id),
        asks=await store.asks(record.id),
        readers={reader.stream: reader for reader in readers if reader is not None},
        kept={kept.stream: kept for kept in await store.kept(record.id)},
        has_token=await store.chain_of(record.id) is not None,
    )
    return session, frozenset(node.id for node in await store.nodes())


async def end_session(store: Store, record: SessionRecord, *, now: float) -> SessionRecord:
    """End a session and tell all nodes. Returns its record, which may say that it had ended by itself meanwhile."""
    step = SessionStep.OPERATOR_ENDED
    try:
        advance(SESSION, record.state, step)
    except IllegalStep:
        if record.state is SessionState.ENDED:
            raise Misuse(f"session {record.id} has ended already: {record.ended or 'the reason is unknown'}") from None
        sentence = f"session {record.id} is {record.state.value}; it can be ended once its handshake is done"
        raise Misuse(sentence) from None
    message = mail.encode(mail.Ended(session=record.id, reason=step.value))
    # Mail to a node that has left meanwhile is refused, and that node needs none.
    posts = [SendMail(node=node.id, message=message) for node in await store.nodes()]
    await store.commit([EndSession(session=record.id, time=now, reason=step.value), *posts])
    return await store.session(record.id) or record
