"""Sessions that rest while their clients come back: no request is lost on the way (promise 3)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import pytest

from perdure._core.ids import SessionId, StreamId
from perdure._core.states import SessionState
from perdure.store import MemoryStore
from perdure.store.records import Followed, SessionRecord
from perdure.store.steps import Refusals, Release, Step
from tests.cluster.conftest import Pair, Start
from tests.support.clients.wire_client import HandshakeFailed, Peer, progress_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import ON_POSTGRES

pytestmark = pytest.mark.anyio

#: Seconds that an idle session stays, and that pauses are about as long as. A handshake must fit in, also where a busy
#: server has to answer.
_GRACE = 0.3 if ON_POSTGRES else 0.03
_ROUNDS = 15 if ON_POSTGRES else 25
_CLIENTS = 8
#: Longer than any request takes on a machine that is busy, and shorter than a test may take.
_PATIENCE = 30.0


async def _join(pair: Pair) -> Peer:
    """Open a session. A handshake may take no longer than the grace, which is short here: a client on a busy machine
    tries again."""
    while True:
        with contextlib.suppress(HandshakeFailed):
            return await pair.a.site.join()


async def _come_and_go(pair: Pair, number: int) -> int:
    """Call one node and then the other, with pauses about as long as the grace; gives how many calls were answered."""
    at_a = await _join(pair)
    at_b = at_a.through(pair.b.site)
    answered = 0
    for turn in range(_ROUNDS):
        peer: Peer = (at_a, at_b)[(turn + number) % 2]
        async with asyncio.timeout(_PATIENCE):
            answered += await peer.result("count", n=1) == "counted to 1"
        await asyncio.sleep(_GRACE * (0.7 + 0.1 * ((turn * 7 + number * 3) % 11)))
    return answered


async def test_calls_of_sessions_that_are_put_to_rest_all_the_time_are_all_answered(start: Start) -> None:
    """Promise 3: a session is let go of between two requests, never under one."""
    pair = await start(session_grace=_GRACE)
    answered = await asyncio.gather(*(_come_and_go(pair, number) for number in range(_CLIENTS)))
    assert sum(answered) == _ROUNDS * _CLIENTS
    loaded = sum(node.site.app.counters.sessions_loaded for node in (pair.a, pair.b))
    assert loaded > _CLIENTS  # they did rest meanwhile


class _Gated(MemoryStore):
    """Holds back the reading of sessions or streams, or the commit that puts a session to rest, until a test lets them
    go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = self.looking = self.resting = False
        self.held_back: set[str] = set()
        self._go_on = asyncio.Condition()

    async def session(self, session: SessionId) -> SessionRecord | None:
        record = await super().session(session)
        await self._pass("reading")
        return record

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        await self._pass("looking")
        return await super().follow(after, limit=limit)

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        if self.resting and any(isinstance(step, Release) for step in steps):
            raise RuntimeError("not at once")  # then the journal takes the other way
        return super().commit_now(steps)

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        if any(isinstance(step, Release) for step in steps):
            await self._pass("resting")
        return super().commit_now(steps)

    async def _pass(self, gate: str) -> None:
        async with self._go_on:
            if getattr(self, gate):
                self.held_back.add(gate)
                await self._go_on.wait_for(lambda: not getattr(self, gate))

    async def open_gate(self, gate: str) -> None:
        async with self._go_on:
            setattr(self, gate, False)
            self._go_on.notify_all()


async def test_a_request_that_was_looking_while_its_session_went_to_rest_is_answered() -> None:
    """Promise 3: the request has passed the first look and reads the record; then the session is let go of."""
    store = _Gated()
    async with serve(ToolServer().server, store=store, session_grace=0.2) as site:
        peer = await site.join()
        store.reading = store.resting = True
        told = asyncio.create_task(peer.send({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}))
        await until(lambda: store.held_back == {"reading", "resting"})
        await store.open_gate("reading")
        await asyncio.sleep(0)
        await store.open_gate("resting")
        async with asyncio.timeout(_PATIENCE):
            assert (await told).status_code == 202
        assert site.app.counters.sessions_loaded == 1
        record = await store.session(SessionId(peer.session))
        assert record is not None
        assert record.state is SessionState.ACTIVE


async def test_a_request_that_holds_its_session_keeps_it_from_rest() -> None:
    """A reader comes, and what it asks for takes the store longer than the grace."""
    store = _Gated()
    async with serve(ToolServer().server, store=store, session_grace=0.2) as site:
        peer = await site.join()
        done = await peer.call("count", n=2, token=1)
        await done.rest()
        store.looking = True
        resumed = asyncio.create_task(peer.get(done.seen[1].id))
        await until(lambda: "looking" in store.held_back)
        other = await site.join()
        await until(lambda: other.session not in site.app.session_ids())
        assert peer.session in site.app.session_ids()
        await store.open_gate("looking")
        assert progress_of(await (await resumed).rest()) == [2]
        await until(lambda: peer.session not in site.app.session_ids())
