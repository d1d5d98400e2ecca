"""A failing store does not stop live traffic (promise 7, S7).

The same story for every way in which a store can fail: events and answers go on live from memory, `/healthz` says so,
the log says so once, and when the store is back everything held is written, in order and once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from perdure.store import MemoryStore, SqliteStore
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.gated import open_gate
from tests.support.live import Live, live, readers
from tests.support.raw import Exchange, Peer, SessionPeer, message, progress, text_of
from tests.support.serving import SERVE, Served, serving
from tests.support.site import until

pytestmark = pytest.mark.anyio

TIMEOUT = 0.2
"""`store_timeout`, short, because several outages begin with it."""

FAILS = "the store fails"
"""The error that an outage logs; any other one fails the test."""


class Outage:
    """A store that can be made to fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = FaultyStore(SqliteStore(str(path), busy_timeout=TIMEOUT))

    def begins(self) -> AbstractAsyncContextManager[None]:
        """Fail from now on, until the block ends."""
        raise NotImplementedError


class Switched(Outage):
    def __init__(self, path: Path, fault: Fault, every: int = 1) -> None:
        super().__init__(path)
        self.store.every = every
        self._fault = fault

    @asynccontextmanager
    async def begins(self) -> AsyncIterator[None]:
        self.store.writes = self._fault
        yield
        self.store.works()


class Locked(Outage):
    """Another process holds the file."""

    HOLDER = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('BEGIN EXCLUSIVE'); print('held', flush=True); sys.stdin.read()"
    )

    @asynccontextmanager
    async def begins(self) -> AsyncIterator[None]:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-c", self.HOLDER, str(self.path))
        holder = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert await holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.stdin.close()
            await holder.wait()


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


async def recovered(peer: Peer) -> None:
    """Wait until the outage is over for the server as well."""
    async with asyncio.timeout(20):
        while await peer.health() != "ok":  # noqa: ASYNC110 - the server may be another process
            await asyncio.sleep(0.01)


async def begin_count(peer: SessionPeer, gate: str, *, first: int, n: int) -> Exchange:
    """A call that has reported `first` of `n`, all of which are here, and waits at a gate."""
    call = await peer.begin_call("count", n=n, gate=gate, first=first)
    assert progress(await call.until_messages(first)) == list(range(1, first + 1))
    return call


def written(path: Path) -> list[list[int]]:
    """The progress numbers in the file, stream by stream, in the order of their sequence numbers."""
    streams: dict[int, list[int]] = {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for stream, payload in connection.execute("SELECT stream, payload FROM event ORDER BY stream, seq"):
            parsed = json.loads(payload)
            if parsed.get("method") == "notifications/progress":
                streams.setdefault(stream, []).append(parsed["params"]["progress"])
    return list(streams.values())


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
        assert longest < TIMEOUT + 1.5
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
            assert refused.error == {"code": -31005, "message": "The log cannot be written at the moment"}
            assert (await served.initialize()).status == 503
            health = await served.ask("GET", path="/healthz")
            assert (health.status, health.json) == (503, {"status": "degraded"})
            assert served.app.counters.events_held < 150  # one more of each stream, not all of them
            store.works()
            await call.answer()
            assert progress(call.messages) == list(range(1, 401))
            assert text_of(call.messages[-1]) == "counted to 400"
        await recovered(served)
        assert progress((await peer.call("count", n=2)).messages) == [1, 2]
    assert written(tmp_path / "log.db") == [list(range(1, 401)), [1, 2]]


# Refusing in place of holding


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS, Fault.LATE])
async def test_whoever_prefers_it_gets_503_and_running_calls_wait(
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


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS, Fault.BREAKS])
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
            assert answer.error == {"code": -31005, "message": "The log cannot be read at the moment"}
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


# A disk that is full


@asynccontextmanager
async def small_disk(tmp_path: Path, *options: str) -> AsyncIterator[tuple[Served, Path]]:
    """A server whose log lies on a disk of 2 MiB of its own; gives the server and the disk as seen from here."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m disk "$0" && exec "$@"')
    if not await asyncio.to_thread(_can_run, (*mount, str(disk), "true")):
        pytest.skip("this system lets nobody mount a disk in a namespace of its own")
    store = ("--store", f"sqlite:{disk / 'log.db'}", "--store-timeout", str(TIMEOUT))
    async with serving("tests.support.gated:server", *store, *options, argv=(*mount, str(disk), *SERVE)) as served:
        yield served, Path(f"/proc/{served.pid}/root{disk}")


def _can_run(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def fill(disk: Path) -> Path:
    """Leave no block free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler


async def test_a_full_disk_does_not_stop_live_traffic(tmp_path: Path) -> None:
    async with small_disk(tmp_path) as (served, disk):
        peer = await Peer(port=served.port).session()
        call = await begin_count(peer, "full", first=3, n=120)
        filler = fill(disk)
        while await peer.health() == "ok":
            await peer.call("shout", text="fill up what the log still has", times=20)
        await peer.call("open_gate", name="full")
        start = (await call.answer()).events[0].id
        assert progress(call.messages) == list(range(1, 121))
        assert text_of((await (await peer.session()).call("count", n=1)).messages[-1]) == "counted to 1"
        filler.unlink()
        await recovered(peer)
        async with await peer.resume(start) as again:
            await again.answer()
            assert again.messages == call.messages
        await call.aclose()
        told = [line for line in served.output if "the store" in line]
        assert [line for line in told if "the store fails" in line] == told[:1]
        assert [line for line in told if "the store is back" in line] == told[1:]


async def test_a_full_disk_is_one_outage_also_where_requests_are_refused(tmp_path: Path) -> None:
    async with small_disk(tmp_path, "--on-store-failure", "refuse") as (served, disk):
        peer = await Peer(port=served.port).session()
        filler = fill(disk)
        # The request itself does not fit, so nothing is left to be written later that would show that it still fails.
        while (await peer.call("count", n=1, padding="x" * 200_000)).status == 200:
            pass
        for _ in range(10):
            assert await peer.health() == "degraded"
            assert (await peer.call("count", n=1)).status == 503
            await asyncio.sleep(0.05)  # while it is tried whether the disk takes writes again
        filler.unlink()
        await recovered(peer)
        assert (await peer.call("count", n=1)).status == 200
        assert len([line for line in served.output if "the store fails" in line]) == 1


async def test_a_file_that_may_not_grow_does_not_stop_live_traffic(tmp_path: Path) -> None:
    options = ("--store", f"sqlite:{tmp_path / 'log.db'}", "--store-timeout", str(TIMEOUT))
    async with serving("tests.support.gated:server", *options) as served:
        peer = await Peer(port=served.port).session()
        limits = resource.prlimit(served.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, ((tmp_path / "log.db-wal").stat().st_size, limits[1]))
        answer = await peer.call("count", n=100)
        assert progress(answer.messages) == list(range(1, 101))
        assert await peer.health() == "degraded"
        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, limits)
        await recovered(peer)
        async with await peer.resume(answer.events[0].id) as again:
            assert progress((await again.answer()).messages) == list(range(1, 101))
