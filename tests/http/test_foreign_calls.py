"""A foreign call is as one that is not there, also while the store fails: nothing tells them apart (promise 5)."""

from __future__ import annotations

import secrets

import pytest

from perdure.store import MemoryStore
from tests.http.test_bounds import Names, bearer
from tests.support.askbox import server
from tests.support.call_peer import ALL_ASKS, TAKES_TASKS, CallPeer, result_of
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.live import live

pytestmark = pytest.mark.anyio

WELL = {"question": "Well?"}


async def test_a_store_that_cannot_be_read_does_not_tell_a_foreign_call_from_an_unknown_one() -> None:
    store = FaultyStore(MemoryStore())
    async with live(server=server, store=store, auth=Names()) as served:
        alice = CallPeer(port=served.port, headers=bearer("alice"), capabilities={**ALL_ASKS, **TAKES_TASKS})
        bob = CallPeer(port=served.port, headers=bearer("bob"), capabilities={**ALL_ASKS, **TAKES_TASKS})
        task = result_of(await alice.call("ask", WELL))["taskId"]
        store.reads = Fault.RAISES
        seen = set()
        for name in (task, secrets.token_urlsafe(32)):
            got = await bob.rpc("tasks/get", {"taskId": name}, id=1)
            gone_on = await bob.call("ask", WELL, params={"requestState": f"perdure.{name}"}, id=1)
            seen.add((got.status, got.body, gone_on.status, gone_on.body))
        store.works()
        assert len(seen) == 1, seen
        assert len(await alice.until_asked(task)) == 1
