"""Stock clients that were reloaded hear of the call that they lost, and cancel it (R5, A32)."""

from __future__ import annotations

import asyncio
import json
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import mcp_types as types
import pytest
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.clients.node_clients import HERE
from tests.support.clients.wire_client import Peer, Wire
from tests.support.processes.node_programs import program
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

CANCELLED = -32800


@asynccontextmanager
async def lost_call(shop: ToolServer) -> AsyncIterator[tuple[Site, Peer, Wire]]:
    """A session with a running call, of a client that says of itself as little as a stock client."""
    async with serve(shop.server, retry=0.1) as site:
        peer = await site.join(capabilities={})
        call = await peer.call("wait", id=3, gate="never")
        await call.event()
        yield site, peer, call


async def was_cancelled(shop: ToolServer, peer: Peer, call: Wire) -> None:
    await until(lambda: shop.seen == ["waiting at never", "cancelled at never"])
    [answer] = await (await peer.get(call.last_id)).rest()
    assert answer["error"]["code"] == CANCELLED


async def test_a_python_client_hears_of_it_in_a_log_message(shop: ToolServer) -> None:
    """It drops notifications that it does not know; the sentence has all that it needs to cancel."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        heard.put_nowait(str(params.data))

    async with lost_call(shop) as (site, peer, call):
        headers = {"x-mcp-reconnect-session": peer.session}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=None) as http,
            streamable_http_client(site.url, http_client=http, terminate_on_close=False) as (read, write),
            ClientSession(read, write, logging_callback=on_log) as session,
        ):
            await session.initialize()
            assert site.app.counters.reattaches == 1
            name = re.search(r"still runs \(cancel it as '(.*)'\)", await heard.get())
            assert name is not None
            params = types.CancelledNotificationParams(request_id=name[1])
            await session.send_notification(types.CancelledNotification(params=params))
            assert "call 1:3 (tools/call) has ended" in await heard.get()
        await was_cancelled(shop, peer, call)


@pytest.fixture
def shop() -> ToolServer:
    return ToolServer(logs=True)


@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_typescript_client_hears_of_it_in_the_notification(
    shop: ToolServer, version: str, packages: None
) -> None:
    async with lost_call(shop) as (site, peer, call):
        script = [str(program("node")), "reloaded.mjs", version, site.url, peer.session]
        process = await asyncio.create_subprocess_exec(*script, cwd=HERE, stdout=PIPE)
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        heard: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
        told = [said["params"] for said in heard if said.get("method") == "notifications/perdure/orphan"]
        assert [(params["call"], params["state"]) for params in told] == [("1:3", "running"), ("1:3", "ended")], heard
        assert [said for said in heard if "error" in said] == []
        assert site.app.counters.reattaches == 1
        await was_cancelled(shop, peer, call)
