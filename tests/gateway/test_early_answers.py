"""Early answers at a gateway: an upstream in another language needs nothing, and never sees the two tools."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import HttpUpstream, Program, Upstream
from perdure.settings import Settings
from tests.gateway.gateways import gateway
from tests.gateway.typescript_upstreams import typescript_program
from tests.http.test_early_answers import CANCEL, RULE, WAIT, answered, call_in
from tests.support.clients.modern_peer import CallPeer, result_of, said
from tests.support.clients.wire_client import text_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def test_a_typescript_server_behind_a_rule_in_both_eras(tmp_path: Path) -> None:
    upstream = Upstream(name="bakery", program=Program(argv=typescript_program(), cwd=tmp_path))
    settings = Settings(answer_within=RULE)
    async with serve(host_upstream(upstream, settings), answer_within=RULE) as site:
        session, modern = await site.join(), CallPeer(port=site.port)
        [listed] = await (await session.post(session.request("tools/list"))).rest()
        tools = [listed["result"]["tools"], result_of(await modern.rpc("tools/list", {}))["tools"]]
        for shown in tools:
            assert [tool["name"] for tool in shown[-2:]] == [WAIT, CANCEL]
        first, other = await asyncio.gather(answered(session, "wait"), modern.call("wait"))
        ids = call_in(first), str(result_of(other)["_meta"]["dev.perdure/call"]["id"])
        for call in ids:  # each by the other era
            cancelled = result_of(await modern.call(CANCEL, {"call": call}))
            assert said(cancelled).startswith('"wait" is being cancelled')
            assert "was cancelled" in text_of(await answered(session, WAIT, call=call))
        # It has heard of the calls and their cancellations alone.
        assert said(result_of(await modern.call("bake", {"loaves": 2}))) == "2 loaves"


async def test_a_gateway_waits_for_an_upstream_that_has_rules_itself() -> None:
    """The rules are for hosts: a gateway says that it resumes by itself."""
    shop = ToolServer()
    async with serve(shop.server, answer_within=RULE) as behind:
        upstream = Upstream(name="shop", address=HttpUpstream(url=behind.url), era="session")
        async with serve(host_upstream(upstream, Settings())) as site:
            peer = await site.join()
            [listed] = await (await peer.post(peer.request("tools/list"))).rest()
            assert {WAIT, CANCEL}.isdisjoint(tool["name"] for tool in listed["result"]["tools"])
            call = await peer.call("wait", gate="g")
            await until(lambda: shop.seen == ["waiting at g"])
            await asyncio.sleep(1.1)  # a rule that applied would have answered
            shop.open("g")
            assert text_of((await call.rest())[-1]) == "went through g"


async def test_what_is_no_list_of_tools_passes_as_it_is(tmp_path: Path) -> None:
    """A request for it has its answer, and early answers go on."""
    rules = {"answer_within": RULE, "tasks": ("plain=optional",)}
    async with gateway(tmp_path, 'listed={"tools":5}', serving=rules) as served:
        session, modern = await served.join(), CallPeer(port=served.site.port)
        [listed] = await (await session.post(session.request("tools/list"))).rest()
        assert (listed["result"], result_of(await modern.rpc("tools/list", {}))["tools"]) == ({"tools": 5}, 5)
        first = await answered(session, "plain", do=[{"wait": str(gate := tmp_path / "gate")}])
        gate.touch()
        assert text_of(await answered(session, WAIT, call=call_in(first))) == "done"


async def test_a_question_that_only_a_call_of_the_tool_can_answer_is_told(tmp_path: Path) -> None:
    """A server may end a call of a session with a round of 2026-07-28."""
    gate = tmp_path / "gate"
    steps = [{"wait": str(gate)}, {"result": {"resultType": "input_required", "requestState": "s"}}]
    async with gateway(tmp_path, serving={"answer_within": RULE}) as served:
        session, modern = await served.join(), CallPeer(port=served.site.port)
        call = call_in(await answered(session, "plain", do=steps))
        gate.touch()
        told = (await answered(session, WAIT, call=call))["result"], result_of(await modern.call(WAIT, {"call": call}))
        for each in told:
            assert each["isError"] is True
            assert said(each) == '"plain" has ended with a question that it asks only a call of its own. Call it again.'
