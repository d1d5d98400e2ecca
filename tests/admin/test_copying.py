"""A store is copied whole, in either direction, or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.admin import copying
from perdure.errors import StoreError, StoreUnavailable
from perdure.store import SqliteStore, Store, copy_target, existing_store, open_store, upkeep_of
from perdure.store.base import (
    Event,
    Forward,
    MailReceived,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    Reached,
    Release,
    SendMail,
    Trim,
    stream_by_id,
)
from perdure.store.sqlite.upkeep import SqliteCopyTarget
from perdure.store.upkeep import CopyTarget, Restored
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_chain,
    a_put_call,
    a_reader,
    a_session,
    a_single_call,
    a_stream,
    all_events,
    an_append,
    an_ask,
    an_end,
    an_ended_session,
    messages,
    picture,
    put,
    some_events,
)
from tests.cli.test_sessions import ended, files, lines, refusal, start
from tests.support.servers.in_process import until
from tests.support.stores.first_layout import layout, write_first_layout
from tests.support.stores.postgres import connection, new_schema, store_url

pytestmark = pytest.mark.anyio

SECOND = SessionId("second")
QUIET = SessionId("quiet")
HOME = StreamId("session-standalone")
BATCH = StreamId("batch")
SESSIONS = (SESSION, SECOND, QUIET)


async def commit(store: Store, *steps: Any) -> None:
    refusals = await put(store, *steps)
    assert not any(refusals), refusals


async def fill(store: Store) -> None:
    """One of everything that a store can hold. Nothing is in use at the end."""
    fence, other = await store.join(NODE), await store.join(OTHER)
    odd = replace(a_session(SECOND, owner="\ud800 owner", state=SessionState.DORMANT), address="10.0.0.1", active=5.5)
    await commit(
        store,
        PutSession(record=a_session()),
        PutSession(record=odd),
        PutSession(record=a_session(QUIET, owner="")),
        PutSession(record=an_ended_session("over", active=7.0, ended="client deleted")),
    )
    # A standalone stream of several generations, with a gap in front; its writer has let go of it.
    await commit(
        store,
        OpenStream(record=a_stream(fence, HOME, kind=Kind.STANDALONE)),
        an_append(fence, some_events(1, 6), stream=HOME),
    )
    claimed = await store.claim(HOME, node=OTHER, held=fence)
    assert claimed is not None
    await commit(
        store,
        an_append(claimed.fence, some_events(7, 9, time=1.5), stream=HOME),
        Trim(stream=HOME, through=4),
        Reached(stream=HOME, generation=2, through=8),
        # Messages that wait for its next writer.
        Forward(stream=HOME, node=NODE, sender="sender", first=1, payloads=(b"one", b"two\0", b"three")),
        Release(stream=HOME, fence=claimed.fence),
    )
    # A batch: answers in the middle outlive the events around them, and one of its calls has not ended.
    calls = (a_call(1, stream=BATCH), a_call("eight \ud800", stream=BATCH), a_call(2**70, stream=BATCH))
    await commit(
        store,
        OpenStream(record=a_stream(fence, BATCH, opened=2.25), calls=calls),
        an_append(fence, some_events(1, 3, final=True), stream=BATCH, ends=(an_end(1),)),
        an_append(fence, some_events(4, 7), stream=BATCH),
        Trim(stream=BATCH, through=6),
        an_append(
            fence, [Event(8, 9.75, b"", True)], stream=BATCH, ends=(an_end("eight \ud800", CallState.CANCELLED),)
        ),
        Reached(stream=BATCH, generation=1, through=3, unread=True),
        OpenAsk(record=an_ask("ask-1", stream=BATCH)),
        OpenAsk(record=an_ask("ask-0", stream=BATCH)),
        Release(stream=BATCH, fence=fence),
    )
    # A call that is over, and one that waits for its principal.
    await commit(
        store,
        OpenStream(record=a_stream(other, session=SECOND, node=OTHER), calls=(a_call(session=SECOND),)),
        an_append(other, some_events(1, 1_200, final=True), ends=(an_end(),), seal=True),
    )
    waits = replace(a_call(7, stream="waits", session=SECOND), state=CallState.RUNNING)
    await commit(
        store,
        OpenStream(record=a_stream(fence, "waits", session=SECOND), calls=(waits,)),
        replace(a_put_call(fence, attempt=2, request_id=7, progress=0.5), stream=StreamId("waits")),
        Release(stream=StreamId("waits"), fence=fence),
    )
    # A single call that has ended, and what all processes know.
    single = a_single_call("single", state=SessionState.DORMANT, active=3.0)
    row = replace(a_call("call", stream="of single", session=single.id), digest=bytes(32))
    await commit(
        store,
        PutSession(record=single),
        OpenStream(record=a_stream(fence, "of single", session=single.id), calls=(row,)),
        replace(
            an_append(fence, some_events(1, 1, final=True), ends=(an_end("call"),), seal=True),
            stream=StreamId("of single"),
        ),
    )
    await store.keep_secret("name", b"kept")
    for session in (SESSION, SECOND):
        assert await store.put_chain(a_chain(f"chain-{session}", session=session, next_="next"))
    assert await store.reattach(SECOND)
    await store.leave(NODE)
    await store.leave(OTHER)


async def pictured(store: Store) -> dict[str, Any]:
    """Everything, but for the fences, which belong to writers."""
    seen = await picture(store, sessions=SESSIONS)
    for session in SESSIONS:
        for name in ("streams", "unread"):
            seen[f"{session}: {name}"] = [replace(record, fence=Fence(0)) for record in seen[f"{session}: {name}"]]
    for stream in (HOME, BATCH, STREAM, StreamId("waits")):
        seen[f"{stream}: forwarded"] = [message.payload for message in await store.forwarded(stream)]
        seen[f"{stream}: calls"] = list(await store.calls_on(stream))
    seen["single"] = [await store.session(SessionId("single")), list(await store.calls(SessionId("single")))]
    seen["secrets"] = await store.secrets()
    return seen | {"states": dict(await store.count_states()), "nodes": [node.id for node in await store.nodes()]}


async def copied(folder: Path, source: str, target: str) -> list[str]:
    return await lines(folder, "store", "copy", source, target)


async def test_everything_arrives_in_postgres_and_comes_back(tmp_path: Path) -> None:
    first, middle, last = f"sqlite:{tmp_path / 'first.db'}", store_url(), f"sqlite:{tmp_path / 'last.db'}"
    async with open_store(first) as store:
        await fill(store)
        before = await pictured(store)
    assert before["session-standalone: forwarded"] == [b"one", b"two\0", b"three"]
    unchanged = files(tmp_path)
    counts = "5 sessions, 5 streams, 6 calls, 1,205 events, 4 answers, 3 waiting, 2 asks, 2 tokens, 1 secrets"
    [would] = await lines(tmp_path, "store", "copy", first, middle, "--dry-run")
    assert would == f"would copy {counts}"
    digests = set()
    for source, target in ((first, middle), (middle, last)):
        told, verified = await copied(tmp_path, source, target)
        assert told == f"copied {counts}"
        digests.add(verified.removeprefix("verified: both stores have the digest "))
        async with open_store(target) as store:
            assert await pictured(store) == before
    assert len(digests) == 1
    assert files(tmp_path).items() >= unchanged.items()


async def test_a_copy_goes_on_where_the_original_was(tmp_path: Path) -> None:
    """Promises 6, 12, 14 and 19 hold on the copy: its next writer claims streams, takes what waits, and counts."""
    first = f"sqlite:{tmp_path / 'first.db'}"
    async with open_store(first) as store:
        await fill(store)
    for target in (store_url(), f"sqlite:{tmp_path / 'other.db'}"):
        await copied(tmp_path, first, target)
        async with open_store(target) as store:
            await store.join(NODE)
            [record] = await store.forwarded_to(NODE)
            claimed = await store.claim(record.id, node=NODE, held=record.fence)
            assert claimed is not None
            assert (claimed.id, claimed.generation, claimed.last) == (HOME, 3, 9)
            waiting = await store.forwarded(HOME)
            events = [Event(10 + place, 0.0, message.payload) for place, message in enumerate(waiting)]
            await commit(store, an_append(claimed.fence, events, stream=HOME, taken=waiting[-1].key))
            assert not await store.forwarded(HOME)
            assert [end.end for end in await store.generations(HOME)] == [6, 9]
            assert [event.seq for event in await all_events(store, HOME)] == [*range(5, 13)]
            [taken] = await put(
                store, OpenStream(record=a_stream(claimed.fence, "new"), calls=(a_call(2**70, stream="new"),))
            )
            assert taken is not None
            await store.sweep(Cutoffs(events=9.0, answers=0.0))
            assert [event.seq for event in await all_events(store, BATCH)] == [3, 8]
            await store.leave(NODE)


async def test_a_dead_node_is_dead_in_the_copy_with_its_calls_and_its_mail(tmp_path: Path) -> None:
    """Promises 10 and 11: the first server on the copy settles what was not settled."""
    source = f"sqlite:{tmp_path / 'first.db'}"
    async with open_store(source) as store:
        fence = await store.join(NODE)
        await commit(
            store,
            PutSession(record=a_session()),
            OpenStream(record=a_stream(fence), calls=(a_call(),)),
            an_append(fence, some_events(1, 2)),
            PutReader(record=a_reader(seq=1)),
            *(SendMail(node=NODE, message=b"mail %d" % number) for number in range(300)),
        )
        assert not any(await store.commit([MailReceived(node=NODE, through=0)]))
    # Closed without leaving: dead.
    middle, last = store_url(), f"sqlite:{tmp_path / 'copy.db'}"
    await copied(tmp_path, source, middle)
    await copied(tmp_path, middle, last)
    for target in (middle, last):
        async with open_store(target) as store:
            await store.join(OTHER)
            liveness = store.liveness(OTHER, lease=15.0, monotonic=lambda: 0.0)
            assert list(await liveness.dead()) == [NODE]
            [record] = await store.written_by(NODE)
            assert (record.id, record.node) == (STREAM, NODE)
            mail: list[bytes] = []
            key = 0
            while page := await store.mail(NODE, after=key):
                mail += [message for _, message in page]
                key = page[-1].key
            assert mail == [b"mail %d" % number for number in range(300)]
            assert await store.claim(STREAM, node=OTHER, held=record.fence) is not None
            assert [stream.id for stream in await store.bury(NODE, heir=OTHER) or ()] == [STREAM]
            assert (await messages(store, OTHER))[0] == b"mail 0"
            await store.leave(OTHER)


async def test_more_than_one_part_of_each_kind_arrives(tmp_path: Path) -> None:
    """One more than fits, of sessions, of streams and of events."""
    first, middle, last = f"sqlite:{tmp_path / 'first.db'}", store_url(), f"sqlite:{tmp_path / 'last.db'}"
    async with open_store(first) as store:
        fence = await store.join(NODE)
        many = [a_session(f"s{number:03}") for number in range(copying.SESSIONS + 1)]
        await commit(store, *(PutSession(record=record) for record in many))
        for number in range(copying.STREAMS + 1):
            stream = StreamId(f"stream-{number}")
            events = some_events(1, copying.EVENTS + 1 if number == 0 else 1, final=True)
            await commit(
                store,
                OpenStream(
                    record=a_stream(fence, stream, session="s007"),
                    calls=(a_call(number, stream=stream, session="s007"),),
                ),
                an_append(fence, events, stream=stream, ends=(an_end(number),), seal=True),
            )
        await store.leave(NODE)
        before = await picture(store, sessions=("s007", "s100"))
    for source, target in ((first, middle), (middle, last)):
        counts = "101 sessions, 33 streams, 33 calls, 500 events, 33 answers, 0 waiting, 0 asks, 0 tokens, 0 secrets"
        assert (await copied(tmp_path, source, target))[0] == f"copied {counts}"
    async with open_store(last) as store:
        after = await picture(store, sessions=("s007", "s100"))
    plain = [replace(record, fence=Fence(0)) for record in before["s007: streams"]]
    assert after == before | {"s007: streams": plain}


# Refusals


@pytest.mark.parametrize("in_use", ["from", "to"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_store_that_a_server_uses_is_neither_copied_nor_filled(tmp_path: Path, in_use: str, kind: str) -> None:
    used = store_url() if kind == "postgres" else f"sqlite:{tmp_path / 'used.db'}"
    free = f"sqlite:{tmp_path / 'free.db'}"
    await lines(tmp_path, "store", "init", free)
    pair = (used, free) if in_use == "from" else (free, used)
    async with open_store(used) as store:
        await store.join(NODE)
        for more in ((), ("--dry-run",)):
            sentence = await refusal(tmp_path, "store", "copy", *pair, *more)
            assert sentence == f"{used} is in use by node {NODE}; stop its servers first"
        await store.leave(NODE)
    assert (await lines(tmp_path, "store", "copy", *pair))[0].startswith("copied 0 sessions")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_store_that_is_not_empty_is_not_filled(tmp_path: Path, kind: str) -> None:
    source = f"sqlite:{tmp_path / 'first.db'}"
    target = store_url() if kind == "postgres" else f"sqlite:{tmp_path / 'full.db'}"
    for address in (source, target):
        async with open_store(address) as store:
            await commit(store, PutSession(record=a_session(active=1.0 if address == target else 0.0)))
    for more in ((), ("--dry-run",)):
        assert f"{target} is not empty; give an empty store" in await refusal(
            tmp_path, "store", "copy", source, target, *more
        )
    assert "is not empty" in await refusal(tmp_path, "store", "copy", source, source)
    async with open_store(target) as store:
        assert await store.session(SESSION) == a_session(active=1.0)


async def test_a_store_of_an_older_release_is_neither_copied_nor_filled_nor_migrated(tmp_path: Path) -> None:
    old, new = f"sqlite:{tmp_path / 'old.db'}", f"sqlite:{tmp_path / 'new.db'}"
    write_first_layout(tmp_path / "old.db", tmp_path / "diary")
    await lines(tmp_path, "store", "init", new)
    for pair in ((old, new), (new, old)):
        for more in ((), ("--dry-run",)):
            sentence = await refusal(tmp_path, "store", "copy", *pair, *more)
            assert "has version 1" in sentence
            assert "`perdure store migrate`" in sentence
    assert layout(tmp_path / "old.db") == 1


async def test_what_is_not_there_is_not_copied_and_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    there, missing, schema = f"sqlite:{tmp_path / 'there.db'}", f"sqlite:{tmp_path / 'missing.db'}", new_schema()
    await lines(tmp_path, "store", "init", there)
    assert await refusal(tmp_path, "store", "copy", missing, there) == f"{missing} has no store that could be copied"
    for target in (missing, store_url(schema)):
        assert (await lines(tmp_path, "store", "copy", there, target, "--dry-run"))[0].startswith("would copy 0 ")
    assert not (tmp_path / "missing.db").exists()
    with connection(store_url()) as run:
        assert not run("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema)
    assert "a store in memory" in await refusal(tmp_path, "store", "copy", there, "memory:")


# Failures


class Failing(SqliteCopyTarget):
    """Fails when it is given events, or loses one of them."""

    fails = loses = False
    can_clear = True

    async def restore(self, contents: Sequence[Restored]) -> None:
        if self.fails and any(part.events for part in contents):
            raise StoreUnavailable("the disk is full")
        if self.loses:
            contents = [replace(part, events=part.events[1:]) for part in contents]
        await super().restore(contents)

    async def clear(self) -> None:
        if not self.can_clear:
            raise StoreUnavailable("the disk is still full")
        await super().clear()


async def try_to_copy(folder: Path, **troubles: Any) -> str:
    """Why a copy failed."""
    source, target = f"sqlite:{folder / 'first.db'}", f"sqlite:{folder / 'copy.db'}"
    async with open_store(source) as store:
        await fill(store)
    async with existing_store(source, writes=False) as original, Failing(str(folder / "copy.db")) as made:
        for name, value in troubles.items():
            setattr(made, name, value)
        with pytest.raises(StoreError) as failed:
            await copying.copy(original, made, of=upkeep_of(source), to=upkeep_of(target))
    return str(failed.value)


async def test_after_a_failure_the_target_is_empty_again_and_the_copy_can_be_repeated(tmp_path: Path) -> None:
    assert await try_to_copy(tmp_path, fails=True) == "the disk is full"
    source, target = f"sqlite:{tmp_path / 'first.db'}", f"sqlite:{tmp_path / 'copy.db'}"
    with closing(sqlite3.connect(tmp_path / "copy.db")) as file:
        for table in ("session", "stream", "event", "call", "generation", "forward", "chain", "ask", "node", "mail"):
            assert file.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        assert file.execute("SELECT open, ended FROM tally").fetchone() == (0, 0)
    assert (await copied(tmp_path, source, target))[0].startswith("copied 5 sessions")


async def test_a_schema_is_emptied_too(tmp_path: Path) -> None:
    schema = new_schema()
    async with copy_target(store_url(schema), busy_timeout=60.0) as store:
        await fill(store)
        await store.clear()
        assert (await copying.measure(store)).counts() == dict.fromkeys((await copying.measure(store)).counts(), 0)
        with connection(store_url()) as run:
            tables = run("SELECT relname FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind = 'r'", schema)
            full = {name for (name,) in tables if run(f"SELECT 1 FROM {schema}.{name} LIMIT 1")}
            assert full == {"version", "slot", "rotation", "tally", "turn"}
            assert [tuple(row) for row in run(f"SELECT open, ended FROM {schema}.tally")] == [(0, 0)]


async def test_what_arrives_incomplete_is_noticed(tmp_path: Path) -> None:
    sentence = await try_to_copy(tmp_path, loses=True)
    assert sentence.startswith("the copy is not what was copied: ")
    assert "events there" in sentence
    async with open_store(f"sqlite:{tmp_path / 'copy.db'}") as store:
        assert not await store.sessions(after=None, limit=1)


async def test_a_target_that_cannot_be_emptied_is_named(tmp_path: Path) -> None:
    sentence = await try_to_copy(tmp_path, fails=True, can_clear=False)
    assert sentence == (
        f"the disk is full; a part of the copy is left in sqlite:{tmp_path / 'copy.db'} (the disk is still full):"
        " delete the SQLite file, or drop the schema, and try again"
    )


class Visited(Failing):
    """A server starts on it while it is filled."""

    visitor: SqliteStore | None = None

    async def restore(self, contents: Sequence[Restored]) -> None:
        if self.visitor is None:
            self.visitor = SqliteStore(self._path)
            await self.visitor.open()
            await self.visitor.join(NodeId("visitor"))
        await super().restore(contents)


async def test_what_a_server_that_was_started_meanwhile_has_written_is_left_alone(tmp_path: Path) -> None:
    source, target = f"sqlite:{tmp_path / 'first.db'}", f"sqlite:{tmp_path / 'copy.db'}"
    async with open_store(source) as store:
        await fill(store)
    async with existing_store(source, writes=False) as original, Visited(str(tmp_path / "copy.db")) as made:
        with pytest.raises(StoreError, match=r"in use by node visitor.*a part of the copy is left"):
            await copying.copy(original, made, of=upkeep_of(source), to=upkeep_of(target))
        assert await stream_by_id(made, HOME) is not None
        assert made.visitor is not None
        await made.visitor.leave(NodeId("visitor"))
        await made.visitor.aclose()


async def test_a_copy_that_is_killed_leaves_a_store_that_the_next_one_does_not_take(tmp_path: Path) -> None:
    source, schema = f"sqlite:{tmp_path / 'first.db'}", new_schema()
    target = store_url(schema)
    async with open_store(source) as store:
        await fill(store)
    await lines(tmp_path, "store", "init", target)
    with connection(target) as locking, connection(target) as run:
        locking("BEGIN")
        locking(f"LOCK TABLE {schema}.event IN EXCLUSIVE MODE")  # the copy comes as far as this
        copy = await start(tmp_path, "store", "copy", source, target)
        await until(lambda: bool(run(f"SELECT 1 FROM {schema}.session")))
        copy.kill()
        await ended(copy)
        locking("ROLLBACK")
    sentence = await refusal(tmp_path, "store", "copy", source, target)
    assert sentence == (
        f"{target} is not empty; give an empty store. If it holds a part of a copy that was killed, delete the SQLite"
        " file, or drop the schema, and try again"
    )
    with connection(target) as run:
        run(f"DROP SCHEMA {schema} CASCADE")
    assert (await copied(tmp_path, source, target))[0].startswith("copied 5 sessions")


async def test_control_c_leaves_the_target_empty(tmp_path: Path) -> None:
    source, schema = f"sqlite:{tmp_path / 'first.db'}", new_schema()
    target = store_url(schema)
    async with open_store(source) as store:
        await fill(store)
    await lines(tmp_path, "store", "init", target)
    with connection(target) as locking, connection(target) as run:
        locking("BEGIN")
        locking(f"LOCK TABLE {schema}.generation IN EXCLUSIVE MODE")
        copy = await start(tmp_path, "store", "copy", source, target)
        await until(lambda: bool(run(f"SELECT 1 FROM {schema}.session")))
        copy.send_signal(2)
        locking("ROLLBACK")
        status, said, _ = await ended(copy)
    assert (status, said) == (130, "")
    async with open_store(target) as store:
        assert not await store.sessions(after=None, limit=1)


def test_every_target_is_one() -> None:
    targets: list[CopyTarget] = [copy_target("sqlite:x.db", busy_timeout=1.0)]
    assert isinstance(targets[0], SqliteCopyTarget)
