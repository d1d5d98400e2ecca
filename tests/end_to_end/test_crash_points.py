"""The process dies at the worst moments, and afterwards every promise holds (promises 1-4).

A point is a function of the product and an edge of it; `tests/support/processes/crash_child.py` says how it is met.
After each death the server is started again on the same file, the client comes back with its positions, and then:
what it was shown is in the log; it sees each event once and in order; each request that was accepted has one
answer, and one that was not never ran; what may not run twice did not; the file is sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from perdure.store.sqlite.sql_files import schema_version
from tests.support.clients.raw_http import Peer, SessionPeer
from tests.support.clients.recording_client import (
    Told,
    assert_answered_once,
    assert_logged,
    assert_sound,
    is_accepted,
    settled,
)
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.crash_points import (
    GROUP_POINTS,
    MIGRATION_POINTS,
    POINTS,
    POSTGRES_POINTS,
    POSTGRES_SECOND_POINTS,
    SECOND_POINTS,
    SQLITE_POINTS,
    SQLITE_SECOND_POINTS,
    Point,
    at,
)
from tests.support.processes.serving import Served, die_at, serving
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import ON_POSTGRES, shared_address

pytestmark = pytest.mark.anyio

OUTCOME_UNKNOWN = -31001

of_sqlite = pytest.mark.skipif(ON_POSTGRES, reason="a point in the SQLite store")


#: Points between two others, or the second time of one: `make test-all` meets them.
LONG = {
    "before the row of the second call",
    "between the second row and the runtime",
    "before the first append",
    "between an append and its send",
    "before anything is sent",
    "in the transaction of the first events",
    "before a session is loaded",
    "before a session's runtime is loaded",
    "before the second stream is claimed",
    "in the transaction of a settled answer",
    "before the dead are buried",
}


def cases(points: dict[str, Point], of_postgres: dict[str, Point], *chosen: str) -> list[Any]:
    """All points of the store that the tests run on, and those of PostgreSQL that are chosen: where the server has done
    what the process asked for, and the process does not know."""
    here = [pytest.param("", points[name], id=name, marks=[pytest.mark.long] * (name in LONG)) for name in points]
    there = [pytest.param("postgres", of_postgres[name], id=f"{name} (postgres)") for name in chosen]
    return here if ON_POSTGRES else here + there


FIRST = cases(
    {**POINTS, **(POSTGRES_POINTS if ON_POSTGRES else SQLITE_POINTS)},
    POSTGRES_POINTS,
    "when a later commit is made and the process does not know",
)
SECOND = cases(
    {**SECOND_POINTS, **(POSTGRES_SECOND_POINTS if ON_POSTGRES else SQLITE_SECOND_POINTS)},
    POSTGRES_SECOND_POINTS,
    "when the dead are buried and the process does not know",
)


@dataclass
class Story:
    """A store, the servers that start one after another on it, and a client that keeps what it was shown."""

    folder: Path
    address: str
    stack: AsyncExitStack
    told: dict[str, Told] = field(default_factory=dict)

    @property
    def diary(self) -> Path:
        return self.folder / "diary"

    def runs(self, key: str) -> int:
        return sum(noted == key for noted, _ in diary(self.diary))

    def heard(self, key: str) -> list[int]:
        """The progress of a call that may not have begun yet."""
        return self.told[key].progress if key in self.told else []

    async def start(self, point: Point | None = None, *, sync: str = "") -> Served:
        options = ("--store", f"{self.address}?sync={sync}" if sync else self.address, "--retry", "100ms")
        return await self.stack.enter_async_context(serving(GATE_FILE_TOOLS, *options, point=point))

    async def die_at(self, point: Point) -> None:
        """Start a server that dies at a point on its own."""
        died = await die_at(replace(point, armed=True), GATE_FILE_TOOLS, "--store", self.address, "--retry", "100ms")
        assert died, "the point was not reached"

    async def open_session(self, server: Served) -> None:
        self.peer = await Peer(port=server.port).session()
        self.requests: dict[str, int] = {}

    def move_to(self, server: Served) -> None:
        self.peer = SessionPeer(port=server.port, headers=self.peer.headers, id=self.peer.id, calls=self.peer.calls)

    async def call(self, key: str, tool: str, n: int = 0, **more: Any) -> None:
        """Make a call, and read what comes until it is over or the server is dead."""
        told = self.told[key] = Told(name=key)
        if n:
            more["n"] = n
        body = self.peer.call_body(tool, log=str(self.diary), key=key, **more)
        self.requests[key] = self.peer.calls
        with contextlib.suppress(ConnectionError):  # the server is dead
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
            assert_logged(self.address, told)
        for key, request_id in self.requests.items():
            if not is_accepted(self.address, request_id):
                assert (self.told[key].events, self.told[key].position, self.runs(key)) == ([], "", 0), key
        assert_answered_once(self.address)
        assert_sound(self.address)


@pytest.fixture
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    is_postgres = getattr(request, "param", "") == "postgres"
    return store_url() if is_postgres else shared_address(tmp_path / "log.db")


@pytest.fixture
async def story(tmp_path: Path, address: str) -> AsyncIterator[Story]:
    async with AsyncExitStack() as stack:
        yield Story(tmp_path, address, stack)


async def live_until_death(story: Story, server: Served) -> None:
    """A first call before the point counts, then calls of each kind until the process dies."""
    listening = asyncio.create_task(story.listen())
    await story.call("before", "count", 3)
    await server.arm()
    # With a pause between two reports, so that each is a commit of its own.
    await asyncio.gather(story.call("pay", "pay", 6, interval=0.005), story.call("count", "count", 6, interval=0.005))
    await story.call("put", "put", 6, interval=0.005)
    assert await server.has_died(), "the point was not reached"
    await listening


def assert_fair(story: Story, key: str, *, may_run_again: bool, deaths: int = 1) -> None:
    """A call that was accepted has its result, or was told to be of unknown outcome, as its tool allows."""
    told = story.told[key]
    assert story.runs(key) <= (2 if may_run_again else 1)
    if not told.answers:  # never accepted, or its client never heard of it
        return
    (answer,) = told.answers
    if "error" in answer:
        assert answer["error"]["code"] == OUTCOME_UNKNOWN
        assert answer["error"]["data"]["outcome"] == "unknown"
        assert not may_run_again or deaths > 1, key
    else:
        assert told.progress == list(range(1, 7))


async def go_on_and_judge(story: Story, *, deaths: int = 1) -> None:
    """Start a server that lives, come back to it, and see that every promise was kept."""
    story.move_to(await story.start())
    await settled(story.address)
    await story.come_back()
    assert_fair(story, "pay", may_run_again=False, deaths=deaths)
    assert_fair(story, "count", may_run_again=True, deaths=deaths)
    assert_fair(story, "put", may_run_again=True, deaths=deaths)
    await the_session_goes_on(story)
    story.judge()


async def the_session_goes_on(story: Story) -> None:
    """H1, H5: the same id, calls and the standalone stream."""
    listening = asyncio.create_task(story.listen())
    await story.call("after", "count", 3)
    assert story.told["after"].progress == [1, 2, 3]
    assert (await story.peer.call("announce", n=3)).status == 200
    told = story.told["standalone"]
    async with asyncio.timeout(60):
        await until(lambda: told.notices == [1, 2, 3])
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.parametrize(("address", "point"), FIRST, indirect=["address"])
async def test_a_server_that_dies(story: Story, point: Point) -> None:
    """Promises 1, 2, 3 and 4 at each point of a call's life."""
    server = await story.start(point)
    await story.open_session(server)
    await live_until_death(story, server)
    await go_on_and_judge(story)


@of_sqlite
@pytest.mark.parametrize("name", GROUP_POINTS)
async def test_a_server_that_dies_in_a_group_commit(story: Story, name: str) -> None:
    """Promises 1, 2, 3 and 4 where commits are grouped by a thread."""
    server = await story.start(GROUP_POINTS[name], sync="full")
    await story.open_session(server)
    await live_until_death(story, server)
    await go_on_and_judge(story)


@pytest.mark.parametrize(("address", "point"), SECOND, indirect=["address"])
async def test_a_server_that_dies_while_it_settles_what_another_left(story: Story, point: Point) -> None:
    """Promise 3: the third server finds every call, and each gets one answer."""
    server = await story.start()
    await story.open_session(server)
    gate = story.folder / "gate"
    calls = [
        asyncio.create_task(story.call(key, key, 6, gate=str(gate), pauses=[3])) for key in ("pay", "count", "put")
    ]
    listening = asyncio.create_task(story.listen())
    async with asyncio.timeout(60):
        await until(lambda: all(story.heard(key) == [1, 2, 3] for key in ("pay", "count", "put")))
    await server.kill()
    await asyncio.gather(*calls, listening)
    open_gate(f"{gate}.3")

    await story.die_at(point)
    await go_on_and_judge(story, deaths=2)


@pytest.mark.parametrize(("tool", "runs"), [("die", 1), ("die_again", 2)])
async def test_a_tool_that_kills_its_process_is_not_run_for_ever(story: Story, tool: str, runs: int) -> None:
    """Promise 3: once more at most, and only where the tool says that it may be run again."""
    server = await story.start()
    await story.open_session(server)
    gate = story.folder / "gate"
    dying = asyncio.create_task(story.call("die", tool, gate=str(gate)))
    async with asyncio.timeout(60):
        await until(lambda: story.heard("die") == [1])
    open_gate(gate)
    await dying
    for _ in range(runs):
        assert await server.has_died()
        server = await story.start()
    story.move_to(server)
    await settled(story.address)
    await story.come_back()
    (answer,) = story.told["die"].answers
    assert (answer["error"]["code"], answer["error"]["data"]["outcome"]) == (OUTCOME_UNKNOWN, "unknown")
    assert story.told["die"].progress == [1]
    assert story.runs("die") == runs
    await the_session_goes_on(story)
    assert server.process.returncode is None
    story.judge()


@of_sqlite
@pytest.mark.parametrize("name", MIGRATION_POINTS)
async def test_a_server_that_dies_while_it_makes_its_file(story: Story, name: str) -> None:
    """Promise 3: the file is empty or whole, and the next server serves from it."""
    file = Path(story.address.removeprefix("sqlite:"))
    await story.die_at(MIGRATION_POINTS[name])
    assert layout(file) == (schema_version() if name == "after the commit" else 0)
    server = await story.start()
    assert layout(file) == schema_version()
    await story.open_session(server)
    await the_session_goes_on(story)
    assert_sound(story.address)


def layout(path: Path) -> int:
    """The version of a file's layout."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


@pytest.mark.parametrize("where", ["take", "written"], ids=["before the commit", "when nobody knows of the commit"])
async def test_a_node_that_dies_with_notices_for_another_one_had_not_answered_yet(story: Story, where: str) -> None:
    """R2: what a tool sent before its answer is in the log before the answer is, also through another node."""
    server = await story.start()
    await story.open_session(server)
    listening = asyncio.create_task(story.listen())
    # It is not the session's home, so it forwards notices to the one that is. It dies in the middle of that.
    neighbour = await story.start(at("perdure.sessions.home", f"Outbox.{where}", "enter"))
    peer, home = story.peer, server.port
    story.move_to(neighbour)
    await story.call("before", "count", 1)
    await neighbour.arm()
    await story.call("announce", "announce", 3)
    assert await neighbour.has_died(), "the point was not reached"
    story.peer = SessionPeer(port=home, headers=peer.headers, id=peer.id, calls=100)
    await settled(story.address)
    await story.come_back()
    (answer,) = story.told["announce"].answers
    if "result" in answer:
        await until(lambda: story.told["standalone"].notices == [1, 2, 3])
    else:
        assert answer["error"]["code"] == OUTCOME_UNKNOWN
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    story.judge()
