"""Finds a call's stream that is read again, and what has become of the answers and asks in it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure._core.codes import POSITION_LOST
from perdure._core.ids import Kind, StreamId
from perdure._core.jsonrpc import error_payload
from perdure._core.states import WritingState
from perdure.errors import StoreUnavailable
from perdure.log.stream import Stream
from perdure.store.base import Event, stream_by_id

if TYPE_CHECKING:
    from perdure.sessions.session import Session

_MARK = b'"ask-'
"""Stands in every ask; what does not contain it need not be looked at."""


async def find_stream(session: Session, stream_id: StreamId) -> Stream | None:
    """A call's stream of this session, from memory or from the store. The caller keeps it (`Stream.kept_whole`) in the
    same turn of the loop, until its reader is there.

    Raises `HeldElsewhere` where another node may hold it.
    """
    stream = await _look_for(session, stream_id)
    if stream is None:
        await session.context.nodes.refuse_while_held()
        stream = await _look_for(session, stream_id)  # it may have been written before nothing was held
    return stream


async def _look_for(session: Session, stream_id: StreamId) -> Stream | None:
    stream = session.streams.get(stream_id)
    if stream is not None and stream.writing is not WritingState.LOST and not _may_be_overtaken(session, stream):
        return stream
    record = await stream_by_id(session.context.store, stream_id)
    if record is None or record.session != session.record.id or record.kind is not Kind.CALL:
        return None
    return session.call_streams.follow(record)


def _may_be_overtaken(session: Session, stream: Stream) -> bool:
    """A stream that this node has claimed and on which no call of its own runs: the call waits for its principal, and
    the node that the principal came to has claimed the stream since, without a word."""
    running = session.exchange.calls.all_running()
    return stream.writer is not None and not stream.is_over and all(call.stream is not stream for call in running)


async def catch_up(session: Session, stream: Stream) -> None:
    """What another node writes may have grown since it was last read here."""
    if stream.writer is None and not stream.is_over:
        record = await stream_by_id(session.context.store, stream.id)
        if record is not None:
            stream.follow(record)


async def look_how_far(session: Session) -> None:
    """See how far readers at other nodes have got on the standalone stream. While the store fails, what is known here
    counts."""
    context, stream = session.context, session.standalone
    if context.nodes.alone:
        return
    with contextlib.suppress(StoreUnavailable):
        record = await stream_by_id(context.store, stream.id)
        if record is not None:
            stream.follow(record)
            if record.generation == stream.generation:
                stream.readers.advance(record.delivered)


async def lost_answers(session: Session, stream: Stream) -> Sequence[bytes]:
    """Error responses for the calls of a stream whose answers are no longer retained."""
    # What is held is in memory alone; it is looked at first, because from there it goes into the store.
    finals, after = stream.tail.finals, 0
    while events := await session.context.store.read(stream.id, after=after, limit=1_000):
        finals += [event for event in events if event.final]
        after = events[-1].seq
    answered = {json.loads(event.payload).get("id") for event in finals}
    asked = await session.context.store.calls_on(stream.id)
    message = "The answer to this request is no longer retained"
    return [
        error_payload(call.request_id, POSITION_LOST, message, {"method": call.method})
        for call in asked
        if call.request_id not in answered
    ]


async def closed_asks(session: Session, events: Sequence[Event]) -> set[int]:
    """Of replayed events, those that are asks which wait for no answer any more."""
    asked = {event.seq: ask for event in events if _MARK in event.payload and (ask := _ask_id(event.payload))}
    if not asked:
        return set()
    context, still = session.context, set(session.exchange.asks.open)
    for waiting in await context.store.asks(session.id):
        if waiting.node in (context.node, *context.nodes.others) or not await context.nodes.is_dead(waiting.node):
            still.add(waiting.id)
    return {seq for seq, ask in asked.items() if ask not in still}


def _ask_id(payload: bytes) -> str | None:
    message = json.loads(payload)
    ask = message.get("id")
    return ask if "method" in message and isinstance(ask, str) and ask.startswith("ask-") else None
