"""Stock clients, unchanged, over `kill -9` and restart of the server, and from one process to another (H1, H5, H7).

Each story is told with every client: its session goes on under the same id, without a handshake; what may run again is
run again and arrives whole; what may not is told to have an unknown outcome (promises 2 and 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.clients.node_clients import node_client
from tests.clients.python_clients import python_client
from tests.clients.stock_client import PATIENCE, USER_SAYS, Call, StockClient, named
from tests.support.clients.raw_http import Peer
from tests.support.processes.cluster import Cluster, cluster
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

OUTCOME_UNKNOWN = -31001

#: Stock clients come back after this time, and once more after the same.
RETRY = 0.1
#: Where nobody holds the door, the restart must be over by then: a process starts in 0.8 s when the machine is idle. It
#: is the default of the setting.
PATIENT_RETRY = 5.0

Connect = Callable[[str], AbstractAsyncContextManager[StockClient]]

CLIENTS: dict[str, Connect] = {
    "python-legacy": python_client,
    "python-default": partial(python_client, mode="auto"),
    "typescript-1": partial(node_client, "ts1.mjs"),
    "typescript-2": partial(node_client, "ts2.mjs"),
}


NAMES = named("python-default", "typescript-2", in_all=["python-legacy", "typescript-1"])
each_client = pytest.mark.parametrize("connect", NAMES, indirect=True)


@pytest.fixture(params=named("python-default", in_all=["python-legacy", "typescript-1", "typescript-2"]))
def connect(request: pytest.FixtureRequest, packages: None) -> Connect:
    return CLIENTS[request.param]


def options(retry: float) -> tuple[str, ...]:
    return ("--retry", f"{int(retry * 1000)}ms")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path / "log.db", *options(RETRY)) as it:
        yield it


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path / "log.db", *options(RETRY), processes=2) as it:
        yield it


@pytest.fixture
async def client(connect: Connect, site: Cluster) -> AsyncIterator[StockClient]:
    async with connect(site.proxy.url) as it:
        await site.proxy.answered("GET")  # the standalone stream is there
        yield it


def numbers(last: int) -> list[int]:
    return list(range(1, last + 1))


def notices(last: int) -> list[str]:
    return [f"notice://{number}" for number in numbers(last)]


async def where(client: StockClient) -> tuple[str, int]:
    """The session that the server sees, and the process that answered."""
    session, pid = (await client.result("where")).split()
    return session, int(pid)


def assert_unknown(call: Call) -> None:
    assert call.code == OUTCOME_UNKNOWN, call.answer
    assert call.data["outcome"] == "unknown"


@each_client
async def test_killed_during_a_read_only_call_its_result_arrives(
    client: StockClient, site: Cluster, tmp_path: Path
) -> None:
    """Promise 3, A33: progress that was sent is not sent again."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    call = await client.call("count", n=8, gate=str(gate), pauses=[4], log=str(log))
    await client.saw(call, numbers(4))
    first = site.server.pid
    await site.kill()
    open_gate(f"{gate}.4")
    await site.restart()
    assert await client.answer(call) == "counted to 8"
    assert call.progress == numbers(8)
    assert diary(log) == [("-", first), ("-", site.server.pid)]
    assert len(site.sessions()) == 1


async def test_what_the_client_had_not_seen_before_the_kill_arrives_once(
    client: StockClient, site: Cluster, tmp_path: Path
) -> None:
    """Promises 1 and 2: the log has more than the client, and the call runs again into the same stream."""
    gate = tmp_path / "gate"
    before = site.events()
    call = await client.call("count", n=8, gate=str(gate), pauses=[2, 5])
    await client.saw(call, numbers(2))
    site.proxy.hold()
    open_gate(f"{gate}.2")
    await until(lambda: site.events() == before + 5)
    await site.kill()
    open_gate(f"{gate}.5")
    await site.restart()
    assert await client.answer(call) == "counted to 8"
    assert call.progress == numbers(8)


@each_client
async def test_killed_during_a_call_that_may_not_run_again_the_client_is_told(
    client: StockClient, site: Cluster, tmp_path: Path
) -> None:
    """Promise 3: interrupted, outcome unknown; the side effect happened once."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    call = await client.call("pay", n=8, gate=str(gate), pauses=[4], log=str(log))
    await client.saw(call, numbers(4))
    first = site.server.pid
    await site.crash()
    open_gate(f"{gate}.4")
    await client.answer(call)
    assert_unknown(call)
    assert call.progress == numbers(4)
    assert await client.result("count", n=1) == "counted to 1"
    assert diary(log) == [("-", first)]


async def test_killed_between_two_calls_the_session_and_its_notices_go_on(client: StockClient, site: Cluster) -> None:
    """H1, H5, R4: under the same id, without a handshake."""
    before = await where(client)
    await client.result("announce", n=3)
    await client.until(lambda: client.notices == notices(3))
    await site.crash()
    assert await where(client) == (before[0], site.server.pid) != before
    await client.result("announce", n=3, start=4)
    await client.until(lambda: client.notices == notices(6))
    assert site.sessions() == [(before[0], 1)]


async def test_a_restart_by_sigterm_lets_the_running_call_finish_where_it_runs(
    client: StockClient, site: Cluster, tmp_path: Path
) -> None:
    """Graceful stop: nothing runs twice, and the next call is answered by the next process."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    call = await client.call("pay", n=8, gate=str(gate), pauses=[4], log=str(log))
    await client.saw(call, numbers(4))
    old, new = site.server, await site.start()
    site.proxy.upstreams = (new.port,)
    site.ask_to_stop(old)
    async with asyncio.timeout(PATIENCE):
        while await Peer(port=old.port).health() != "stopping":
            pass
    open_gate(f"{gate}.4")
    assert await client.answer(call) == "counted to 8"
    assert call.progress == numbers(8)
    assert diary(log) == [("-", old.pid)]
    assert await old.process.wait() == 0
    assert (await where(client))[1] == new.pid
    await client.result("announce", n=3)
    await client.until(lambda: client.notices == notices(3))
    assert len(site.sessions()) == 1


@each_client
async def test_each_connection_may_go_to_another_process(connect: Connect, pair: Cluster, tmp_path: Path) -> None:
    """Promise 2 whatever process the reader is attached to; P6 whatever process the answer comes to."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    async with connect(pair.proxy.url) as client:
        await pair.proxy.answered("GET")
        # Calls that run at once each need a connection, and connections go to the two processes in turn.
        calls = [await client.call("count", n=8, gate=str(gate), pauses=[4], log=str(log)) for _ in range(4)]
        for call in calls:
            await client.saw(call, numbers(4))
        assert {pid for _, pid in diary(log)} == {served.pid for served in pair.servers}
        pair.proxy.cut(only="POST")
        open_gate(f"{gate}.4")
        for call in calls:
            assert await client.answer(call) == "counted to 8"
            assert call.progress == numbers(8)
        assert len(diary(log)) == 4

        asks = [await client.call("ask", question=f"question {number}") for number in range(4)]
        announced = [await client.call("announce", n=1, start=number) for number in numbers(4)]
        assert [await client.answer(call) for call in asks] == [USER_SAYS] * 4
        assert [await client.answer(call) for call in announced] == ["announced 1"] * 4
        await client.until(lambda: sorted(client.notices) == notices(4))
        assert sorted(client.asked) == [f"question {number}" for number in range(4)]
        assert len(pair.sessions()) == 1


@pytest.mark.parametrize("tool", ["count", "pay"])
async def test_the_other_process_goes_on_where_one_was_killed(
    connect: Connect, pair: Cluster, tmp_path: Path, tool: str
) -> None:
    """Promise 3 without any restart: whoever is alive settles what the dead one ran."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    async with connect(pair.proxy.url) as client:
        await pair.proxy.answered("GET")
        call = await client.call(tool, n=8, gate=str(gate), pauses=[4], log=str(log))
        await client.saw(call, numbers(4))
        ((_, runs_in),) = diary(log)
        (victim,) = (served for served in pair.servers if served.pid == runs_in)
        (heir,) = (served for served in pair.servers if served is not victim)
        pair.proxy.upstreams = (heir.port,)
        await victim.kill()
        open_gate(f"{gate}.4")
        answer = await client.answer(call)
        if tool == "count":
            assert answer == "counted to 8"
            assert call.progress == numbers(8)
        else:
            assert_unknown(call)
            assert diary(log) == [("-", runs_in)]
        assert (await where(client))[1] == heir.pid
        await client.result("announce", n=3)
        await client.until(lambda: client.notices == notices(3))


@each_client
async def test_a_restart_on_the_same_port_is_over_before_the_client_gives_up(connect: Connect, tmp_path: Path) -> None:
    """H7 with nothing between client and server: within the attempts that the client makes by itself."""
    gate = tmp_path / "gate"
    async with cluster(tmp_path / "log.db", *options(PATIENT_RETRY)) as site, connect(site.server.url) as client:
        session, _ = await where(client)
        call = await client.call("count", n=8, gate=str(gate), pauses=[4])
        await client.saw(call, numbers(4))
        await site.server.kill()
        open_gate(f"{gate}.4")
        await site.start(port=site.server.port)
        assert await client.answer(call) == "counted to 8"
        assert call.progress == numbers(8)
        assert await where(client) == (session, site.server.pid)
        await client.result("announce", n=3)
        await client.until(lambda: client.notices == notices(3))
        assert site.sessions() == [(session, 1)]


@pytest.mark.parametrize("name", NAMES)
async def test_a_server_that_does_not_come_back_is_given_up_after_two_attempts(
    name: str, site: Cluster, tmp_path: Path, packages: None
) -> None:
    """What docs/clients.md says of each client: how often it comes back, and what its caller is told."""
    async with CLIENTS[name](site.proxy.url) as client:
        await site.proxy.answered("GET")
        call = await client.call("count", n=8, gate=str(tmp_path / "gate"), pauses=[4])
        await client.saw(call, numbers(4))
        accepted = site.proxy.accepted
        await site.server.kill()
        # The Python client tries again once for the standalone stream, and twice for a call.
        attempts = 3 if name.startswith("python") else 4
        await until(lambda: site.proxy.accepted == accepted + attempts)
        if name.startswith("python"):
            assert "exhausted" in await client.answer(call)
        else:
            await client.until(lambda: sum("Maximum reconnection" in error for error in client.errors) == 2)
            assert call.answer is None


@pytest.mark.parametrize("name", NAMES)
async def test_a_request_made_while_nobody_listens_is_not_sent_again(name: str, site: Cluster, packages: None) -> None:
    """The other limit that docs/clients.md tells of: it may have been accepted, so no client repeats it."""
    ended = ExceptionGroup if name.startswith("python") else ()
    answer = ""
    try:
        async with CLIENTS[name](site.proxy.url) as client:
            await site.proxy.answered("GET")
            await site.server.kill()
            answer = await client.result("where")
    except ended:
        answer = "the client ended"
    assert answer == ("the client ended" if name.startswith("python") else "error: fetch failed")
