"""Hundreds of cuts at random moments lose and repeat nothing (promise 2, R3, R4, S3, P5).

Each client calls a tool that sends numbered events, and cuts its connection again and again: after some bytes, which
may be in the middle of the head or of an event, or after some time; with a reset, with a proper close, by leaving the
old connection open and unread, or by coming back twice at once. It resumes with the id of the last event that
came whole. The moments are random, their seeds are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import Context, MCPServer

from perdure._core.ids import parse_position
from perdure.store import SqliteStore
from tests.support.clients.raw_http import Exchange, Peer, SessionPeer, progress, text_of
from tests.support.processes.serving import serving
from tests.support.servers.gated_server import live
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

CLIENTS = 12
EVENTS = 100
BITE = 800
"""Bytes that a client reads before it cuts, at the most: a head and a few events."""
PAUSE = 0.004
"""Seconds that a tool rests between two events, at the most; clients read for a quarter of it before they cut."""

server = MCPServer("chatter", version="1", log_level="WARNING")


@server.tool()
async def chatter(n: int, seed: int, ctx: Context) -> str:
    """Send progress 1 … n, now in one go and now slowly."""
    chance = random.Random(seed)
    for number in range(1, n + 1):
        await ctx.report_progress(number, n, message="é\n" * chance.randrange(40))
        await _rest(chance)
    return f"said {n}"


@server.tool()
async def announce(n: int, seed: int, ctx: Context) -> str:
    """Send n numbered notifications on the standalone stream."""
    chance = random.Random(seed)
    for number in range(1, n + 1):
        await ctx.session.send_resource_updated(f"notice://{number}")
        await _rest(chance)
    return f"announced {n}"


async def _rest(chance: random.Random) -> None:
    if chance.random() < 0.5:
        await asyncio.sleep(chance.random() * PAUSE)


class Cutter:
    """A client that follows one stream to its end, whatever happens to its connections."""

    def __init__(
        self, peer: SessionPeer, chance: random.Random, *, wanted: int | None = None, patient: bool = False
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.cuts = 0
        self._peer = peer
        self._chance = chance
        self._wanted = wanted
        self._patient = patient
        """The server may end a connection early, or refuse it for the moment, because of its store."""
        self._position = ""
        self._unread: list[Exchange] = []

    @property
    def done(self) -> bool:
        """The final response came; on a stream that has none, all that is wanted came."""
        if self._wanted is not None:
            return len(self.messages) >= self._wanted
        return any("result" in message for message in self.messages[-1:])

    async def follow(self, exchange: Exchange) -> None:
        while True:
            await self._bite(exchange)
            self._keep(exchange)
            if self.done:
                break
            if exchange.parser.complete or exchange.ended:
                assert self._patient, f"ended early: {exchange.parser.status} {self.messages[-1:]}"
            if self._position:
                exchange = await self._cut(exchange)
        await self._last(exchange)
        await self._bury()

    async def _bite(self, exchange: Exchange) -> None:
        """Read a little, by bytes or by time."""
        if self._chance.random() < 0.85:
            left = self._chance.randrange(1, BITE)
            while left > 0 and not self._sated(exchange) and await exchange.read(min(left, BITE // 4)):
                left -= BITE // 4
        else:
            try:
                async with asyncio.timeout(self._chance.random() * PAUSE / 4):
                    while await exchange.read():
                        pass
            except TimeoutError:
                pass

    def _sated(self, exchange: Exchange) -> bool:
        return self._wanted is not None and len(self.messages) + len(exchange.messages) >= self._wanted

    def _keep(self, exchange: Exchange) -> None:
        """Take over what came whole on this connection."""
        for event in exchange.events:
            if event.data:
                self.ids.append(event.id)
        self.messages += exchange.messages
        self._position = exchange.position or self._position
        exchange.events.clear()

    async def _cut(self, exchange: Exchange) -> Exchange:
        self.cuts += 1
        (way,) = self._chance.choices(("reset", "close", "unread", "twice"), weights=(4, 4, 3, 1))
        match way:
            case "reset":
                exchange.cut()
            case "close":
                await exchange.aclose()
            case "unread":
                self._unread.append(exchange)
            case "twice":
                exchange.cut()
                return await self._resume_twice()
        return await self._peer.resume(self._position)

    async def _resume_twice(self) -> Exchange:
        """Come back on two connections at once: the newest wins, the other one is ended, nobody is refused."""
        both = await asyncio.gather(self._peer.resume(self._position), self._peer.resume(self._position))
        readers = {asyncio.create_task(_read_on(exchange)): exchange for exchange in both}
        over, _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for exchange in both:
            assert exchange.parser.status in (0, 200, 503 if self._patient else 200)
            assert_consecutive([event.id for event in exchange.events if event.data], after=self._position)
        # The one that has got further goes on: an ended loser may still have been first to the final response.
        ahead = max(both, key=lambda e: (e.position, e not in [readers[task] for task in over]))
        (behind,) = [exchange for exchange in both if exchange is not ahead]
        self._unread.append(behind)
        if any("result" in message for message in ahead.messages) or ahead not in [readers[task] for task in over]:
            return ahead
        self._keep(ahead)
        self._unread.append(ahead)
        return await self._peer.resume(self._position)

    async def _last(self, exchange: Exchange) -> None:
        if self._wanted is None:
            # The connection ends right behind the final response.
            while await exchange.read():
                pass
            assert exchange.parser.complete
            assert exchange.events == []
        await exchange.aclose()

    async def _bury(self) -> None:
        """Every connection left unread was ended by the server, and nothing came on it out of order."""
        for exchange in self._unread:
            if self._wanted is None:
                while await exchange.read():
                    pass
            assert_consecutive([event.id for event in exchange.events if event.data])
            await exchange.aclose()


async def _read_on(exchange: Exchange) -> None:
    while await exchange.read():
        pass


def assert_consecutive(ids: Sequence[str], *, after: str = "") -> None:
    """Numbers that rise by one, from the one behind `after` on; only what tells of a gap may jump over some."""
    before: int | None = None
    for text in [after, *ids] if after else ids:
        position, gap = parse_position(text), "~" in text
        assert position is not None, text
        assert before is None or position.seq == before + 1 or (gap and position.seq > before), list(ids)
        before = position.seq


@pytest.fixture(params=[*(pytest.param(store, marks=pytest.mark.long) for store in ("memory", "sqlite")), "process"])
async def chatty(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Peer]:
    """A server in this event loop, on each store; and one as users run it, in a process of its own on uvloop."""
    sqlite = f"sqlite:{tmp_path / 'log.db'}"
    if request.param == "process":
        async with serving("tests.end_to_end.test_cuts:server", "--store", sqlite) as served:
            yield Peer(port=served.port)
    else:
        async with live(server=server, store="memory:" if request.param == "memory" else sqlite) as running:
            yield running


@pytest.mark.parametrize("version", ["2025-11-25", pytest.param("2025-06-18", marks=pytest.mark.long)])
async def test_a_call_that_is_cut_again_and_again_arrives_whole(chatty: Peer, version: str) -> None:
    async def one(seed: int) -> int:
        peer = await chatty.session(version)
        cutter = Cutter(peer, random.Random(seed))
        await cutter.follow(await peer.begin_call("chatter", n=EVENTS, seed=seed))
        assert progress(cutter.messages) == list(range(1, EVENTS + 1))
        assert [text_of(m) for m in cutter.messages if "result" in m] == [f"said {EVENTS}"]
        assert_consecutive(cutter.ids)
        return cutter.cuts

    cuts = await asyncio.gather(*(one(seed) for seed in range(CLIENTS)))
    assert sum(cuts) >= 100


async def test_the_standalone_stream_that_is_cut_again_and_again_arrives_whole(chatty: Peer) -> None:
    async def one(seed: int) -> int:
        peer = await chatty.session()
        cutter = Cutter(peer, random.Random(seed), wanted=EVENTS)
        async with AsyncExitStack() as stack:
            stream = await peer.resume("")
            call = await stack.enter_async_context(await peer.begin_call("announce", n=EVENTS, seed=seed))
            await cutter.follow(stream)
            assert text_of((await call.answer()).messages[0]) == f"announced {EVENTS}"
        uris = [m["params"]["uri"] for m in cutter.messages]
        assert uris == [f"notice://{number}" for number in range(1, EVENTS + 1)]
        assert_consecutive(cutter.ids)
        return cutter.cuts

    cuts = await asyncio.gather(*(one(seed) for seed in range(CLIENTS)))
    assert sum(cuts) >= 60


async def test_a_call_that_is_over_is_still_there_whole(chatty: Peer) -> None:
    peer = await chatty.session()
    first = await peer.begin_call("chatter", n=EVENTS, seed=1)
    await first.until_messages(1)
    start = first.position
    await first.answer()
    await first.aclose()
    for seed in range(8):
        cutter = Cutter(peer, random.Random(seed))
        await cutter.follow(await peer.resume(start))
        assert progress(cutter.messages)[-1] == EVENTS
        assert_consecutive(cutter.ids, after=start)
    async with await peer.resume(cutter.ids[-1]) as nothing_more:
        assert await nothing_more.head() == 405


async def test_cuts_and_outages_together_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """The store fails in one way after the other meanwhile (promises 2 and 7)."""
    path = tmp_path / "log.db"
    store = FaultyStore(SqliteStore(str(path), busy_timeout=0.05))

    async def trouble() -> None:
        chance = random.Random(7)
        while True:
            store.writes = chance.choice((Fault.NONE, Fault.RAISES, Fault.HANGS, Fault.LATE))
            store.every = chance.randrange(1, 4)
            await asyncio.sleep(chance.random() / 10)

    async def one(seed: int) -> int:
        peer = await served.session()
        cutter = Cutter(peer, random.Random(seed), patient=True)
        await cutter.follow(await peer.begin_call("chatter", n=EVENTS, seed=seed))
        assert progress(cutter.messages) == list(range(1, EVENTS + 1))
        assert_consecutive(cutter.ids)
        return cutter.cuts

    async with live(server=server, store=store, store_timeout=0.05, complaint="the store fails") as served:
        troubled = asyncio.create_task(trouble())
        cuts = await asyncio.gather(*(one(seed) for seed in range(CLIENTS)))
        troubled.cancel()
        store.works()
        while await served.health() != "ok":  # noqa: ASYNC110 - told by HTTP only
            await asyncio.sleep(0.01)
        assert served.app.counters.outages >= 1
    assert sum(cuts) >= 60
    # Each stream is in the file once, whole and in order.
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT stream, seq, payload FROM event ORDER BY stream, seq").fetchall()
    streams: dict[int, list[dict[str, Any]]] = {}
    for stream, seq, payload in found:
        streams.setdefault(stream, []).append(json.loads(payload))
        assert seq == len(streams[stream])
    told = [progress(messages) for messages in streams.values()]
    assert [numbers for numbers in told if numbers] == [list(range(1, EVENTS + 1))] * CLIENTS


async def test_what_is_no_longer_kept_is_told_and_nothing_else_is_missing() -> None:
    """With hardly anything kept, each number arrives once or is within one gap (promises 2 and 4)."""

    async def one(seed: int) -> int:
        peer = await served.session()
        cutter = Cutter(peer, random.Random(seed))
        await cutter.follow(await peer.begin_call("chatter", n=EVENTS, seed=seed))
        accounted: list[int] = []
        for heard in cutter.messages:
            if heard.get("method") == "notifications/perdure/gap":
                accounted += range(heard["params"]["from"], heard["params"]["to"] + 1)
            else:
                accounted += progress([heard])
        assert accounted == list(range(1, EVENTS + 1))
        assert text_of(cutter.messages[-1]) == f"said {EVENTS}"
        return sum(heard.get("method") == "notifications/perdure/gap" for heard in cutter.messages)

    async with live(server=server, max_stream_events=3) as served:
        gaps = await asyncio.gather(*(one(seed) for seed in range(CLIENTS)))
    assert sum(gaps) >= CLIENTS
