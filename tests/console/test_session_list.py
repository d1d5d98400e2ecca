"""The list of sessions: its order, its pages and filters, and how many sessions it has."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure._core.ids import Kind, RecordKind, StreamId
from perdure._core.states import SessionState
from perdure.console.sessions import MAX_LISTED, ListQuery, SessionList, StoreView, newest
from perdure.store import SqliteStore
from perdure.store.records import CallRecord, SessionRecord, StreamRecord
from perdure.store.steps import OpenStream, PutSession
from tests.console.test_reading import NODE, NOON, a_session, fill

pytestmark = pytest.mark.anyio

COUNT = MAX_LISTED + 100


def a_record(number: int) -> SessionRecord:
    """Every tenth is a task, every second has rested since long, and all have their own time."""
    record = a_session(
        f"{number * 7919 % COUNT:06d}".ljust(43, "x"),
        owner=f"user-{number % 3}",
        state=SessionState.DORMANT if number % 2 else SessionState.ACTIVE,
        active=NOON + number,
    )
    return replace(record, kind=RecordKind.CALL, is_task=True, standalone=StreamId("")) if number % 10 == 0 else record


async def test_pages_give_each_session_once_the_last_active_one_first_and_filters_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "perdure.db"
    async with SqliteStore(str(path)) as store:
        fence = await store.join(NODE)
        await store.commit([PutSession(record=a_record(number)) for number in range(COUNT)])
        for number, tool in ((141, "bake"), (143, "bake"), (145, "eat")):
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
        sessions = SessionList(view)

        async def pages(**query: str) -> tuple[list[str], int]:
            ids: list[str] = []
            offset = ""
            while True:
                page = await sessions.page(ListQuery.parse({**query, "offset": offset}))
                assert page["left_out"] is ("q" not in query)
                ids += [item["id"] for item in page["items"]]
                if page["next"] is None:
                    return ids, page["total"]
                assert len(page["items"]) == int(query.get("limit", "100"))
                offset = str(page["next"])

        def those(is_wanted: Any) -> tuple[list[str], int]:
            ids = [str(a_record(number).id) for number in reversed(range(COUNT)) if is_wanted(number)]
            return ids, len(ids)

        async with aclosing(view):
            assert await pages(limit="200") == those(lambda n: n >= 100)
            assert await pages(kind="task", owner="user-1") == those(lambda n: n >= 100 and n % 10 == 0 and n % 3 == 1)
            assert await pages(kind="session", state="active", active_after=str(NOON + 1000)) == those(
                lambda n: n % 10 and n % 2 == 0 and n >= 1000
            )
            assert await pages(active_before=str(NOON + 107), limit="3") == those(lambda n: 100 <= n <= 107)
            assert await pages(tool="bake") == those(lambda n: n in (141, 143))
            assert await pages(q=a_record(9).id[:6]) == those(lambda n: n == 9), "also of sessions that are not listed"
            assert await pages(q="0001", state="dormant", limit="7") == those(
                lambda n: a_record(n).id.startswith("0001") and n % 2 and n % 10
            )
            assert await pages(q="\0") == ([], 0)
            counts = (await sessions.snapshot()).counts
            assert counts == {"sessions": COUNT * 9 // 10, "ended": 0, "calls": COUNT // 10, "running": 3}
            assert await pages(tool="bake", state="active") == ([], 0)


def test_of_a_sessions_streams_those_that_are_not_over_are_shown_and_the_newest_of_the_others() -> None:
    streams = [{"id": number, "sealed": number != 2} for number in range(6)]
    assert newest(streams, most=6) == streams
    assert [stream["id"] for stream in newest(streams, most=5)] == [1, 2, 3, 4, 5]
    assert [stream["id"] for stream in newest(streams, most=2)] == [2, 5]
    assert [stream["id"] for stream in newest(streams, most=0)] == [2]


@pytest.mark.parametrize(("most", "told"), [(3, (3, True)), (2, (2, False))])
async def test_events_are_counted_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, told: tuple[int, bool]
) -> None:
    monkeypatch.setattr("perdure.store.sqlite.reads.MAX_COUNTED", most)
    async with SqliteStore(str(tmp_path / "perdure.db")) as store:
        await fill(store)
        assert (await store.extent())[1:3] == told
