"""A file of the first layout, in use until its process died, is brought up to date with all that is in it."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from perdure._core.ids import Fence, Generation, Kind, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.errors import IdTaken
from perdure.store.records import AskRecord, CallRecord, Event, SessionRecord, StreamRecord
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import APPLICATION_ID
from perdure.store.steps import Append, CallEnd, OpenStream
from perdure.testing._values import count_open

pytestmark = pytest.mark.anyio

DEAD, ME = NodeId("dead"), NodeId("me")
SESSION = SessionId("session")

CONTENT = """
INSERT INTO session VALUES
    ('session', 1, 'ann', 'dead', 'active', '2025-11-25', x'7b7d', x'7b7d', 1, '["\\u00ff"]', 3, 'alone', 1.0, 2.0),
    ('over', 1, 'ann', 'dead', 'ended', '2025-11-25', x'7b7d', x'7b7d', 1, '[]', 1, 'over-alone', 1.0, 2.0);
INSERT INTO stream VALUES
    (1, 'alone', 1, 'session', 's', 4, 1.0, 1, 0, 0),
    (5, 'done', 1, 'session', 'c', 4, 2.0, 1, 1, 1),
    (9, 'runs', 1, 'session', 'c', 7, 3.0, 2, 2, 0);
INSERT INTO event VALUES (5, 1, 2.5, x'01', 1), (9, 1, 3.5, x'02', 0), (9, 2, 3.5, x'03', 0);
INSERT INTO generation VALUES (9, 1, 1);
INSERT INTO call VALUES
    (5, 3, '"a"', 0, 1, 'tools/call', x'', 'ann', 'dead', 1, NULL, 'answered'),
    (9, 3, '"8"', 0, 1, 'tools/call', x'7b7d', 'ann', 'dead', 1, 0.5, 'running'),
    (9, 3, '"\\u00e9"', 1, 1, 'tools/list', x'7b7d', 'ann', 'dead', 1, NULL, 'running');
INSERT INTO ask VALUES (1, 'session', 'ask', 1, 9, x'7b7d', 'dead');
INSERT INTO reader VALUES (9, 1, 'reader', 'dead', 2);
INSERT INTO mail VALUES (1, '', x'00');
UPDATE fence SET last = 7;
"""


def of_the_first_layout(path: Path, *scripts: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for statement in _sql.migrations()[0].statements:
            connection.execute(statement)
        for script in scripts:
            connection.executescript(script)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return of_the_first_layout(tmp_path / "log.db", CONTENT)


def a_call(request_id: int | str, method: str, *, stream: str = "runs", **more: object) -> CallRecord:
    values = {"progress": None, "request": b"{}", "state": CallState.RUNNING} | more
    return CallRecord(
        session=SESSION,
        incarnation=3,
        request_id=request_id,
        stream=StreamId(stream),
        method=method,
        principal="ann",
        **values,  # type: ignore[arg-type]
    )


def a_stream(id_: str, *, kind: Kind = Kind.CALL, node: str = DEAD, fence: int = 4, **more: float) -> StreamRecord:
    return StreamRecord(
        id=StreamId(id_),
        session=SESSION,
        kind=kind,
        node=NodeId(node),
        fence=Fence(fence),
        **more,  # type: ignore[arg-type]
    )


async def test_everything_is_still_there(path: Path) -> None:
    async with SqliteStore(str(path)) as store:
        assert await store.session(SESSION) == SessionRecord(
            id=SESSION,
            owner="ann",
            state=SessionState.ACTIVE,
            version="2025-11-25",
            client_params=b"{}",
            result=b"{}",
            initialized=True,
            sticky=(b"\xff",),
            incarnation=3,
            standalone=StreamId("alone"),
            created=1.0,
            active=2.0,
        )
        assert list(await store.streams(SESSION)) == [
            a_stream("alone", kind=Kind.STANDALONE, node="", opened=1.0),
            a_stream("done", opened=2.0, last=1, sealed=True),
            a_stream("runs", fence=7, opened=3.0, generation=2, last=2),
        ]
        assert list(await store.calls(SESSION)) == [
            a_call("a", "tools/call", stream="done", request=b"", state=CallState.ANSWERED),
            a_call("8", "tools/call", progress=0.5),
            a_call("é", "tools/list"),
        ]
        ask = AskRecord(session=SESSION, id="ask", stream=StreamId("runs"), request=b"{}", node=DEAD)
        assert list(await store.asks(SESSION)) == [ask]
        assert list(await store.read(StreamId("runs"), after=0, limit=9)) == [
            Event(1, 3.5, b"\x02"),
            Event(2, 3.5, b"\x03"),
        ]
        assert list(await store.generations(StreamId("runs"))) == [Generation(generation=1, end=1)]
        assert await count_open(store) == 1


async def test_what_ran_belongs_to_a_dead_node_and_can_be_settled(path: Path) -> None:
    async with SqliteStore(str(path)) as store:
        assert await store.join(ME) >= 1 << 40, "no fence that was counted is given again"
        alive = store.liveness(ME, lease=15.0, monotonic=time.monotonic)
        assert list(await alive.dead()) == [DEAD]
        (stream,) = await store.written_by(DEAD)
        claimed = await store.claim(stream.id, node=ME, held=stream.fence)
        assert claimed is not None
        ends = tuple(CallEnd(incarnation=3, request_id=id_, state=CallState.SETTLED) for id_ in ("8", "é"))
        answers = (Event(3, 9.0, b"lost", True), Event(4, 9.0, b"lost", True))
        settle = Append(stream=stream.id, fence=claimed.fence, events=answers, ends=ends, seal=True)
        assert list(await store.commit([settle])) == [None]
        assert await store.bury(DEAD, heir=ME) == [], "readers went with their process"
        assert list(await alive.dead()) == []


async def test_ids_that_ran_are_taken_until_they_are_settled(path: Path) -> None:
    async with SqliteStore(str(path)) as store:
        fence = await store.join(ME)
        found = await store.open_call(SESSION, incarnation=3, request_id=8)
        assert found == a_call("8", "tools/call", progress=0.5)
        for request_id, taken in ((8, True), ("é", True), ("a", False)):
            record = a_stream(f"new {request_id}", node=ME, fence=fence, opened=9.0)
            call = a_call(request_id, "tools/call", stream=record.id)
            (refusal,) = await store.commit([OpenStream(record=record, calls=(call,))])
            assert isinstance(refusal, IdTaken) == taken


async def test_a_file_in_which_an_id_runs_twice_can_be_opened(tmp_path: Path) -> None:
    twice = "INSERT INTO call VALUES (9, 3, '8', 2, 1, 'tools/call', x'7b7d', 'ann', 'dead', 1, NULL, 'running');"
    path = of_the_first_layout(tmp_path / "log.db", CONTENT, twice)
    async with SqliteStore(str(path)) as store:
        running = [call.request_id for call in await store.calls_on(StreamId("runs"))]
        assert running == ["8", "é", 8]


async def test_what_was_on_its_way_to_a_home_by_mail_waits_under_its_stream(tmp_path: Path) -> None:
    """The third layout had such messages in the mailbox of a node; other mail stays there."""

    def forward(*payloads: str) -> bytes:
        return json.dumps({"kind": "forward", "id": "f", "session": SESSION, "payloads": payloads}).encode()

    path = of_the_first_layout(tmp_path / "log.db", CONTENT)
    with closing(sqlite3.connect(path)) as connection:
        for migration in _sql.migrations()[1:3]:
            for statement in migration.statements:
                connection.execute(statement)
        other = b'{"kind":"ended","session":"session","reason":"deleted"}'
        for node, message in (("me", forward("1", "2")), ("me", other), ("dead", forward("3")), ("me", b"no json")):
            connection.execute("INSERT INTO mail (node, message) VALUES (?, ?)", (node, message))
        connection.execute("PRAGMA user_version = 3")
        connection.commit()
    async with SqliteStore(str(path)) as store:
        assert [message.payload for message in await store.forwarded(StreamId("alone"))] == [b"1", b"2", b"3"]
        assert [mail.message for mail in await store.mail(ME)] == [other, b"no json"]
        assert list(await store.mail(DEAD)) == []


async def test_dropping_a_migrated_stream_takes_everything_along(path: Path) -> None:
    async with SqliteStore(str(path)) as store:
        await store.join(ME)
        await store.bury(DEAD, heir=ME)  # until then it counts as a node that uses what it wrote
        await store.sweep(_all())
        await store.leave(ME)
    with closing(sqlite3.connect(path)) as connection:
        assert _counts(connection) == [0, 0, 0, 0, 0, 0, 0]


def _all() -> Cutoffs:
    return Cutoffs(events=100.0, answers=100.0)


def _counts(connection: sqlite3.Connection) -> Sequence[int]:
    tables = ("session", "stream", "event", "generation", "call", "ask", "reader")
    return [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
