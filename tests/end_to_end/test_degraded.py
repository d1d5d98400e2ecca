"""A failing store does not stop live traffic (promise 7, S7).

The same story for every way in which a store can fail: events and answers go on live from memory, `/healthz` says so,
the log says so once, and when the store is back all held steps are written, in order and once.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure._core.ids import parse_position
from perdure.log.stream import RUN_AHEAD
from perdure.store import MemoryStore, SqliteStore
from tests.support.clients.raw_http import Peer, message, progress, text_of
from tests.support.clients.wire_client import gaps_of, progress_of
from tests.support.servers.gated_server import Live, live, readers
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import FAILS, TIMEOUT, Locked, Outage, Switched, begin_count, recovered, written

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["raises", "raises every third time", "hangs", "late", "breaks", "locked"])
def outage(request: pytest.FixtureRequest, tmp_path: Path) -> Outage:
    path = tmp_path / "log.db"
    match request.param:
        case "raises":
            return Switched(path, Fault.RAISES)
        case "raises every third time":
            return Switched(path, Fault.RAISES, every=3)
        case "hangs":
            return Switched(path, Fault.HANGS)
        case "late":
            return Switched(path, Fault.LATE)
        case "breaks":
            return Switched(path, Fault.BREAKS)
        case _:
            return Locked(path)


@pytest.fixture
async def served(outage: Outage) -> AsyncIterator[Live]:
    async with live(store=outage.store, store_timeout=TIMEOUT, complaint=FAILS) as running:
        yield running


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    actions = [getattr(record, "action", "") for record in caplog.records]
    return [action for action in actions if action in ("store.degraded", "store.recovered")]


async def test_live_goes_on_and_what_was_held_is_written_afterwards(
    outage: Outage, served: Live, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    gate = str(tmp_path)
    peer = await served.session()
    call = await begin_count(peer, gate, first=10, n=150)
    async with outage.begins():
        opened = await peer.call("open_gate", name=gate)
        assert text_of(opened.messages[-1]) == f"opened {gate}"
        answer = await call.answer()
        assert text_of(call.messages[-1]) == "counted to 150"
        assert progress(call.messages) == list(range(1, 151))
        if outage.store.every == 1:
            assert await served.health() == "degraded"
        other = await served.session()
        assert text_of((await other.call("count", n=3)).messages[-1]) == "counted to 3"
    await recovered(served)
    async with await peer.resume(answer.events[0].id) as again:
        assert progress((await again.answer()).messages) == list(range(1, 151))
        assert again.messages == call.messages
    assert written(outage.path) == [list(range(1, 151)), [1, 2, 3]]
    told = outages(caplog)
    assert told == ["store.degraded", "store.recovered"] * (len(told) // 2)
    assert told
    if outage.store.every == 1:
        assert len(told) == 2
    await call.aclose()


async def test_a_call_in_full_flow_stalls_no_longer_than_the_stores_time(outage: Outage, served: Live) -> None:
    peer = await served.session()
    async with await peer.begin_call("count", n=300, interval=0.001) as call:
        await call.until_messages(20)
        longest, last = 0.0, time.monotonic()
        async with outage.begins():
            while await call.read():
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert progress(call.messages) == list(range(1, 301))
        # A busy machine adds to it; a call that waited for the end of the outage would never come here.
        assert longest < TIMEOUT + 15
    await recovered(served)


async def test_a_session_may_come_and_go_within_an_outage(outage: Outage, served: Live, tmp_path: Path) -> None:
    before = await served.session()
    running = await begin_count(before, str(tmp_path), first=2, n=4)
    async with outage.begins():
        within = await served.session()
        assert progress((await within.call("count", n=5)).messages) == [1, 2, 3, 4, 5]
        assert (await within.delete()).status == 200
        assert (await before.delete()).status == 200
        assert (await running.answer()).messages[-1]["error"]["code"] == -32800
        assert (await within.call("count", n=1)).status == 404
    await recovered(served)
    with contextlib.closing(sqlite3.connect(outage.path)) as connection:
        assert connection.execute("SELECT count(*) FROM stream").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM event").fetchone() == (0,)
        assert connection.execute("SELECT DISTINCT state FROM session").fetchall() == [("ended",)]
    await running.aclose()


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS])
async def test_a_client_may_begin_again_within_an_outage(fault: Fault) -> None:
    """R10, promise 7: its session goes on from memory, as live traffic does; its ids and tokens begin again."""
    shop, store = ToolServer(), FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, store_timeout=TIMEOUT, complaint=FAILS) as site:
        peer = await site.join()
        old = await peer.call("count", n=2, gate="old", pauses=[1], id=1, token=1)
        assert progress_of([await old.message()]) == [1]
        store.writes = store.reads = fault
        again = await peer.reattach()
        assert again.session == peer.session
        standalone = await again.get()
        await standalone.event()
        new = await again.call("count", n=2, gate="new", pauses=[1], id=1, token=1)
        assert progress_of([await new.message()]) == [1]
        shop.open("old/1")
        said = await standalone.message()
        assert (said["params"]["progress"], said["params"]["progressToken"]) == (2, "1:1")
        shop.open("new/1")
        assert text_of((await new.rest())[-1]) == "counted to 2"
        store.works()
        assert text_of((await (await again.get(old.last_id)).rest())[-1]) == "counted to 2"
        await recovered(Peer(port=site.port))


async def test_a_cut_call_is_resumed_within_an_outage_from_memory(outage: Outage, served: Live, tmp_path: Path) -> None:
    gate = str(tmp_path)
    peer = await served.session()
    call = await begin_count(peer, gate, first=5, n=40)
    position = call.position
    async with outage.begins():
        call.cut()
        await peer.call("open_gate", name=gate)
        async with await peer.resume(position) as again:
            assert progress((await again.answer()).messages) == list(range(6, 41))
    await recovered(served)
    assert list(range(1, 41)) in written(outage.path)


@pytest.mark.parametrize("held", [True, False])
async def test_an_answer_behind_a_gap_comes_once_wherever_it_is_kept(held: bool, tmp_path: Path) -> None:
    """Promises 3 and 4: an answer that is only held is not taken for one that is gone."""
    shop, store = ToolServer(), FaultyStore(SqliteStore(str(tmp_path / "log.db")))
    async with serve(shop.server, store=store, store_timeout=TIMEOUT, max_stream_events=10, complaint=FAILS) as site:
        peer = await site.join()
        wire = await peer.call("count", n=60, gate="g", pauses=[1, 60], token=1, id=7)
        assert progress_of(await wire.messages(1)) == [1]
        await wire.drop()
        shop.open("g/1")
        position = parse_position(wire.last_id)
        assert position is not None

        async def trimmed() -> bool:
            kept = await store.read(position.stream, after=0, limit=100)
            return [event.seq for event in kept] == list(range(51, 61))

        await until(trimmed)
        store.writes = Fault.RAISES if held else Fault.NONE
        shop.open("g/60")
        await until(lambda: "counted 60" in shop.seen)
        messages = await (await peer.get(wire.last_id)).rest()
        assert gaps_of(messages) == [(2, 50)]
        assert progress_of(messages) == list(range(51, 61))
        assert [message["result"]["content"][0]["text"] for message in messages if "id" in message] == ["counted to 60"]
        store.works()


async def test_a_session_that_is_deleted_while_its_request_waits_for_the_store_answers_404(tmp_path: Path) -> None:
    store = FaultyStore(SqliteStore(str(tmp_path / "log.db")))
    async with live(store=store, store_timeout=0.5, complaint=FAILS) as served:
        peer = await served.session()
        over = await peer.call("count", n=1)
        store.writes = store.reads = Fault.HANGS
        async with await peer.begin_call("count", n=1) as call, await peer.resume(over.events[0].id) as resumed:
            await until(lambda: store.asked)
            assert (await peer.delete()).status == 200
            store.works()
            assert (await call.answer()).status == 404
            assert (await resumed.answer()).status in (404, 503)
        await recovered(served)
        with contextlib.closing(sqlite3.connect(tmp_path / "log.db")) as connection:
            assert connection.execute("SELECT count(*) FROM stream").fetchone() == (0,)


async def test_a_handshake_that_outlasts_its_time_because_of_the_store_is_refused() -> None:
    store = FaultyStore(MemoryStore())
    async with live(store=store, store_timeout=0.5, session_grace=0.05, complaint=FAILS) as served:
        store.writes = Fault.HANGS
        assert (await served.initialize()).status == 503
        assert served.app.session_ids() == []
        store.works()
        await recovered(served)
        assert (await served.initialize()).status == 200


# The bound of what is held


async def test_beyond_the_bound_calls_wait_and_new_requests_are_refused(tmp_path: Path) -> None:
    store = FaultyStore(SqliteStore(str(tmp_path / "log.db")))
    async with live(store=store, store_timeout=TIMEOUT, max_held_events=50, complaint=FAILS) as served:
        peer = await served.session()
        store.writes = Fault.RAISES
        async with await peer.begin_call("count", n=400) as call:
            await until(lambda: served.app.counters.events_held >= 50)
            held = await call.until_messages(50)
            assert progress(held) == list(range(1, len(held) + 1))
            refused = await peer.call("count", n=1, id="refused")
            assert (refused.status, refused.header("retry-after")) == (503, "1")
            assert refused.json["id"] == "refused"
            assert refused.error == {"code": -31005, "message": "The log of this server fails at the moment; try again"}
            assert (await served.initialize()).status == 503
            health = await served.ask("GET", path="/healthz")
            assert (health.status, health.json) == (503, {"status": "degraded"})
            assert served.app.counters.events_held <= RUN_AHEAD  # as far as the call was ahead, and no further
            store.works()
            await call.answer()
            assert progress(call.messages) == list(range(1, 401))
            assert text_of(call.messages[-1]) == "counted to 400"
        await recovered(served)
        assert progress((await peer.call("count", n=2)).messages) == [1, 2]
    assert written(tmp_path / "log.db") == [list(range(1, 401)), [1, 2]]


# Refusing in place of holding


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS, Fault.LATE])
async def test_with_refuse_new_calls_get_503_and_running_calls_wait(
    fault: Fault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = str(tmp_path)
    store = FaultyStore(SqliteStore(str(tmp_path / "log.db")))
    async with live(store=store, store_timeout=TIMEOUT, on_store_failure="refuse", complaint=FAILS) as served:
        peer = await served.session()
        call = await begin_count(peer, gate, first=5, n=200)
        opener = await peer.begin_call("wait", gate=f"{gate}/never")
        store.writes = fault
        for _ in range(3):
            refused = await peer.call("open_gate", name=gate)
            assert (refused.status, refused.header("retry-after")) == (503, "1")
            assert refused.error["code"] == -31005
        assert (await served.initialize()).status == 503
        assert await served.health() == "degraded"
        assert (await served.ask("GET", path="/healthz")).status == 503
        store.works()
        await recovered(served)
        assert (await peer.call("open_gate", name=gate)).status == 200
        store.writes = fault
        seen = len(call.messages)
        await call.until_messages(seen)
        store.works()
        await call.answer()
        assert progress(call.messages) == list(range(1, 201))
        assert text_of(call.messages[-1]) == "counted to 200"
        await recovered(served)
        opener.cut()
        await opener.aclose()
        await call.aclose()
    assert list(range(1, 201)) in written(tmp_path / "log.db")
    told = outages(caplog)
    assert told == ["store.degraded", "store.recovered"] * (len(told) // 2)
    assert 1 <= len(told) // 2 <= 2


async def test_refusing_no_event_leaves_before_it_is_written(tmp_path: Path) -> None:
    gate = str(tmp_path)
    store = FaultyStore(MemoryStore())
    async with live(store=store, store_timeout=TIMEOUT, on_store_failure="refuse", complaint=FAILS) as served:
        peer = await served.session()
        async with await begin_count(peer, gate, first=3, n=10) as call:
            passing = await peer.begin_call("wait", gate=gate)
            assert await passing.head() == 200
            store.writes = Fault.RAISES
            open_gate(gate)
            await until(lambda: store.asked >= 3)
            assert progress(call.messages) == [1, 2, 3]
            store.works()
            await call.answer()
            assert progress(call.messages) == list(range(1, 11))
            assert text_of((await passing.answer()).messages[-1]) == f"went through {gate}"
        await passing.aclose()


# Reading


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS])
async def test_a_resume_that_cannot_be_read_is_refused_for_the_moment(fault: Fault, tmp_path: Path) -> None:
    gate = str(tmp_path)
    store = FaultyStore(SqliteStore(str(tmp_path / "log.db")))
    async with live(store=store, store_timeout=TIMEOUT) as served:
        peer = await served.session()
        over = await peer.call("count", n=5)
        running = await begin_count(peer, gate, first=5, n=10)
        start = running.events[0].id
        running.cut()
        await until(lambda: readers(served, peer) == 0)
        store.reads = fault
        for position in (over.events[0].id, start):
            async with await peer.resume(position) as refused:
                answer = await refused.answer()
            assert (answer.status, answer.header("retry-after")) == (503, "1")
            assert answer.error == {"code": -31005, "message": "The log of this server fails at the moment; try again"}
        assert await served.health() == "ok"
        store.works()
        async with await peer.resume(over.events[0].id) as again:
            assert progress((await again.answer()).messages) == [1, 2, 3, 4, 5]
        async with await peer.resume(start) as again:
            await peer.call("open_gate", name=gate)
            assert progress((await again.answer()).messages) == list(range(1, 11))
        await running.aclose()


@pytest.mark.parametrize("json_response", [False, True])
async def test_a_store_that_cannot_be_read_does_not_keep_answers_back(json_response: bool) -> None:
    store = FaultyStore(MemoryStore())
    async with live(store=store, store_timeout=TIMEOUT, json_response=json_response) as served:
        peer = await served.session()
        store.reads = Fault.RAISES
        answer = await peer.call("count", n=3)
        assert answer.status == 200
        response = answer.json if json_response else answer.messages[-1]
        assert text_of(response) == "counted to 3"
        other = await served.initialize()
        assert other.status == 200
        failed = await served.ask("POST", message("initialize", {"nothing": "useful"}, id=1))
        assert (failed.status, failed.error["code"]) == (200, -32602)


# The end


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS])
async def test_a_server_with_a_failing_store_stops_all_the_same(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(MemoryStore())
    async with live(store=store, store_timeout=TIMEOUT, complaint="the store") as served:
        peer = await served.session()
        store.writes = fault
        assert progress((await peer.call("count", n=3)).messages) == [1, 2, 3]
    assert "journal.lost" in [getattr(record, "action", "") for record in caplog.records]
