"""Clients of 2026-07-28 in front of servers of 2026-07-28: what both say passes as it is."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from perdure import Settings
from perdure._core.envelope import CALLS, CAPABILITIES, LOG_LEVEL, SERVER
from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import HttpUpstream, Upstream
from tests.gateway.gateways import gateway as program_gateway
from tests.support.clients.modern_peer import ALL_ASKS, TAKES_TASKS, CallPeer, accept, message_of, result_of, said
from tests.support.clients.modern_requests import TASKS
from tests.support.clients.wire_client import answer_of
from tests.support.servers.in_process import serve, under_uvicorn

pytestmark = pytest.mark.anyio

Json = dict[str, Any]

QUESTIONS: Json = {
    "who": {"method": "elicitation/create", "params": {"message": "Who?", "requestedSchema": {"type": "object"}}},
    "where": {"method": "roots/list", "params": {}},
}
ANSWERS: Json = {"who": accept(name="Ada"), "where": {"roots": []}}
INFO: Json = {SERVER: {"name": "bare", "version": "7"}}
OWN_STATE = "perdure.a-state-that-looks-like-the-gateways"


class Bare:
    """A server of 2026-07-28 without an SDK, over HTTP. Each tool answers with a round until it gets the answers; the
    name of the tool is the state of the round, and `task` becomes a task first."""

    def __init__(self) -> None:
        self.calls: list[Json] = []
        """The params of each call."""
        self.methods: list[str] = []

    def result(self, method: str, params: Json) -> Json:
        match method:
            case "server/discover":
                capabilities: Json = {"tools": {}, "prompts": {}, "extensions": {TASKS: {}}}
                return {
                    "supportedVersions": ["2026-07-28"],
                    "capabilities": capabilities,
                    "ttlMs": 5,
                    "cacheScope": "x",
                }
            case "tools/list":
                return {"tools": [], "ttlMs": 7, "cacheScope": "public", "odd": {"a": 1}}
            case "tasks/get":
                done = {"resultType": "complete", "content": [{"type": "text", "text": "followed"}]}
                return {"taskId": "t", "status": "completed", "result": done}
        self.calls.append(params)
        if params["name"] == "task":
            return {"resultType": "task", "taskId": "t", "status": "working"}
        if "inputResponses" not in params:
            return {"resultType": "input_required", "inputRequests": QUESTIONS, "requestState": params["name"]}
        return {"content": [{"type": "text", "text": "enough"}]}

    async def serve(self, request: Request) -> JSONResponse:
        message = await request.json()
        if request.headers.get("mcp-protocol-version") != "2026-07-28":
            error = {"code": -32022, "message": "Unsupported protocol version", "data": {"supported": ["2026-07-28"]}}
            return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)
        self.methods.append(message["method"])
        result = {"resultType": "complete", "_meta": INFO, **self.result(message["method"], message["params"])}
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})


@asynccontextmanager
async def gateway(bare: Bare, **settings: Any) -> AsyncIterator[int]:
    """The port of a gateway to the server."""
    app = Starlette(routes=[Route("/mcp", bare.serve, methods=["POST"])])
    async with under_uvicorn(app) as port:
        upstream = Upstream(name="bare", address=HttpUpstream(url=f"http://127.0.0.1:{port}/mcp"))
        async with serve(host_upstream(upstream, Settings(eras="both", **settings)), eras="both", **settings) as site:
            yield site.port


@pytest.mark.parametrize("key", [None, "order-7"])
async def test_rounds_with_several_questions_pass_as_they_are(key: str | None) -> None:
    bare = Bare()
    async with gateway(bare) as port:
        peer = CallPeer(port=port, capabilities=ALL_ASKS)
        meta = {"mine": 1, LOG_LEVEL: "error"}
        first = result_of(await peer.call("s1", {"a": 1.5}, key=key, params={"_meta": meta}))
        asked = {"resultType": "input_required", "_meta": INFO, "inputRequests": QUESTIONS, "requestState": "s1"}
        assert first == asked
        params = {"requestState": "s1", "inputResponses": ANSWERS}
        assert said(result_of(await peer.call("s1", {"a": 1.5}, key=key, params=params))) == "enough"
    before, after = bare.calls
    assert (before["arguments"], after["inputResponses"], after["requestState"]) == ({"a": 1.5}, ANSWERS, "s1")
    extensions: Json = {TASKS: {}, CALLS: {}}  # the gateway's
    assert before["_meta"][CAPABILITIES] == {**ALL_ASKS, "extensions": extensions}
    assert {name: before["_meta"][name] for name in meta} == meta
    assert "dev.perdure/key" not in before["_meta"]


async def test_results_pass_with_all_their_members() -> None:
    bare = Bare()
    async with gateway(bare) as port:
        peer = CallPeer(port=port)
        listed = result_of(await peer.rpc("tools/list", {}))
        expected = {"tools": [], "ttlMs": 7, "cacheScope": "public", "odd": {"a": 1}, "resultType": "complete"}
        assert listed == {**expected, "_meta": INFO}
        plain = result_of(await peer.call("s1"))  # a client that cannot be asked runs off the log
        assert (plain["inputRequests"], plain["requestState"]) == (QUESTIONS, "s1")
        refused = message_of(await peer.rpc("resources/subscribe", {"uri": "x:y"}))
        assert refused["error"]["code"] == -32601


async def test_a_state_that_looks_like_the_gateways_leads_back_to_the_server() -> None:
    """The server is a Perdure server, too."""
    bare = Bare()
    async with gateway(bare) as port:
        peer = CallPeer(port=port, capabilities=ALL_ASKS)
        first = result_of(await peer.call(OWN_STATE))
        assert said(result_of(await peer.round(OWN_STATE, first, ANSWERS))) == "enough"
    assert bare.calls[-1]["requestState"] == OWN_STATE


async def test_a_task_asks_what_its_call_requires() -> None:
    """A client that has a task does not see rounds: the task asks, and the gateway brings the answers."""
    bare = Bare()
    async with gateway(bare, task_after=0) as port:
        peer = CallPeer(port=port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        # With a key it is a task from the beginning.
        task = result_of(await peer.call("s1", key="order-7"))["taskId"]
        asked = await peer.until_asked(task, count=2)
        assert sorted(asked.values(), key=str) == sorted(QUESTIONS.values(), key=str)
        names = {question["method"]: name for name, question in asked.items()}
        await peer.update(task, {names["elicitation/create"]: ANSWERS["who"], names["roots/list"]: ANSWERS["where"]})
        assert said((await peer.until_over(task))["result"]) == "enough"
    assert (bare.calls[-1]["inputResponses"], bare.calls[-1]["requestState"]) == (ANSWERS, "s1")


async def test_a_task_of_the_server_is_followed_and_not_shown() -> None:
    bare = Bare()
    async with gateway(bare) as port:
        for capabilities in ({}, ALL_ASKS):
            peer = CallPeer(port=port, capabilities=capabilities)
            assert said(result_of(await peer.call("task"))) == "followed"
    assert bare.methods.count("tasks/get") == 2


async def test_a_process_that_sessions_and_calls_share_answers_each_in_its_era(tmp_path: Path) -> None:
    """It is spoken to for sessions, and its results are translated for a client of its own revision."""
    place = tmp_path / "era.json"
    place.write_text('{"initialize": -32022}')
    argv = (sys.executable, str(Path(__file__).with_name("era_program.py")), str(place))
    limits = {"argv": argv, "process": "shared", "era": "auto"}
    async with program_gateway(tmp_path, serving={"eras": "both"}, **limits) as served:
        session = await served.join()
        peer = CallPeer(port=served.site.port)
        called = {"method": "prompts/list"}
        assert answer_of(await session.send(session.request("prompts/list", {})))["result"] == called
        result = result_of(await peer.rpc("prompts/list", {}))
        assert result.pop("_meta")[SERVER]["name"] == "chameleon"
        assert result == {**called, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    assert len(place.with_suffix(".starts").read_text().splitlines()) == 2  # one for each era that was tried
