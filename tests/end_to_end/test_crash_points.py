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
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.store.sqlite.sql_files import schema_version
from tests.support.clients.raw_http import SessionPeer
from tests.support.clients.recording_client import assert_sound, settled
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
    at,
)
from tests.support.processes.crashing_servers import CrashingServer, CrashingServers, Point, crashing_servers
from tests.support.servers.changing_servers import ChangingServers
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.in_process import until
from tests.support.stores.shared import ON_POSTGRES, shared_address

pytestmark = pytest.mark.anyio

OUTCOME_UNKNOWN = -31001
KILLED = -9

FIRST = {**POINTS, **(POSTGRES_POINTS if ON_POSTGRES else SQLITE_POINTS)}
SECOND = {**SECOND_POINTS, **(POSTGRES_SECOND_POINTS if ON_POSTGRES else SQLITE_SECOND_POINTS)}
of_sqlite = pytest.mark.skipif(ON_POSTGRES, reason="a point in the SQLite store")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One event loop for the module, because its stories share a crashing_servers."""
    return "asyncio"


@pytest.fixture(scope="module")
async def cradle() -> AsyncIterator[CrashingServers]:
    async with crashing_servers() as it:
        yield it


@pytest.fixture
async def world(tmp_path: Path, cradle: CrashingServers) -> AsyncIterator[ChangingServers]:
    yield ChangingServers(tmp_path, cradle, shared_address(tmp_path / "log.db"))
    await cradle.clear()


async def live_until_death(world: ChangingServers, server: CrashingServer) -> None:
    """A first call before the point counts, then calls of each kind until the process dies."""
    listening = asyncio.create_task(world.listen())
    await world.call("before", "count", 3)
    await server.arm()
    # With a pause between two reports, so that each is a commit of its own.
    await asyncio.gather(world.call("pay", "pay", 6, interval=0.005), world.call("count", "count", 6, interval=0.005))
    await world.call("put", "put", 6, interval=0.005)
    assert await server.gone() == KILLED, "the point was not reached"
    await listening


def assert_fair(world: ChangingServers, key: str, *, may_run_again: bool, deaths: int = 1) -> None:
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


async def go_on_and_judge(world: ChangingServers, *, deaths: int = 1) -> None:
    """Start a server that lives, come back to it, and see that every promise was kept."""
    world.move_to(await world.start())
    await settled(world.address)
    await world.come_back()
    assert_fair(world, "pay", may_run_again=False, deaths=deaths)
    assert_fair(world, "count", may_run_again=True, deaths=deaths)
    assert_fair(world, "put", may_run_again=True, deaths=deaths)
    await the_session_goes_on(world)
    world.judge()


async def the_session_goes_on(world: ChangingServers) -> None:
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


@pytest.mark.parametrize("name", FIRST)
async def test_a_server_that_dies(world: ChangingServers, name: str) -> None:
    """Promises 1, 2, 3 and 4 at each point of a call's life."""
    await live_and_die(world, FIRST[name])


async def live_and_die(world: ChangingServers, point: Point) -> None:
    server = await world.start(point)
    await world.open_session(server)
    await live_until_death(world, server)
    await go_on_and_judge(world)


@of_sqlite
@pytest.mark.parametrize("name", GROUP_POINTS)
async def test_a_server_that_dies_in_a_group_commit(world: ChangingServers, name: str) -> None:
    """Promises 1, 2, 3 and 4 where commits are grouped by a thread."""
    server = await world.start(GROUP_POINTS[name], sync="full")
    await world.open_session(server)
    await live_until_death(world, server)
    await go_on_and_judge(world)


@pytest.mark.parametrize("name", SECOND)
async def test_a_server_that_dies_while_it_settles_what_another_left(world: ChangingServers, name: str) -> None:
    """Promise 3: the third server finds every call, and each gets one answer."""
    await settle_and_die(world, SECOND[name])


async def settle_and_die(world: ChangingServers, point: Point) -> None:
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

    server = await world.start(replace(point, armed=True))
    assert await server.gone() == KILLED, "the point was not reached"
    await go_on_and_judge(world, deaths=2)


@pytest.mark.parametrize(("tool", "runs"), [("die", 1), ("die_again", 2)])
async def test_a_tool_that_kills_its_process_is_not_run_for_ever(world: ChangingServers, tool: str, runs: int) -> None:
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
    await settled(world.address)
    await world.come_back()
    (answer,) = world.told["die"].answers
    assert (answer["error"]["code"], answer["error"]["data"]["outcome"]) == (OUTCOME_UNKNOWN, "unknown")
    assert world.told["die"].progress == [1]
    assert world.runs("die") == runs
    await the_session_goes_on(world)
    assert not server.dead
    world.judge()


@of_sqlite
@pytest.mark.parametrize("name", MIGRATION_POINTS)
async def test_a_server_that_dies_while_it_makes_its_file(world: ChangingServers, name: str) -> None:
    """Promise 3: the file is empty or whole, and the next server serves from it."""
    file = Path(world.address.removeprefix("sqlite:"))
    server = await world.start(replace(MIGRATION_POINTS[name], armed=True))
    assert await server.gone() == KILLED, "the point was not reached"
    assert layout(file) == (schema_version() if name == "after the commit" else 0)
    server = await world.start()
    assert layout(file) == schema_version()
    await world.open_session(server)
    await the_session_goes_on(world)
    assert_sound(world.address)


def layout(path: Path) -> int:
    """The version of a file's layout."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


@pytest.mark.parametrize("where", ["take", "written"], ids=["before the commit", "when nobody knows of the commit"])
async def test_a_node_that_dies_with_notices_for_another_one_had_not_answered_yet(
    world: ChangingServers, tmp_path: Path, where: str
) -> None:
    """R2: what a tool sent before its answer is in the log before the answer is, also through another node."""
    server = await world.start()
    await world.open_session(server)
    listening = asyncio.create_task(world.listen())
    async with crashing_servers() as other:
        # It is not the session's home, so it forwards notices to the one that is. It dies in the middle of that.
        neighbour = await other.start(
            GATE_FILE_TOOLS,
            "--store",
            world.address,
            folder=tmp_path,
            point=at("perdure.sessions.home", f"Outbox.{where}", "enter"),
        )
        peer, home = world.peer, server.port
        world.move_to(neighbour)
        await world.call("before", "count", 1)
        await neighbour.arm()
        await world.call("announce", "announce", 3)
        assert await neighbour.gone() == KILLED, "the point was not reached"
    world.peer = SessionPeer(port=home, headers=peer.headers, id=peer.id, calls=100)
    await settled(world.address)
    await world.come_back()
    (answer,) = world.told["announce"].answers
    if "result" in answer:
        await until(lambda: world.told["standalone"].notices == [1, 2, 3])
    else:
        assert answer["error"]["code"] == OUTCOME_UNKNOWN
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    world.judge()
