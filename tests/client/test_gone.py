"""The session is gone: one new handshake, then everything goes on; what may have run is not sent again (B5, H8)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

import perdure
from tests.client.conftest import Inbox, Progress, numbers, text
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


def url_of(site: Site) -> str:
    return f"http://127.0.0.1:{site.port}/mcp"


async def end(site: Site, session: str | None) -> None:
    """End the session without the client's knowledge."""
    assert session is not None
    async with httpx2.AsyncClient() as http:
        response = await http.delete(url_of(site), headers={"mcp-session-id": session})
    assert response.status_code == 200


async def test_the_next_call_runs_in_a_new_session_and_once(
    shop: ToolServer, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with perdure.connect(url_of(site)) as client:
        first = client.session_id
        await end(site, first)
        assert text(await client.call_tool("count", {"n": 2})) == "counted to 2"
        assert client.session_id not in (None, first)
        assert shop.seen == ["counted 2"]
        assert site.app.counters.snapshot()["sessions_opened"] == 2
    gone = [record for record in caplog.records if vars(record).get("action") == "remote.session_gone"]
    assert [record.message for record in gone] == [f"the session at {url_of(site)} is gone; a new one is begun"]


async def test_many_requests_that_find_out_at_once_begin_one_new_session(shop: ToolServer, site: Site) -> None:
    async with perdure.connect(url_of(site)) as client:
        await end(site, client.session_id)
        results = await asyncio.gather(*(client.call_tool("count", {"n": 1}) for _ in range(20)))
        assert {text(result) for result in results} == {"counted to 1"}
        assert site.app.counters.snapshot()["sessions_opened"] == 2


async def test_a_running_call_has_an_unknown_outcome_and_is_not_sent_again(shop: ToolServer, site: Site) -> None:
    """Another server stands at the address, which has never heard of the session."""
    progress, other = Progress(), ToolServer()
    arguments = {"n": 4, "gate": "g", "pauses": [2]}
    async with (
        serve(other.server, retry=0.02) as elsewhere,
        cutting_proxy(site.port) as proxy,
        perdure.connect(proxy.url) as client,
    ):
        call = asyncio.create_task(client.call_tool("count", arguments, None, progress))
        await until(lambda: progress.seen == numbers(2))
        proxy.upstreams = (elsewhere.port,)
        proxy.cut()
        with pytest.raises(
            perdure.OutcomeUnknown, check=lambda error: "its session is gone" in error.reason
        ) as unknown:
            await call
        assert (unknown.value.tool, unknown.value.arguments) == ("count", arguments)
        assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"
    assert other.seen == ["counted 1"]


async def test_what_the_server_ended_is_told_as_the_server_tells_it(shop: ToolServer, site: Site) -> None:
    async with perdure.connect(url_of(site)) as client:
        call = asyncio.create_task(client.call_tool("wait", {"gate": "g"}))
        await until(lambda: "waiting at g" in shop.seen)
        await end(site, client.session_id)
        with pytest.raises(MCPError, match="deleted by its client"):
            await call


async def test_the_standalone_stream_is_that_of_the_new_session(shop: ToolServer, site: Site) -> None:
    inbox = Inbox()
    async with perdure.connect(url_of(site), message_handler=inbox) as client:
        await end(site, client.session_id)
        await client.call_tool("announce", {"n": 2})
        await until(lambda: inbox.notices == ["notice://1", "notice://2"])


async def test_subscriptions_and_the_log_level_are_asked_for_again() -> None:
    shop = ToolServer(logs=True, subscribes=True)
    async with serve(shop.server, retry=0.02) as site, perdure.connect(url_of(site)) as client:
        requests: list[types.ClientRequest] = [
            types.SetLevelRequest(params=types.SetLevelRequestParams(level="error")),
            types.SubscribeRequest(params=types.SubscribeRequestParams(uri="a://1")),
            types.SubscribeRequest(params=types.SubscribeRequestParams(uri="a://2")),
            types.UnsubscribeRequest(params=types.UnsubscribeRequestParams(uri="a://2")),
        ]
        for request in requests:
            await client.session.send_request(request, types.EmptyResult)
        await end(site, client.session_id)
        await client.list_tools()
        assert shop.levels == ["error", "error"]
        assert shop.subscribing == ["+a://1", "+a://2", "-a://2", "+a://1"]


async def test_a_session_that_the_server_offers_in_its_404_is_left_to_expire(shop: ToolServer, tmp_path: Path) -> None:
    """That is for clients which cannot begin anew: ours does, without an id (B5), and knows what was agreed on."""
    path = tmp_path / "agent.json"
    async with serve(shop.server, retry=0.02, recover="reissue") as site:
        async with perdure.connect(url_of(site), state=path) as client:
            first = client.session_id
        assert first is not None
        path.write_text(path.read_text().replace(first, "a-session-that-was-forgotten"))
        async with perdure.connect(url_of(site), state=path) as client:
            assert text(await client.call_tool("count", {"n": 2})) == "counted to 2"
            assert client.session_id not in (None, first, "a-session-that-was-forgotten")
        assert shop.seen == ["counted 2"]
