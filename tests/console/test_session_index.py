"""The list of sessions: its order, its pages and filters, and how much of it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.states import SessionState
from perdure.console import parameters
from perdure.console.node_watch import GONE_SECONDS, MAX_GONE, PAUSE, NodeWatch
from perdure.console.session_index import OUTLINES, SessionIndex, arrange, trim
from perdure.console.session_view import newest
from perdure.console.store_view import StoreView
from perdure.store import SqliteStore
from perdure.store.records import CallRecord, Outline, SessionRecord, StreamRecord
from perdure.store.steps import OpenStream, PutSession
from tests.console.test_reading import NODE, NOON, a_session, fill

pytestmark = pytest.mark.anyio

COUNT = OUTLINES + 100


def a_record(number: int) -> SessionRecord:
    """Every tenth is a task, every second has rested since long, and all have their own time."""
    record = a_session(
        f"{number * 7919 % COUNT:06d}".ljust(43, "x"),
        owner=f"user-{number % 3}",
        state=SessionState.DORMANT if number % 2 else SessionState.ACTIVE,
        active=NOON + number,
    )
    return replace(record, kind=RecordKind.CALL, standalone=StreamId("")) if number % 10 == 0 else record


async def test_pages_give_each_session_once_the_last_active_one_first_and_filters_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "perdure.db"
    async with SqliteStore(str(path)) as store:
        fence = await store.join(NODE)
        await store.commit([PutSession(record=a_record(number)) for number in range(COUNT)])
        for number, tool in ((41, "bake"), (43, "bake"), (45, "eat")):
            session, stream = a_record(number).id, StreamId(f"stream-{number}")
            opened = StreamRecord(id=stream, session=session, kind=Kind.CALL, node=NODE, fence=fence, opened=NOON)
            request = b'{"id":1,"method":"tools/call","params":{"name":"%s"}}' % tool.encode()
            row = CallRecord(
                session=session,
                incarnation=1,
                request_id=1,
                stream=stream,
                method="tools/call",
                request=request,
                principal="",
            )
            await store.commit([OpenStream(record=opened, calls=(row,))])
        view = StoreView(f"sqlite:{path}")
        index = SessionIndex(view)

        async def pages(**query: str) -> tuple[list[str], int]:
            ids: list[str] = []
            cursor = ""
            while True:
                page = await index.page(parameters.wanted({**query, "cursor": cursor}))
                ids += [item["id"] for item in page["items"]]
                if page["next"] is None:
                    return ids, page["total"]
                assert len(page["items"]) == int(query.get("limit", "100"))
                cursor = page["next"]

        def those(is_wanted: Any) -> tuple[list[str], int]:
            ids = [a_record(number).id for number in reversed(range(COUNT)) if is_wanted(number)]
            return list(ids), len(ids)

        try:
            assert await pages(limit="200") == those(lambda n: True)
            assert await pages(kind="task", owner="user-1") == those(lambda n: n % 10 == 0 and n % 3 == 1)
            assert await pages(kind="session", state="active", active_after=str(NOON + 1000)) == those(
                lambda n: n % 10 and n % 2 == 0 and n >= 1000
            )
            assert await pages(active_before=str(NOON + 7), limit="3") == those(lambda n: n <= 7)
            assert await pages(tool="bake") == those(lambda n: n in (41, 43))
            assert await pages(q=a_record(9).id[:6]) == those(lambda n: n == 9)
            assert await pages(tool="bake", state="active") == ([], 0)
        finally:
            await index.aclose()
            await view.aclose()


def an_outline(number: int, **more: Any) -> Outline:
    outline = Outline(
        *(SessionId(f"s{number}"), "", SessionState.ACTIVE, "2025-11-25", True, NOON, NOON + number),
        *(RecordKind.SESSION, None),
    )
    return outline._replace(**more)


def test_the_index_takes_so_many_records_and_leaves_out_those_without_activity_for_longest() -> None:
    outlines = [an_outline(number) for number in range(8)]
    full = arrange(outlines, (), most=8)
    assert ([one.id for one in full.outlines], full.left_out) == ([f"s{n}" for n in range(7, -1, -1)], False)
    over = arrange(outlines, (), most=7)
    assert ([one.id for one in over.outlines], over.left_out) == ([f"s{n}" for n in range(7, 0, -1)], True)
    assert trim(outlines, most=6) == outlines
    assert {one.id for one in trim(outlines, most=5)} == {f"s{n}" for n in range(2, 8)}, "one more than it takes"
    assert arrange(trim(outlines, most=5), (), most=5).left_out


def test_of_a_sessions_streams_those_that_are_not_over_are_shown_and_the_newest_of_the_others() -> None:
    streams = [{"id": number, "sealed": number != 2} for number in range(6)]
    assert newest(streams, most=6) == streams
    assert [stream["id"] for stream in newest(streams, most=5)] == [1, 2, 3, 4, 5]
    assert [stream["id"] for stream in newest(streams, most=2)] == [2, 5]
    assert [stream["id"] for stream in newest(streams, most=0)] == [2]


async def test_nodes_that_are_gone_are_shown_for_a_while_and_the_last_ones_of_many(tmp_path: Path) -> None:
    path = tmp_path / "perdure.db"
    now = 0.0
    async with SqliteStore(str(path)) as store:
        view = StoreView(f"sqlite:{path}")
        index = SessionIndex(view)
        watch = NodeWatch(view, index, clock=lambda: NOON, monotonic=lambda: now)

        async def shown() -> list[tuple[str, str]]:
            nonlocal now
            now += PAUSE + 10  # too old: it is looked at again
            return [(node["id"], node["state"]) for node in await watch.objects()]

        names = [NodeId(f"n{number}") for number in range(MAX_GONE + 1)]
        for name in names:
            await store.join(name)
        assert await shown() == [(name, "alive") for name in names]
        for name in names[1:]:
            await store.leave(name)
        gone = [(name, "gone") for name in reversed(names[1:])]
        assert [await shown(), len(gone)] == [[("n0", "alive"), *gone], MAX_GONE]
        await store.leave(names[0])
        assert await shown() == [("n0", "gone"), *gone[:-1]], "the one that is gone for longest makes room"
        now += GONE_SECONDS - PAUSE - 10.1
        assert await shown() == [("n0", "gone")]
        assert await shown() == []
        await watch.aclose()
        await index.aclose()
        await view.aclose()


@pytest.mark.parametrize(("most", "told"), [(3, (3, True)), (2, (2, False))])
async def test_events_are_counted_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, told: tuple[int, bool]
) -> None:
    monkeypatch.setattr("perdure.store.sqlite.reads.MAX_COUNTED", most)
    async with SqliteStore(str(tmp_path / "perdure.db")) as store:
        await fill(store)
        assert (await store.extent())[1:3] == told


def test_records_are_counted_by_what_they_are() -> None:
    call = {"kind": RecordKind.CALL}
    counts = arrange(
        [
            an_outline(1),
            an_outline(2, state=SessionState.ENDED),
            an_outline(3, **call),
            an_outline(4, **call, initialized=False),
            an_outline(5, state=SessionState.OPENING),
        ],
        (),
    ).counts
    assert counts == {"sessions": 1, "tasks": 1, "calls": 1, "ended": 1, "running": 0}
