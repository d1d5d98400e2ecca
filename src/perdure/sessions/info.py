"""Describes sessions: one of them, as it is shown (S6), and all of them, as they are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from perdure._core.ids import Kind
from perdure._core.states import LogState, SessionState
from perdure.sessions.context import ServerContext
from perdure.sessions.session import Session
from perdure.telemetry import prometheus as metrics
from perdure.telemetry.prometheus import Snapshot


@dataclass(frozen=True, kw_only=True)
class StreamInfo:
    """A stream, as `session_info` shows it (S6)."""

    id: str
    kind: str
    state: str
    last: int
    """Sequence number of the last event."""
    connected_since: float | None


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """A session, as `session_info` shows it (S6)."""

    id: str
    owner: str
    state: str
    version: str
    created: float
    active: float
    loaded: bool
    """Its runtime is in memory."""
    running_calls: tuple[str, ...]
    """Methods of the requests that are not answered yet."""
    streams: tuple[StreamInfo, ...]
    """The standalone stream, then the calls' streams that are not over."""


def session_info(session: Session) -> SessionInfo:
    record = session.record
    streams = (session.standalone, *session.streams.values())
    return SessionInfo(
        id=record.id,
        owner=record.owner,
        state=record.state.value,
        version=record.version,
        created=record.created,
        active=session.keeper.active,
        loaded=session.exchange.runtime.is_loaded,
        running_calls=tuple(call.request.method for call in session.exchange.calls.all_running()),
        streams=tuple(
            StreamInfo(
                id=stream.id,
                kind="standalone" if stream.kind is Kind.STANDALONE else "call",
                state=stream.state,
                last=stream.tail.last,
                connected_since=stream.reader.since if stream.reader else None,
            )
            for stream in streams
        ),
    )


def numbers(context: ServerContext, held: Collection[Session]) -> Snapshot:
    """The figures of a node and of the sessions that it holds."""
    states = Counter(session.state.value for session in held)
    return metrics.snapshot(
        context.node,
        context.counters,
        sessions={state.value: states[state.value] for state in SessionState if state is not SessionState.ENDED},
        streams={"standalone": len(held), "call": sum(len(session.streams) for session in held)},
        readers=len(context.hub.readers),
        degraded=context.journal.state is LogState.DEGRADED,
    )
