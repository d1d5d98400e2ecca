"""The process dies at the worst moments, and afterwards every promise holds (promises 1-4).

A point is a function of the product and an edge of it; `tests/support/crash_child.py` says how it is met. After each
death the server is started again on the same file, the client comes back with the positions that it has, and then:
what it was shown is in the log; it sees each event once and in order; each request that was accepted has one
answer, and one that was not never ran; what may not run twice did not; the file is sound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.cluster import CRASHBOX
from tests.support.crashbox import diary
from tests.support.nursery import Nursery, Nursling, Point, nursery
from tests.support.raw import Peer, SessionPeer
from tests.support.site import until
from tests.support.witness import (
    Told,
    assert_answered_once,
    assert_logged,
    assert_sound,
    is_accepted,
    settled,
)

pytestmark = pytest.mark.anyio

OUTCOME_UNKNOWN = -31001
KILLED = -9

STEPS = "perdure.store._sqlite_steps"
WRITER = "perdure.store._sqlite_writer"

#: Met while calls run. The name says where the process dies.
POINTS = {
    "before the row of a call that may not run again": Point(
        module="perdure.session", qualname="Session.accept", edge="enter"
    ),
    "before the row of the second call": Point(
        module="perdure.session", qualname="Session.accept", edge="enter", nth=2
    ),
    "between the row and the runtime": Point(module="perdure.exchange", qualname="Exchange.start", edge="enter"),
    "between the row and the runtime of the second call": Point(
        module="perdure.exchange", qualname="Exchange.start", edge="enter", nth=2
    ),
    "before the first append": Point(module="perdure.streams", qualname="Stream.append", edge="enter"),
    "between append and send": Point(module="perdure.streams", qualname="Stream.accepted", edge="enter"),
    "between a later append and send": Point(module="perdure.streams", qualname="Stream.accepted", edge="enter", nth=5),
    "in the transaction of the row": Point(module=STEPS, qualname="Steps._open_stream", edge="leave"),
    "in the transaction of the first events": Point(module=STEPS, qualname="Steps._append", edge="leave"),
    "in the transaction of an answer": Point(module=STEPS, qualname="Steps._end_calls", edge="enter"),
    "in the transaction, with everything written": Point(module=STEPS, qualname="Steps.apply", edge="leave", nth=4),
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One event loop for the module, because its stories share a nursery."""
    return "asyncio"


@pytest.fixture(scope="module")
async def cradle() -> AsyncIterator[Nursery]:
    async with nursery() as it:
        yield it


@dataclass
class World:
    """A file, the servers that come and go on it, and a client."""

    folder: Path
    cradle: Nursery
    told: dict[str, Told] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "log.db"

    @property
    def diary(self) -> Path:
        return self.folder / "diary"

    def runs(self, key: str) -> int:
        return sum(noted == key for noted, _ in diary(self.diary))

    async def start(self, point: Point | None = None) -> Nursling:
        options = ("--store", f"sqlite:{self.path}", "--retry", "100ms")
        return await self.cradle.start(CRASHBOX, *options, folder=self.folder, point=point)

    async def open_session(self, server: Nursling) -> None:
        self.peer = await Peer(port=server.port).session()
        self.requests: dict[str, int] = {}

    def move_to(self, server: Nursling) -> None:
        self.peer = SessionPeer(port=server.port, headers=self.peer.headers, id=self.peer.id, calls=self.peer.calls)

    async def call(self, key: str, tool: str, n: int) -> None:
        """Make a call, and read what comes until it is over or the server is dead."""
        told = self.told[key] = Told(name=key)
        body = self.peer.call_body(tool, n=n, log=str(self.diary), key=key)
        self.requests[key] = self.peer.calls
        with contextlib.suppress(ConnectionError):  # nobody is there any more
            await told.read_all(await self.peer.begin("POST", body))

    async def listen(self) -> None:
        """Read the standalone stream until the connection is lost."""
        told = self.told.setdefault("standalone", Told(name="standalone"))
        with contextlib.suppress(ConnectionError):
            await told.read_all(await self.peer.resume(told.position))

    async def come_back(self) -> None:
        for told in self.told.values():
            if told.name != "standalone" and told.position:
                await told.come_back(self.peer)

    def judge(self) -> None:
        for told in self.told.values():
            told.assert_whole()
            assert_logged(self.path, told)
        for key, request_id in self.requests.items():
            if not is_accepted(self.path, request_id):
                assert (self.told[key].events, self.told[key].position, self.runs(key)) == ([], "", 0), key
        assert_answered_once(self.path)
        assert_sound(self.path)


@pytest.fixture
async def world(tmp_path: Path, cradle: Nursery) -> AsyncIterator[World]:
    yield World(tmp_path, cradle)
    await cradle.clear()


async def live_until_death(world: World, server: Nursling) -> None:
    """A first call before the point counts, then calls of each kind until the process dies."""
    listening = asyncio.create_task(world.listen())
    await world.call("before", "count", 3)
    await server.arm()
    await asyncio.gather(world.call("pay", "pay", 6), world.call("count", "count", 6))
    await world.call("put", "put", 6)
    assert await server.gone() == KILLED, "the point was not reached"
    await listening


def assert_fair(world: World, key: str, *, may_run_again: bool) -> None:
    """A call that was accepted has its result, or was told to be of unknown outcome, as its tool allows."""
    told = world.told[key]
    if not told.answers:  # never accepted, or its client never heard of it
        return
    (answer,) = told.answers
    if "error" in answer:
        assert answer["error"]["code"] == OUTCOME_UNKNOWN
        assert answer["error"]["data"]["outcome"] == "unknown"
        assert not may_run_again, key
    else:
        assert told.progress == list(range(1, 7))
    assert world.runs(key) <= (2 if may_run_again else 1)


@pytest.mark.parametrize("name", POINTS)
async def test_a_server_that_dies(world: World, name: str) -> None:
    """Promises 1, 2, 3 and 4 at each point of a call's life."""
    server = await world.start(POINTS[name])
    await world.open_session(server)
    await live_until_death(world, server)

    server = await world.start()
    world.move_to(server)
    await settled(world.path)
    await world.come_back()
    assert_fair(world, "pay", may_run_again=False)
    assert_fair(world, "count", may_run_again=True)
    assert_fair(world, "put", may_run_again=True)
    await the_session_goes_on(world)
    world.judge()


async def the_session_goes_on(world: World) -> None:
    """H1, H5: the same id, calls and the standalone stream."""
    listening = asyncio.create_task(world.listen())
    await world.call("after", "count", 3)
    assert world.told["after"].progress == [1, 2, 3]
    answer = await world.peer.call("announce", n=3)
    assert answer.status == 200
    told = world.told["standalone"]
    async with asyncio.timeout(20):
        await until(lambda: told.notices == [1, 2, 3])
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
