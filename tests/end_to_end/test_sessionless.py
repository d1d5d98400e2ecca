"""Requests without a session over several processes and over their ends: each has its answer, in JSON-RPC's form.

Real processes, real signals; the requests are written byte by byte.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult

from perdure._core.unknown_outcome import unknown_error
from perdure.store import open_store
from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Exchange, Peer
from tests.support.processes.serving import Served, serving
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

STUBBORN = "tests.support.servers.slow_tools:server"
ROUNDS = "tests.support.servers.round_tools:server"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUBBORN_FOLDER", str(tmp_path))
    return tmp_path


async def begun(served: Served, method: str, params: dict[str, Any]) -> Exchange:
    """A request whose response has begun."""
    body, headers = modern(method, params, id="mine")
    exchange = await Peer(port=served.port).begin("POST", body, headers=headers)
    await exchange.until_messages(1)
    return exchange


async def waiting(served: Served, name: str) -> Exchange:
    call = {"name": "until_there", "arguments": {"name": name}, "_meta": {"progressToken": 1}}
    return await begun(served, "tools/call", call)


async def listening(served: Served) -> Exchange:
    return await begun(served, "subscriptions/listen", {"notifications": {"toolsListChanged": True}})


async def test_a_running_call_has_the_time_of_a_gentle_stop(folder: Path) -> None:
    async with serving(STUBBORN, "--store", "memory:") as served, await waiting(served, "bread") as call:
        served.send(signal.SIGTERM)
        while (await Peer(port=served.port).ask("GET", path="/healthz")).status == 200:
            pass
        (folder / "bread").touch()
        answer = await call.answer()
        assert answer.messages[-1]["result"]["content"][0]["text"] == "bread is there"
        assert await served.wait() == 0


async def test_a_call_that_does_not_end_in_time_is_answered_that_its_outcome_is_unknown() -> None:
    """Promise 3; not a broken connection, and no page of an HTTP server."""
    options = ("--store", "memory:", "--drain-timeout", "0")
    async with serving(STUBBORN, *options) as served, await waiting(served, "never") as call:
        served.send(signal.SIGTERM)
        error = (await call.answer()).messages[-1]
        assert (error["id"], error["error"]["code"]) == ("mine", -31001)
        assert error["error"]["data"] == unknown_error("tools/call", "until_there", "the server is stopping")[1]
        assert await served.wait() == 0


async def test_a_call_without_a_word_yet_is_answered_as_json_when_the_server_stops() -> None:
    async with serving(
        "tests.support.servers.silent_tool:server", "--store", "memory:", "--drain-timeout", "0"
    ) as served:
        body, headers = modern("tools/call", {"name": "wait", "arguments": {}}, id=7)
        async with await Peer(port=served.port).begin("POST", body, headers=headers) as call:
            await until(lambda: "waiting" in served.output)
            served.send(signal.SIGTERM)
            answer = await call.answer()
            assert (answer.status, answer.header("content-type")) == (200, "application/json")
            assert (answer.json["id"], answer.json["error"]["code"]) == (7, -31001)


async def test_a_listener_is_told_that_its_subscription_is_over_when_the_server_stops(folder: Path) -> None:
    """At once, while a call still runs: its client subscribes elsewhere."""
    async with (
        serving(STUBBORN, "--store", "memory:") as served,
        await waiting(served, "bread") as call,
        await listening(served) as listener,
    ):
        served.send(signal.SIGTERM)
        end = (await listener.answer()).messages[-1]
        meta = {"io.modelcontextprotocol/subscriptionId": "mine"}
        assert end == {"jsonrpc": "2.0", "id": "mine", "result": {"resultType": "complete", "_meta": meta}}
        (folder / "bread").touch()
        assert "result" in (await call.answer()).messages[-1]
        assert await served.wait() == 0


async def test_the_rounds_of_a_call_may_come_to_any_process(tmp_path: Path) -> None:
    """Two servers share a store; each round of a stock client's call goes to the other one."""
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with serving(ROUNDS, "--store", store) as first, serving(ROUNDS, "--store", store) as second:
        body, headers = modern("tools/call", ORDER, id=1, capabilities=ASKED)
        for there, then in [(first, second), (second, first)] * 3:
            answer = await Peer(port=there.port).ask("POST", body, headers=headers)
            asked = answer.json["result"]
            assert asked["resultType"] == "input_required", asked
            [name] = asked["inputRequests"]
            answered = {**ORDER, "requestState": asked["requestState"], "inputResponses": {name: ACCEPTED}}
            again, _ = modern("tools/call", answered, id=2, capabilities=ASKED)
            answer = await Peer(port=then.port).ask("POST", again, headers=headers)
            assert answer.json["result"]["content"][0]["text"] == "a dark loaf", answer


async def test_the_rounds_of_a_call_go_on_behind_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with serving(ROUNDS, "--store", store) as served:
        body, headers = modern("tools/call", ORDER, id=1, capabilities=ASKED)
        asked = (await Peer(port=served.port).ask("POST", body, headers=headers)).json["result"]
        await served.kill()
    async with serving(ROUNDS, "--store", store) as served:
        [name] = asked["inputRequests"]
        answered = {**ORDER, "requestState": asked["requestState"], "inputResponses": {name: ACCEPTED}}
        body, _ = modern("tools/call", answered, id=2, capabilities=ASKED)
        answer = await Peer(port=served.port).ask("POST", body, headers=headers)
        assert answer.json["result"]["content"][0]["text"] == "a dark loaf"


async def test_a_stock_client_has_all_its_rounds_at_several_workers(tmp_path: Path) -> None:
    async def choose(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        return ElicitResult(action="accept", content={"loaf": "dark"})

    store = f"sqlite:{tmp_path / 'store.db'}"
    async with serving(ROUNDS, "--store", store, "--workers", "2", "--eras", "both") as served:

        async def order() -> str:
            async with Client(served.url, elicitation_callback=choose) as client:
                result = await client.call_tool("order", {})
                return result.content[0].text  # type: ignore[union-attr]

        assert set(await asyncio.gather(*(order() for _ in range(10)))) == {"a dark loaf"}


async def test_with_request_state_of_its_own_a_server_keeps_its_keys(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with serving(ROUNDS, "--store", store, "--request-state", "own"):
        pass
    async with open_store(store) as kept:
        assert set(await kept.notes("")) == {"call-keys", "server-1"}


ORDER = {"name": "order", "arguments": {}}
ASKED: dict[str, Any] = {"elicitation": {"form": {}}}
ACCEPTED = {"action": "accept", "content": {"loaf": "dark"}}
