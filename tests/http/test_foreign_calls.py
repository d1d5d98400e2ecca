"""A foreign call is as one that is not there, also while the store fails: nothing tells them apart (promise 5)."""

from __future__ import annotations

import secrets

import pytest

from perdure.store import MemoryStore
from tests.http.test_bounds import Names
from tests.support.clients.modern_peer import ALL_ASKS, TAKES_TASKS, CallPeer, result_of
from tests.support.clients.raw_http import bearer
from tests.support.servers.asking_tools import server
from tests.support.servers.gated_server import live
from tests.support.stores.faulty_store import Fault, FaultyStore

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


METHODS = ("tasks/get", "tasks/update", "tasks/cancel")


async def test_a_name_that_no_task_has_is_refused_alike_whatever_it_is() -> None:
    async with live(server=server) as served:
        peer = CallPeer(port=served.port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        session = await served.session()
        odd = ["", "x", "A" * 42, "A" * 43, "A" * 5_000, "\u043a" * 43, "../../etc", session.id, f"perdure.{'A' * 43}"]
        named: list[dict[str, object]] = [{"taskId": name} for name in odd]
        for method in METHODS:
            answers = [await peer.rpc(method, {**params, "inputResponses": {}}, id=1) for params in [*named, {}]]
            assert {(answer.status, answer.body) for answer in answers} == {(400, answers[0].body)}
            assert answers[0].error["code"] == -32602
            for name in (7, None, ["x"]):  # the header is a string
                answer = await peer.rpc(method, {"taskId": name, "inputResponses": {}})
                assert (answer.status, answer.error["code"]) in ((400, -32602), (400, -32020)), answer


async def test_a_client_that_does_not_declare_tasks_is_told_so() -> None:
    async with live(server=server) as served:
        peer = CallPeer(port=served.port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        task = result_of(await peer.call("ask", WELL))["taskId"]
        for method in METHODS:
            for name in (task, secrets.token_urlsafe(32)):
                answer = await peer.rpc(method, {"taskId": name, "inputResponses": {}}, capabilities=ALL_ASKS)
                assert (answer.status, answer.error["code"]) == (400, -32021)
                assert answer.error["data"] == {"requiredCapabilities": TAKES_TASKS}
            answer = await peer.rpc(method, {"taskId": task}, headers={"mcp-name": secrets.token_urlsafe(32)})
            assert (answer.status, answer.error["code"]) == (400, -32020)
