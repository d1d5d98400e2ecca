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
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support.cluster import CRASHBOX
from tests.support.crashbox import diary, open_gate
from tests.support.first_layout import layout, write_first_layout
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
FILE = "perdure.store._sqlite_file"
NODES = "perdure.store._sqlite_nodes"


def at(module: str, qualname: str, edge: str, nth: int = 1, *, armed: bool = False) -> Point:
    return Point(module=module, qualname=qualname, edge=edge, nth=nth, armed=armed)


#: Met while calls run. The name says where the process dies.
POINTS = {
    "before the row of a call": at("perdure.session", "Session.accept", "enter"),
    "before the row of the second call": at("perdure.session", "Session.accept", "enter", 2),
    "in the transaction of the row": at(STEPS, "Steps._open_stream", "leave"),
    "between the row and the runtime": at("perdure.exchange", "Exchange.start", "enter"),
    "between the second row and the runtime": at("perdure.exchange", "Exchange.start", "enter", 2),
    "before the first append": at("perdure.streams", "Stream.append", "enter"),
    "in the transaction of the first events": at(STEPS, "Steps._append", "leave"),
    "between an append and its send": at("perdure.streams", "Stream.accepted", "enter"),
    "between a later append and its send": at("perdure.streams", "Stream.accepted", "enter", 4),
    "before anything is sent": at("perdure.hub", "Reader._send", "enter"),
    "after something was sent": at("perdure.hub", "Reader._send", "enter", 4),
    # The next one is reached with the answer's event written and the stream sealed: the row's end comes behind it.
    "between the answer and the end of its row": at(STEPS, "Steps._append", "within"),
    "behind the last statement, before the commit": at(STEPS, "Steps.apply", "leave", 5),
}

#: Met in the thread that groups commits, which does all of them where each waits for the disk (`sync=full`).
GROUP_POINTS = {
    "at the beginning of a group": at(WRITER, "Writer._do", "enter"),
    "in the middle of a group": at(STEPS, "Steps.apply", "leave", 3),
    "just before a group is committed": at(WRITER, "Writer._do", "within", 3),
    "when a group is committed and nobody knows": at(WRITER, "Writer._do", "leave", 4),
}

#: Met by a server that starts on the file of one that was killed while calls ran.
SECOND_POINTS = {
    "before a stream is claimed": at("perdure.settling", "Settler._settle_stream", "enter"),
    "before the second stream is claimed": at(STEPS, "Steps.claim", "enter", 2),
    "in the transaction of a claim": at(STEPS, "Steps.claim", "leave"),
    "before a session is loaded": at("perdure.sessions", "Sessions._build", "enter"),
    "before a session's runtime is loaded": at("perdure.exchange", "Exchange._load", "enter"),
    "before it is noted that a call runs again": at("perdure.settling", "Settler._run_again", "enter"),
    "between that note and the runtime": at("perdure.exchange", "Exchange.start", "enter"),
    "before an unknown outcome is told": at("perdure.settling", "Settler._answer_unknown", "enter"),
    "in the transaction of a settled answer": at(STEPS, "Steps._append", "within"),
    "before the dead are buried": at(NODES, "bury", "enter"),
    "in the middle of a burial": at(NODES, "bury", "within", 3),
}

#: Met by a server that brings a file of the first layout up to date.
MIGRATION_POINTS = {
    "before the first statement": at(FILE, "bring_up_to_date", "enter"),
    "between two statements": at(FILE, "bring_up_to_date", "within", 12),
    "before the commit": at(FILE, "bring_up_to_date", "leave"),
    "after the commit": at(FILE, "open_writer", "leave"),
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

    def heard(self, key: str) -> list[int]:
        """The progress of a call that may not have begun yet."""
        return self.told[key].progress if key in self.told else []

    async def start(self, point: Point | None = None, *, sync: str = "normal") -> Nursling:
        options = ("--store", f"sqlite:{self.path}?sync={sync}", "--retry", "100ms")
        return await self.cradle.start(CRASHBOX, *options, folder=self.folder, point=point)

    async def open_session(self, server: Nursling) -> None:
        self.peer = await Peer(port=server.port).session()
        self.requests: dict[str, int] = {}

    def move_to(self, server: Nursling) -> None:
        self.peer = SessionPeer(port=server.port, headers=self.peer.headers, id=self.peer.id, calls=self.peer.calls)

    async def call(self, key: str, tool: str, n: int = 0, **more: object) -> None:
        """Make a call, and read what comes until it is over or the server is dead."""
        told = self.told[key] = Told(name=key)
        arguments = {"n": n, **more} if n else more
        body = self.peer.call_body(tool, log=str(self.diary), key=key, **arguments)
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
    # With a pause between two reports, so that each is a commit of its own.
    await asyncio.gather(world.call("pay", "pay", 6, interval=0.005), world.call("count", "count", 6, interval=0.005))
    await world.call("put", "put", 6, interval=0.005)
    assert await server.gone() == KILLED, "the point was not reached"
    await listening


def assert_fair(world: World, key: str, *, may_run_again: bool, deaths: int = 1) -> None:
    """A call that was accepted has its result, or was told to be of unknown outcome, as its tool allows."""
    told = world.told[key]
    assert world.runs(key) <= (2 if may_run_again else 1)
    if not told.answers:  # never accepted, or its client never heard of it
        return
    (answer,) = told.answers
    if "error" in answer:
        assert answer["error"]["code"] == OUTCOME_UNKNOWN
        assert answer["error"]["data"]["outcome"] == "unknown"
        assert not may_run_again or deaths > 1, key
    else:
        assert told.progress == list(range(1, 7))


async def go_on_and_judge(world: World, *, deaths: int = 1) -> None:
    """Start a server that lives, come back to it, and see that every promise was kept."""
    world.move_to(await world.start())
    await settled(world.path)
    await world.come_back()
    assert_fair(world, "pay", may_run_again=False, deaths=deaths)
    assert_fair(world, "count", may_run_again=True, deaths=deaths)
    assert_fair(world, "put", may_run_again=True, deaths=deaths)
    await the_session_goes_on(world)
    world.judge()


async def the_session_goes_on(world: World) -> None:
    """H1, H5: the same id, calls and the standalone stream."""
    listening = asyncio.create_task(world.listen())
    await world.call("after", "count", 3)
    assert world.told["after"].progress == [1, 2, 3]
    assert (await world.peer.call("announce", n=3)).status == 200
    told = world.told["standalone"]
    async with asyncio.timeout(20):
        await until(lambda: told.notices == [1, 2, 3])
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.parametrize("name", POINTS)
async def test_a_server_that_dies(world: World, name: str) -> None:
    """Promises 1, 2, 3 and 4 at each point of a call's life."""
    server = await world.start(POINTS[name])
    await world.open_session(server)
    await live_until_death(world, server)
    await go_on_and_judge(world)


@pytest.mark.parametrize("name", GROUP_POINTS)
async def test_a_server_that_dies_in_a_group_commit(world: World, name: str) -> None:
    """Promises 1, 2, 3 and 4 where commits are grouped by a thread."""
    server = await world.start(GROUP_POINTS[name], sync="full")
    await world.open_session(server)
    await live_until_death(world, server)
    await go_on_and_judge(world)


@pytest.mark.parametrize("name", SECOND_POINTS)
async def test_a_server_that_dies_while_it_settles_what_another_left(world: World, name: str) -> None:
    """Promise 3: whoever comes third finds every call, and each gets one answer."""
    server = await world.start()
    await world.open_session(server)
    gate = world.folder / "gate"
    calls = [
        asyncio.create_task(world.call(key, key, 6, gate=str(gate), pauses=[3])) for key in ("pay", "count", "put")
    ]
    listening = asyncio.create_task(world.listen())
    async with asyncio.timeout(20):
        await until(lambda: all(world.heard(key) == [1, 2, 3] for key in ("pay", "count", "put")))
    await server.kill()
    await asyncio.gather(*calls, listening)
    open_gate(f"{gate}.3")

    server = await world.start(replace(SECOND_POINTS[name], armed=True))
    assert await server.gone() == KILLED, "the point was not reached"
    await go_on_and_judge(world, deaths=2)


@pytest.mark.parametrize(("tool", "runs"), [("die", 1), ("die_again", 2)])
async def test_a_tool_that_kills_its_process_is_not_run_for_ever(world: World, tool: str, runs: int) -> None:
    """Promise 3: once more at most, and only where the tool says that it may be run again."""
    server = await world.start()
    await world.open_session(server)
    gate = world.folder / "gate"
    dying = asyncio.create_task(world.call("die", tool, gate=str(gate)))
    async with asyncio.timeout(20):
        await until(lambda: world.heard("die") == [1])
    open_gate(gate)
    await dying
    for _ in range(runs):
        assert await server.gone() == KILLED
        server = await world.start()
    world.move_to(server)
    await settled(world.path)
    await world.come_back()
    (answer,) = world.told["die"].answers
    assert (answer["error"]["code"], answer["error"]["data"]["outcome"]) == (OUTCOME_UNKNOWN, "unknown")
    assert world.told["die"].progress == [1]
    assert world.runs("die") == runs
    await the_session_goes_on(world)
    assert not server.dead
    world.judge()


@pytest.mark.parametrize("name", MIGRATION_POINTS)
async def test_a_server_that_dies_while_it_brings_an_old_file_up_to_date(world: World, name: str) -> None:
    """Promise 3: the file is as it was or as it will be, and what it holds goes on."""
    old = write_first_layout(world.path, world.diary)
    server = await world.start(replace(MIGRATION_POINTS[name], armed=True))
    assert await server.gone() == KILLED, "the point was not reached"
    assert layout(world.path) == (2 if name == "after the commit" else 1)
    assert_sound(world.path)

    server = await world.start()
    assert layout(world.path) == 2
    world.peer = SessionPeer(port=server.port, headers=old.headers, id=old.session, calls=10)
    world.requests = {}
    await settled(world.path)
    for position, said in old.resumes.items():
        told = world.told[position] = Told(name=position, position=position)
        await told.read_all(await world.peer.resume(position))
        assert [message.get("method", "answer") for message in told.messages] == said
    assert world.told[old.running].answers[0]["error"]["code"] == OUTCOME_UNKNOWN
    await the_session_goes_on(world)
    assert_answered_once(world.path)
    assert_sound(world.path)


async def test_a_node_that_dies_with_notices_for_another_one_had_not_answered_yet(world: World, tmp_path: Path) -> None:
    """R2: what a tool sent before its answer is in the log before the answer is, also through another node."""
    server = await world.start()
    await world.open_session(server)
    listening = asyncio.create_task(world.listen())
    async with nursery() as other:
        # It is not the session's home, so it sends notices to the one that is. It dies when it is about to.
        neighbour = await other.start(
            CRASHBOX,
            "--store",
            f"sqlite:{world.path}",
            folder=tmp_path,
            point=at("perdure._core.mail", "encode", "enter"),
        )
        peer, home = world.peer, server.port
        world.move_to(neighbour)
        await world.call("before", "count", 1)
        await neighbour.arm()
        await world.call("announce", "announce", 3)
        assert await neighbour.gone() == KILLED, "the point was not reached"
    world.peer = SessionPeer(port=home, headers=peer.headers, id=peer.id, calls=100)
    await settled(world.path)
    await world.come_back()
    (answer,) = world.told["announce"].answers
    if "result" in answer:
        async with asyncio.timeout(5):
            await until(lambda: world.told["standalone"].notices == [1, 2, 3])
    else:
        assert answer["error"]["code"] == OUTCOME_UNKNOWN
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    world.judge()
