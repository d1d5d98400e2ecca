"""How many sessions there may be: exactly so many, and one caller never at another's cost (promise 6, P10)."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from perdure._core import retention
from perdure._core.limits import Caller
from perdure._core.states import SessionState
from perdure.http.credentials import caller_of
from perdure.store import MemoryStore
from perdure.testing._values import count_open
from tests.http.test_bounds import LIMIT, Names, refused
from tests.support.clients.raw_http import Answer, Peer, SessionPeer, bearer, message
from tests.support.processes.cluster import cluster
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.gated_server import Live, live
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


def calling_from(served: Live, address: str) -> Peer:
    return Peer(port=served.port, address=address)


async def all_rest(store: MemoryStore) -> None:
    """Wait until every session is dormant."""

    async def rest() -> bool:
        return (await store.count_states())[SessionState.DORMANT] == await count_open(store)

    await until(rest)


async def is_there(peer: SessionPeer) -> bool:
    return (await peer.ask("POST", message("ping", id="there?"))).status == 200


# Exactly so many


@pytest.mark.parametrize("scheme", ["memory:", "sqlite:"])
async def test_of_sixty_that_come_at_once_three_get_in(scheme: str, tmp_path: Path) -> None:
    store = scheme if scheme == "memory:" else f"{scheme}{tmp_path / 'log.db'}"
    async with live(store=store, max_sessions=3) as served:
        answers = await asyncio.gather(*(served.initialize() for _ in range(60)))
        assert sorted(answer.status for answer in answers) == [200] * 3 + [503] * 57
        assert len(served.app.session_ids()) == 3


@pytest.mark.parametrize("scheme", ["memory:", "sqlite:"])
async def test_of_sixty_of_one_principal_three_get_in(scheme: str, tmp_path: Path) -> None:
    store = scheme if scheme == "memory:" else f"{scheme}{tmp_path / 'log.db'}"
    async with live(store=store, auth=Names(), max_principal_sessions=3) as served:
        answers = await asyncio.gather(*(served.initialize(**bearer("ann")) for _ in range(60)))
        assert sorted(answer.status for answer in answers) == [200] * 3 + [429] * 57


async def test_two_processes_let_in_as_many_as_one(tmp_path: Path) -> None:
    async with cluster(tmp_path / "log.db", "--max-sessions", "3", processes=2) as nodes:
        peers = [Peer(port=served.port) for served in nodes.servers]
        answers = await asyncio.gather(*(peers[number % 2].initialize() for number in range(40)))
        assert sorted(answer.status for answer in answers) == [200] * 3 + [503] * 37


async def test_two_processes_run_as_many_calls_of_a_session_as_one(tmp_path: Path) -> None:
    async with cluster(tmp_path / "log.db", "--max-calls", "2", processes=2) as nodes:
        here, there = await _one_session_at_both(nodes.servers[0].port, nodes.servers[1].port)
        held = {"n": 1, "gate": str(tmp_path / "gate"), "pauses": [0]}
        running = await here.begin_call("count", id="a", **held), await there.begin_call("count", id="b", **held)
        await until(lambda: len(nodes.rows("SELECT 1 FROM call WHERE state = 'running'")) == 2)
        for peer in (here, there):
            beyond = await peer.call("count", n=1, id="beyond")
            refused(beyond, 429, LIMIT, "has 2 running requests, its limit (max_calls)")
        # A reattach is no further call: no client is locked out of a session that is busy.
        assert (await there.initialize()).status == 200
        open_gate(tmp_path / "gate.0")
        for call in running:
            await call.answer()
            await call.aclose()
        await until(lambda: not nodes.rows("SELECT 1 FROM call WHERE state = 'running'"))
        assert (await there.call("count", n=1)).status == 200


async def _one_session_at_both(first: int, second: int) -> tuple[SessionPeer, SessionPeer]:
    here = await Peer(port=first).session()
    return here, SessionPeer(port=second, headers=here.headers, id=here.id)


# Never at another's cost


async def test_a_principal_that_is_refused_costs_nobody_a_session() -> None:
    """The refusal is decided first; a dormant session of another principal does not make room for it."""
    store = MemoryStore()
    async with live(store=store, auth=Names(), session_grace=0.05) as served:
        bob = await served.session(**bearer("bob"))
        await all_rest(store)
    async with live(store=store, auth=Names(), max_sessions=3, max_principal_sessions=2) as served:
        for _ in range(2):
            await served.session(**bearer("ann"))
        for _ in range(3):
            refused(await served.initialize(**bearer("ann")), 429, LIMIT, "You have 2 sessions")
        assert await is_there(replace(bob, port=served.port))


async def test_a_caller_at_its_limit_gives_up_its_own_dormant_session() -> None:
    store = MemoryStore()
    async with live(store=store, auth=Names(), session_grace=0.05) as served:
        peers = [await served.session(**bearer(name)) for name in ("bob", "ann", "ann")]
        await all_rest(store)
    async with live(store=store, auth=Names(), max_principal_sessions=2, recover="strict") as served:
        peers.append(await served.session(**bearer("ann")))
        assert [await is_there(replace(peer, port=served.port)) for peer in peers] == [True, False, True, True]


async def test_a_flood_from_one_address_costs_no_other_address_a_session() -> None:
    store = MemoryStore()
    async with live(store=store, max_sessions=6, max_address_sessions=4, session_grace=0.05) as served:
        neighbour = await calling_from(served, "127.0.0.2").session()
        answers: list[Answer] = []
        for _ in range(3):
            await all_rest(store)  # its own sessions make room for its next
            answers += await asyncio.gather(*(served.initialize() for _ in range(8)))
        assert {answer.status for answer in answers} <= {200, 429}
        assert sum(answer.status == 200 for answer in answers) > 4
        assert await is_there(neighbour)


async def test_the_sessions_of_one_address() -> None:
    async with live(max_address_sessions=2) as served:
        first, _ = [await served.session() for _ in range(2)]
        words = "Your address has 2 sessions, its limit (max_address_sessions)"
        refused(await served.initialize(), 429, LIMIT, words)
        await calling_from(served, "127.0.0.2").session()
        await first.delete()
        await served.session()
        refused(await served.initialize(), 429, LIMIT, words)


async def test_where_there_is_no_room_a_lost_session_is_not_replaced() -> None:
    async with live(recover="reissue", max_address_sessions=1) as served:
        await served.session()
        gone = await served.ask("POST", message("ping", id=1), headers={"mcp-session-id": "A" * 43})
        assert (gone.status, gone.error["data"]["recovery"]["action"]) == (404, "initialize")
        assert served.app.counters.recoveries_tried == 0


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("192.0.2.1", 5), "192.0.2.1"),
        (("::ffff:192.0.2.1", 5), "192.0.2.1"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::1", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (("testclient", 5), "testclient"),
        (None, ""),
    ],
)
def test_an_address_is_what_one_customer_has(client: tuple[str, int] | None, address: str) -> None:
    assert caller_of("", {"client": client}) == Caller("", address)
    assert caller_of("ann", {"client": client}) == Caller("ann", "")


# What is left of ended ones


async def test_sessions_that_come_and_go_leave_little_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_ENDED_OF_CALLER", 10)
    path = tmp_path / "log.db"
    padding = {"clientInfo": {"name": "x" * 60_000, "version": "1"}}
    body = message("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, **padding}, id=1)
    async with live(store=f"sqlite:{path}") as served:
        for _ in range(30):
            known = (await served.ask("POST", body)).header("mcp-session-id") or ""
            ended = await served.ask("DELETE", headers={"mcp-session-id": known})
            assert ended.status == 200
        gone = await served.ask("POST", message("ping", id=1), headers={"mcp-session-id": known})
        assert (gone.status, gone.error["data"]["reason"]) == (404, "client deleted")
    with closing(sqlite3.connect(path)) as connection:
        kept = connection.execute("SELECT count(*), sum(length(client_params)), sum(length(result)) FROM session")
        assert kept.fetchone() == (10, 0, 0)
    assert path.stat().st_size < 30 * 60_000 / 2


async def test_the_oldest_of_all_ended_sessions_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_ENDED", 3)
    path = tmp_path / "log.db"
    async with live(store=f"sqlite:{path}", auth=Names()) as served:
        ended = []
        for number in range(5):
            peer = await served.session(**bearer(f"principal {number}"))
            await peer.delete()
            ended.append(peer.id)
    with closing(sqlite3.connect(path)) as connection:
        assert {id_ for (id_,) in connection.execute("SELECT id FROM session")} == set(ended[2:])
