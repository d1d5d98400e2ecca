"""After sessions end, memory and rows go back (S9).

A thousand sessions come, call tools, lose connections in several ways, meet an outage of the store, and go: some
say goodbye, the others are left to expire. Then everything that was made for them is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from perdure.http.event_stream import EventStreamResponse
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.runtime.sdk import SdkRuntime
from perdure.serve.connection import Connection
from perdure.sessions.ledger import Call
from perdure.sessions.runtime_link import RuntimeLink
from perdure.sessions.session import Session
from perdure.store import SqliteStore
from tests.support.clients.raw_http import SessionPeer, message
from tests.support.servers.gated_server import Live, live, readers
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import until
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

SESSIONS = 120
AT_ONCE = 10
OUTAGE = range(60, 80)
"""The sessions that begin while the store fails."""

OURS: tuple[type[Any], ...] = (
    Session,
    Stream,
    Reader,
    SdkRuntime,
    RuntimeLink,
    Call,
    EventStreamResponse,
    Connection,
    HttpRequest,
    asyncio.Task,
)


class Census:
    """What is alive: our objects, tasks, and sockets; without what earlier tests of this process still hold."""

    def __init__(self) -> None:
        self._others: list[Any] = _ours()
        self._known = {id(thing) for thing in self._others}

    def count(self) -> Counter[str]:
        alive = Counter(type(thing).__name__ for thing in _ours() if id(thing) not in self._known)
        alive["socket"] = sum(_is_socket(name) for name in os.listdir("/proc/self/fd"))
        return alive

    async def at_rest(self) -> Counter[str]:
        """Once the server knows that all connections are closed."""
        await until(lambda: self.count()["Connection"] == 0)
        return self.count()


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except FileNotFoundError:
        return False  # the one that listed them


def _ours() -> list[Any]:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, OURS)]


def rows(path: Path) -> dict[str, int]:
    tables = ("session", "stream", "event", "call", "ask", "reader", "generation", "mail")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


async def live_and_leave(served: Live, number: int, gate: str = "leaks") -> None:
    """One session's life; how it goes depends on its number."""
    peer = await served.session("2025-11-25" if number % 2 else "2025-03-26")
    assert (await peer.call("count", n=3)).status == 200
    await [_cut_a_call, _cut_the_standalone_stream, _resume_and_cut, _be_refused, _leave_an_ask][number % 5](peer, gate)
    if number % 2:
        assert (await peer.delete()).status == 200


async def _cut_a_call(peer: SessionPeer, gate: str) -> None:
    """The tool finishes later, with nobody there."""
    call = await peer.begin_call("count", n=10, gate=gate, first=5)
    await call.until_messages(5)
    call.cut()
    await call.aclose()


async def _cut_the_standalone_stream(peer: SessionPeer, gate: str) -> None:
    standalone = await peer.resume("")
    await standalone.head()
    assert (await peer.call("announce", n=3)).status == 200
    await standalone.until_messages(3)
    standalone.cut()
    await standalone.aclose()


async def _resume_and_cut(peer: SessionPeer, gate: str) -> None:
    over = await peer.call("count", n=5)
    for event in over.events:
        again = await peer.resume(event.id)
        await again.head()
        again.cut()
        await again.aclose()


async def _be_refused(peer: SessionPeer, gate: str) -> None:
    assert (await peer.ask("POST", b"{}")).status == 400
    assert (await peer.ask("GET", headers={"last-event-id": "c" + "A" * 22 + ".000001.0000000001"})).status == 400
    assert (await peer.ask("POST", message("initialize", {"protocolVersion": 1}, id=1))).status == 200


async def _leave_an_ask(peer: SessionPeer, gate: str) -> None:
    """The tool waits for an answer that never comes."""
    asking = await peer.begin_call("ask_roots")
    await asking.head()
    asking.cut()
    await asking.aclose()


async def test_many_sessions_leave_nothing_behind(tmp_path: Path) -> None:
    path, census = tmp_path / "log.db", Census()
    store = FaultyStore(SqliteStore(str(path)))
    # On a busy machine a session waits for seconds between two of its requests.
    expiry: dict[str, Any] = {"session_grace": 1.0, "replay_window": 8.0, "event_ttl": 8.0, "cleanup_interval": 0.5}
    async with live(store=store, complaint="the store fails", **expiry) as served:
        await asyncio.gather(*(live_and_leave(served, number, "warm-up") for number in range(AT_ONCE)))
        open_gate("warm-up")
        await until(lambda: served.app.session_ids() == [])
        await until(lambda: sum(rows(path).values()) == 0)
        before = await census.at_rest()

        numbers = iter(range(SESSIONS))

        async def keep_coming() -> None:
            for number in numbers:
                store.writes = Fault.RAISES if number in OUTAGE else Fault.NONE
                await live_and_leave(served, number)

        await asyncio.gather(*(keep_coming() for _ in range(AT_ONCE)))
        assert served.app.counters.sessions_opened == (SESSIONS + AT_ONCE) * 6 // 5
        assert served.app.counters.outages == 1
        open_gate("leaks")
        await until(lambda: served.app.session_ids() == [])
        await until(lambda: sum(rows(path).values()) == 0)
        try:
            await until(lambda: census.count() <= before)  # the server looks at the store now and then, in a task
        finally:
            print("left:", census.count() - before)


async def test_resumes_that_are_refused_leave_no_stream_loaded(tmp_path: Path) -> None:
    census = Census()
    async with live(store=f"sqlite:{tmp_path / 'log.db'}") as served:
        peer = await served.session()
        calls = [await peer.call("count", n=2) for _ in range(20)]
        assert (await peer.ask("GET", headers={"last-event-id": calls[0].events[0].id})).status == 200
        before = await census.at_rest()
        for call in calls:
            assert (await peer.ask("GET", headers={"last-event-id": call.events[-1].id})).status == 405
        assert readers(served, peer) == 0
        await until(lambda: census.count() <= before)  # the server looks at the store now and then, in a task


async def test_a_session_at_rest_keeps_nothing_of_its_last_request(tmp_path: Path) -> None:
    """Bodies may be large, and there may be many sessions."""
    census = Census()
    async with live(store=f"sqlite:{tmp_path / 'log.db'}") as served:
        peer = await served.session()
        for body in (
            peer.call_body("count", n=2),
            message("notifications/progress", {"progressToken": 1, "progress": 1}),
        ):
            assert (await peer.ask("POST", body)).status in (200, 202)
            alive = await census.at_rest()
            assert (alive["Session"], alive["SdkRuntime"]) == (1, 1)
            assert (alive["Call"], alive["Request"], alive["Reader"], alive["Streamed"]) == (0, 0, 0, 0)


async def test_a_call_that_is_over_goes_without_the_garbage_collector() -> None:
    """Objects that hold each other would wait for it, and a busy server would spend its time on collecting them."""

    def alive() -> Counter[str]:
        kinds = (Reader, Stream, Call, EventStreamResponse)
        return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))

    async with live() as served:
        peer = await served.session()
        await peer.call("count", n=3)
        gc.collect()
        before = alive()
        gc.disable()
        try:
            for _ in range(10):
                assert (await peer.call("count", n=3)).status == 200
            await until(lambda: alive() <= before)
        finally:
            gc.enable()
