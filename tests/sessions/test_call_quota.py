"""When the calls of a caller are counted: with each one below a hundred, and now and then where many are allowed."""

from __future__ import annotations

import asyncio

import pytest

from perdure._core.ids import RecordKind
from perdure._core.limits import Caller
from perdure.sessions.call_quota import CHECK_SHARE, MAX_CALLERS, CallQuota
from perdure.store import MemoryStore
from tests.support.clients.modern_peer import CallPeer
from tests.support.servers.asking_tools import server
from tests.support.servers.gated_server import live

ALICE, BOB = Caller("alice"), Caller("", "10.0.0.1")


def quota(limit: int) -> CallQuota:
    return CallQuota(limit, lambda: 0.0)


def counted(checks: CallQuota, calls: int, caller: Caller = ALICE) -> list[int]:
    """Which of so many calls are counted, if all find room."""
    due = []
    for number in range(calls):
        if checks.is_due(caller):
            due.append(number)
            checks.found_room(caller)
    return due


def test_below_a_hundred_each_call_is_counted() -> None:
    assert counted(quota(CHECK_SHARE - 1), 4) == [0, 1, 2, 3]


def test_a_count_that_found_room_vouches_for_a_hundredth_of_the_limit() -> None:
    assert counted(quota(CHECK_SHARE), 5) == [0, 2, 4]
    assert counted(quota(10 * CHECK_SHARE), 30) == [0, 11, 22]


def test_a_count_that_found_no_room_vouches_for_nothing() -> None:
    checks = quota(10 * CHECK_SHARE)
    assert [checks.is_due(ALICE) for _ in range(3)] == [True, True, True]


def test_each_caller_is_counted_apart_and_one_that_is_forgotten_at_once() -> None:
    checks = quota(10 * CHECK_SHARE)
    assert counted(checks, 2) == counted(checks, 2, BOB) == [0]
    for number in range(MAX_CALLERS - 1):
        counted(checks, 1, Caller(f"caller-{number}"))
    assert not checks.is_due(BOB)
    assert checks.is_due(ALICE)


@pytest.mark.anyio
async def test_a_caller_that_makes_up_many_keys_keeps_as_many_as_it_may_and_a_hundredth() -> None:
    """All of them are answered: the calls that ended first go."""
    store, limit = MemoryStore(), CHECK_SHARE
    async with live(server=server, store=store, max_principal_tasks=limit) as served:
        peer = CallPeer(port=served.port)
        for start in range(0, limit + 40, 20):
            calls = (peer.call("fill", {"size": 1}, key=f"key-{number}") for number in range(start, start + 20))
            assert {answer.status for answer in await asyncio.gather(*calls)} == {200}
        kept = sum((await store.count_states(RecordKind.CALL)).values())
        assert limit - limit // CHECK_SHARE <= kept <= limit + limit // CHECK_SHARE
