"""Two real processes on one SQLite file: one of each, nothing lost, nothing in the way (promises 1, 6, 10, 12)."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from perdure._core.ids import NodeId, StreamId
from perdure._core.states import CallState
from perdure.store.sqlite import SqliteStore
from perdure.store.steps import (
    CallEnd,
    DropStream,
    LeaveReader,
    MailReceived,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    Trim,
)
from perdure.testing._values import (
    NODE,
    SESSION,
    STREAM,
    a_call,
    a_reader,
    a_session,
    a_stream,
    an_append,
    an_ask,
    numbers,
    put,
    some_events,
)
from tests.store.processes import process

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(str(path), busy_timeout=30.0) as store:
        await put(store, PutSession(record=a_session()))
        yield store


async def test_of_two_processes_that_claim_a_stream_at_once_one_succeeds(store: SqliteStore, path: Path) -> None:
    """Promise 6. Again, until both have won some: then they were at it at the same time."""
    fence = await store.join(NODE)
    won: dict[NodeId, set[str]] = {NodeId("one"): set(), NodeId("two"): set()}
    with process(path, "one") as one, process(path, "two") as two:
        for turn in range(50):
            names = [f"{turn}-{number}" for number in range(50)]
            await store.commit([OpenStream(record=a_stream(fence, name)) for name in names])
            for other in (one, two):
                other.begin("claim_all", names, fence)
            for other in (one, two):
                won[other.node] |= {name for name, got in zip(names, other.result(), strict=True) if got is not None}
            if all(won.values()):
                break
    assert all(won.values())
    assert not won[one.node] & won[two.node]
    for stream in await store.streams(SESSION):
        assert stream.id in won[stream.node]
        assert stream.generation == 2


async def test_no_two_processes_run_a_call_under_one_id(store: SqliteStore, path: Path) -> None:
    """Promise 12. One says 8 and the other "8", which is one id."""
    ids = list(range(200))
    with process(path, "one") as one, process(path, "two") as two:
        one.begin("open_all", ids)
        two.begin("open_all", [str(id_) for id_ in ids])
        told = list(zip(one.result(), two.result(), strict=True))
    assert set(told) <= {(None, "IdTaken"), ("IdTaken", None)}
    assert len(await store.calls(SESSION)) == 200
    assert len(await store.streams(SESSION)) == 200, "nothing of what was refused is there"


async def test_two_processes_that_write_at_full_speed_both_get_through_and_nothing_is_lost(
    store: SqliteStore, path: Path
) -> None:
    with process(path, "one") as one, process(path, "two") as two:
        for other in (one, two):
            assert other.does("open", other.node) is None
        one.begin("pour", one.node, 3_000)
        two.begin("pour", two.node, 3_000)
        assert max(one.result(), two.result()) < 10.0, "nobody waits for the other to end"
    for node in ("one", "two"):
        assert await numbers(store, node) == list(range(1, 3_001))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_what_another_process_dropped_is_not_written_by_its_old_key(store: SqliteStore, path: Path) -> None:
    """The key of a stream is remembered; another stream never gets it."""
    fence = await store.join(NODE)
    await put(store, OpenStream(record=a_stream(fence), calls=(a_call(),)), an_append(fence, some_events(1, 1)))
    with process(path, "other") as other:
        other.does("drop", STREAM)
        assert other.does("open", "new") is None
        assert other.does("append", "new", 1, 3) is None
        await put(
            store,
            Trim(stream=StreamId(STREAM), through=3),
            PutReader(record=a_reader("mine")),
            OpenAsk(record=an_ask()),
            LeaveReader(stream=StreamId(STREAM), reader="mine"),
            DropStream(stream=StreamId(STREAM)),
        )
        refusals = await put(store, an_append(fence, some_events(2, 2)))
        assert [type(refusal).__name__ for refusal in refusals] == ["Behind"]
    assert await numbers(store, "new") == [1, 2, 3]
    with closing(sqlite3.connect(path)) as connection:
        for table in ("event", "call", "ask", "reader"):
            orphans = f"SELECT count(*) FROM {table} WHERE stream NOT IN (SELECT key FROM stream)"
            assert connection.execute(orphans).fetchone() == (0,), table


async def test_a_key_that_comes_back_to_the_same_process_is_not_taken_for_the_old_stream(
    store: SqliteStore, path: Path
) -> None:
    """Both streams would be written under the same fence."""
    fence = await store.join(NODE)
    await put(store, OpenStream(record=a_stream(fence)), an_append(fence, some_events(1, 1)))
    with process(path, "other") as other:
        other.does("drop", STREAM)
        await put(store, OpenStream(record=a_stream(fence, "new")), an_append(fence, some_events(1, 1), stream="new"))
        refusals = await put(store, an_append(fence, some_events(2, 2)))
        assert [type(refusal).__name__ for refusal in refusals] == ["Behind"]
    assert await numbers(store, "new") == [1]


async def test_a_stream_of_which_all_calls_have_ended_is_still_written_by_its_node(store: SqliteStore) -> None:
    fence = await store.join(NODE)
    await put(store, OpenStream(record=a_stream(fence), calls=(a_call(1), a_call(2))))
    for seq in (1, 2):
        assert [stream.id for stream in await store.written_by(NODE)] == [STREAM]
        end = CallEnd(incarnation=1, request_id=seq, state=CallState.ANSWERED)
        await put(store, an_append(fence, some_events(seq, seq, final=True), ends=(end,)))
    assert [stream.id for stream in await store.written_by(NODE)] == [STREAM]
    await put(store, an_append(fence, (), seal=True))
    assert list(await store.written_by(NODE)) == []


async def test_mail_of_another_process_stays_until_it_is_received(store: SqliteStore, path: Path) -> None:
    """Promise 10."""
    await store.join(NODE)
    with process(path, "other") as other:
        assert other.does("post", "nobody", "lost") == "NodeGone"
        assert other.does("post", NODE, "first", "second") is None
        first, second = await store.mail(NODE)
        assert (first.message, second.message) == (b"first", b"second")
        await put(store, MailReceived(node=NODE, through=second.key))
        assert other.does("post", NODE, "third") is None
        await put(store, MailReceived(node=NODE, through=second.key))
        assert [mail.message for mail in await store.mail(NODE)] == [b"third"], "keys are not used again"


async def test_the_heir_gets_what_the_dead_had_not_dealt_with_also_if_it_received_later_mail(
    store: SqliteStore, path: Path
) -> None:
    """Promise 10: what is inherited comes after what the heir has seen."""
    await store.join(NODE)
    with process(path, "other") as other:
        other.does("post", "other", "for the dead")
        other.does("post", NODE, "mine")
        (mine,) = await store.mail(NODE)
        other.kill()
    await store.bury(NodeId("other"), heir=NODE)
    await put(store, MailReceived(node=NODE, through=mine.key))
    assert [mail.message for mail in await store.mail(NODE)] == [b"for the dead"]
    assert [node.id for node in await store.nodes()] == [NODE]
