"""How sessions are used, by their streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.states import CallState, SessionState
from perdure.store import open_store
from perdure.store.interface import Inspect, Store
from perdure.store.records import CallRecord, Event, ReaderRecord, SessionRecord, StreamRecord, Usage
from perdure.store.steps import Append, CallEnd, OpenStream, PutReader, PutSession, Trim
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

NODE = NodeId("node")
QUIET, TALKING, TRIMMED, EMPTY, UNKNOWN = (SessionId(name) for name in ("quiet", "talking", "trimmed", "empty", "none"))


def a_session(session: SessionId) -> PutSession:
    facts: dict[str, Any] = {
        "owner": "",
        "version": "2025-11-25",
        "client_params": b"{}",
        "result": b"{}",
        "sticky": (),
    }
    record = SessionRecord(
        id=session,
        state=SessionState.ACTIVE,
        initialized=True,
        incarnation=1,
        standalone=StreamId(f"{session}-s"),
        created=1.0,
        active=1.0,
        **facts,
    )
    return PutSession(record=record)


def a_stream(session: SessionId, fence: Fence, *, kind: Kind, opened: float) -> OpenStream:
    stream = StreamId(f"{session}-{kind.value}")
    row = CallRecord(
        session=session, incarnation=1, request_id=1, stream=stream, method="ping", request=b"{}", principal=""
    )
    record = StreamRecord(id=stream, session=session, kind=kind, node=NODE, fence=fence, opened=opened)
    return OpenStream(record=record, calls=(row,) if kind is Kind.CALL else ())


async def fill(store: Store) -> None:
    fence = await store.join(NODE)
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    told = (Event(1, 30.0, b"{}"), Event(2, 31.0, b"{}"))
    quiet, talking, trimmed = (StreamId(f"{name}-s") for name in (QUIET, TALKING, TRIMMED))
    refused = await store.commit(
        [
            *(a_session(session) for session in (QUIET, TALKING, TRIMMED, EMPTY)),
            *(a_stream(session, fence, kind=Kind.STANDALONE, opened=10.0) for session in (QUIET, TALKING, TRIMMED)),
            a_stream(TALKING, fence, kind=Kind.CALL, opened=20.0),
            Append(stream=talking, fence=fence, events=told),
            Append(
                stream=StreamId("talking-c"), fence=fence, events=(Event(1, 40.0, b"{}", True),), ends=(end,), seal=True
            ),
            Append(stream=trimmed, fence=fence, events=told),
            Trim(stream=trimmed, through=2),
            *(PutReader(record=ReaderRecord(stream=name, reader="r", node=NODE, seq=1)) for name in (quiet, talking)),
        ]
    )
    assert not any(refused)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_every_store_tells_the_streams_the_newest_event_and_the_readers_of_sessions(
    tmp_path: Path, kind: str
) -> None:
    address = f"sqlite:{tmp_path}/log.db" if kind == "sqlite" else store_url()
    async with open_store(address, busy_timeout=20.0) as store:
        await fill(store)
        asked = [QUIET, TALKING, TRIMMED, EMPTY, UNKNOWN]
        found = await cast(Inspect, store).usage(asked)
        told = {session: found[session][1] if session in found else Usage() for session in asked}
        assert [[stream.id for stream in told[session].streams] for session in asked] == [
            ["quiet-s"],
            ["talking-s", "talking-c"],
            ["trimmed-s"],
            [],
            [],
        ]
        assert [told[session].newest for session in asked] == [10.0, 40.0, 10.0, 0.0, 0.0]
        assert [[reader.stream for reader in told[session].readers] for session in asked] == [
            ["quiet-s"],
            ["talking-s"],
            [],
            [],
            [],
        ]
