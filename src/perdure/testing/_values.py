"""Records and steps with as few arguments as possible, and a picture of all that a store shows."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perdure._core.ids import Fence, Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.states import CallState, SessionState, ToolStepState
from perdure._core.tool_steps import ToolStepKind
from perdure.store.interface import Liveness, Store, reader_of
from perdure.store.records import (
    AskRecord,
    CallRecord,
    Event,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    ToolStepRecord,
)
from perdure.store.steps import Append, CallEnd, PutCall, PutToolStep, Refusals, Step

Make = Callable[[str], Store]
"""Returns a store that is not open yet; with the same name again, one on the same data."""

NODE = NodeId("node")
OTHER = NodeId("other")
SESSION = SessionId("session")
STREAM = StreamId("stream")


def a_session(
    id_: str = SESSION, *, active: float = 0.0, state: SessionState = SessionState.ACTIVE, owner: str = "owner"
) -> SessionRecord:
    return SessionRecord(
        id=SessionId(id_),
        owner=owner,
        state=state,
        version="2025-11-25",
        client_params=b'{"capabilities":{}}',
        result=b'{"serverInfo":{}}',
        initialized=True,
        sticky=(a_sticky("logging/setLevel", level="info"), a_sticky("resources/subscribe", uri="kept://ж\x00")),
        incarnation=1,
        standalone=StreamId(f"{id_}-standalone"),
        created=0.0,
        active=active,
    )


def an_ended_session(id_: str = SESSION, *, active: float, ended: str) -> SessionRecord:
    """What is left of a session that has not expired."""
    record = a_session(id_, active=active, state=SessionState.ENDED)
    return replace(record, ended=ended, client_params=b"", result=b"", sticky=())


def a_durable_call(
    id_: str = "call", *, active: float = 0.0, state: SessionState = SessionState.ACTIVE, owner: str = "owner"
) -> SessionRecord:
    """A request of a revision without sessions."""
    record = a_session(id_, active=active, state=state, owner=owner)
    return replace(record, version="2026-07-28", sticky=(), standalone=StreamId(""), kind=RecordKind.CALL)


def a_sticky(method: str, **params: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 0, "method": method, "params": params}).encode()


def a_stream(
    fence: Fence,
    id_: str = STREAM,
    *,
    session: str = SESSION,
    kind: Kind = Kind.CALL,
    opened: float = 0.0,
    node: NodeId = NODE,
) -> StreamRecord:
    return StreamRecord(id=StreamId(id_), session=SessionId(session), kind=kind, node=node, fence=fence, opened=opened)


def a_call(
    request_id: int | str = 1, *, stream: str = STREAM, session: str = SESSION, incarnation: int = 1
) -> CallRecord:
    return CallRecord(
        session=SessionId(session),
        incarnation=incarnation,
        request_id=request_id,
        stream=StreamId(stream),
        method="tools/call",
        request=b'{"method":"tools/call"}',
        principal="owner",
    )


def an_end(request_id: int | str = 1, state: CallState = CallState.ANSWERED) -> CallEnd:
    return CallEnd(incarnation=1, request_id=request_id, state=state)


def a_put_call(fence: Fence, **more: Any) -> PutCall:
    values: dict[str, Any] = {"incarnation": 1, "request_id": 1, "attempt": 1, "progress": None} | more
    return PutCall(stream=STREAM, fence=fence, state=CallState.WAITING, **values)


def a_tool_step(number: int = 1, **more: Any) -> ToolStepRecord:
    """An open one; with a value, one that has ended."""
    done = {"state": ToolStepState.ENDED, "ended": 2.0} if "value" in more else {"state": ToolStepState.OPEN}
    fields: dict[str, Any] = {"incarnation": 1, "request_id": 1, "name": "charge", "attempt": 1, "began": 1.0}
    fields |= {"stream": STREAM, "kind": ToolStepKind.STEP, "again": False, "own": True, **done, **more}
    return ToolStepRecord(number=number, **fields)


def a_put_tool_step(
    fence: Fence, number: int = 1, *, after: int = 0, after_ended: bool = False, **more: Any
) -> PutToolStep:
    return PutToolStep(fence=fence, record=a_tool_step(number, **more), after=after, after_ended=after_ended)


def an_ask(id_: str = "ask-1", *, stream: str = STREAM, session: str = SESSION, **more: Any) -> AskRecord:
    request = b'{"method":"roots/list"}'
    return AskRecord(session=SessionId(session), id=id_, stream=StreamId(stream), request=request, node=NODE, **more)


def a_reader(name: str = "reader-1", *, stream: str = STREAM, seq: int = 0, node: NodeId = NODE) -> ReaderRecord:
    return ReaderRecord(stream=StreamId(stream), reader=name, node=node, seq=seq)


def some_events(first: int, last: int, *, time: float = 0.0, final: bool = False) -> tuple[Event, ...]:
    """Events with these numbers; with `final`, the last of them is an answer."""
    return tuple(Event(seq, time, b"event %d" % seq, final and seq == last) for seq in range(first, last + 1))


def an_append(fence: Fence, events: Iterable[Event], *, stream: str = STREAM, **more: Any) -> Append:
    return Append(stream=StreamId(stream), fence=fence, events=tuple(events), **more)


async def put(store: Store, *steps: Step) -> Refusals:
    """Commit as a server does: at once if that is possible, else with patience."""
    done = store.commit_now(steps)
    return await store.commit(steps) if done is None else done


async def all_events(store: Store, stream: str = STREAM, *, after: int = 0, page: int = 1_000) -> list[Event]:
    """The retained events, fetched page by page."""
    found: list[Event] = []
    while more := await store.read(StreamId(stream), after=after, limit=page):
        if more[0].seq <= after or len(more) > page:
            raise AssertionError(f"{len(more)} events from {more[0].seq} on, where {page} after {after} were asked for")
        after = max(event.seq for event in more)
        found += more
    return found


async def dead_nodes(view: Liveness) -> list[NodeId]:
    """The nodes that are dead in one node's view, and not buried yet."""
    return list((await view.overview(mail_after=0)).dead)


async def messages(store: Store, node: NodeId = NODE) -> list[bytes]:
    return [mail.message for mail in await store.mail(node)]


async def numbers(store: Store, stream: str = STREAM) -> list[int]:
    return [event.seq for event in await all_events(store, stream)]


async def existing(store: Store, *ids: str) -> list[SessionRecord]:
    """The records of those sessions that exist."""
    found = [await store.session(SessionId(id_)) for id_ in ids]
    return [record for record in found if record is not None]


async def count_open(store: Store) -> int:
    """How many sessions have not ended."""
    return sum(count for state, count in (await store.count_states()).items() if state is not SessionState.ENDED)


async def together(store: Store, asked: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    """Return several answers of a store by name.

    A store that others share is somewhere else: it is asked for all at once, which takes as long as asking for a few.
    """
    answers = await asyncio.gather(*asked.values()) if store.shared else [await each for each in asked.values()]
    return {
        name: list(answer) if isinstance(answer, Sequence) else answer
        for name, answer in zip(asked, answers, strict=True)
    }


async def picture(store: Store, *, sessions: Sequence[str] = (SESSION,)) -> dict[str, Any]:
    """All that a store shows of some sessions, as plain values."""
    asked: dict[str, Awaitable[Any]] = {"sessions": existing(store, *sessions), "notes": store.notes("")}
    for session in map(SessionId, sessions):
        asked[f"{session}: streams"] = store.streams(session)
        asked[f"{session}: calls"] = store.calls(session)
        asked[f"{session}: asks"] = store.asks(session)
        asked[f"{session}: unread"] = store.streams(session, only_unread=True)
        asked[f"{session}: kept"] = store.kept(session)
    seen = await together(store, asked)
    of_streams: dict[str, Awaitable[Any]] = {}
    for stream in [stream for session in sessions for stream in seen[f"{session}: streams"]]:
        of_streams[f"{stream.id}: events"] = all_events(store, stream.id)
        of_streams[f"{stream.id}: generations"] = store.generations(stream.id)
        of_streams[f"{stream.id}: reader"] = reader_of(store, stream.id)
        of_streams[f"{stream.id}: tool steps"] = store.tool_steps(stream.id)
    return seen | await together(store, of_streams)
