"""What is answered, or not, while the client leaves its block; and afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError
from starlette.responses import Response

import perdure
from tests.client.conftest import text
from tests.client.odd_server import BRIEF, Odd, event, flow, good
from tests.support.proxies.cutting_proxy import CuttingProxy
from tests.support.servers.in_process import under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


def calls_in(path: Path) -> list[str]:
    return [call["params"]["name"] for call in json.loads(path.read_bytes())["calls"].values()]


async def test_an_answer_that_comes_when_nobody_listens_any_more_is_left_for_the_next_process(tmp_path: Path) -> None:
    """The block is left while a last notification is on its way: the SDK's client has gone, the call is still read."""
    path, gate, told = tmp_path / "agent.json", asyncio.Event(), asyncio.Event()
    odd = Odd()

    def slow(key: object) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            yield b"id: a\ndata:\n\n"
            await gate.wait()
            yield event(good(key), at="b")

        return flow(frames())

    async def hold(session: str, method: str) -> None:
        if method == "notifications/roots/list_changed":
            gate.set()
            await asyncio.sleep(0.3)
            told.set()

    odd.calls, odd.before = {"slow": slow}, hold
    async with under_uvicorn(odd.app, complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with perdure.connect(url, state=path, patience=BRIEF) as client:
            call = asyncio.create_task(client.call_tool("slow"))
            await until(lambda: calls_in(path) == ["slow"] and b'"position":"a"' in path.read_bytes())
            await client.session.send_notification(types.RootsListChangedNotification())
        with pytest.raises(MCPError):
            await call
        assert told.is_set()
        assert calls_in(path) == ["slow"]


async def test_a_result_that_is_taken_after_the_block_writes_nothing(tmp_path: Path) -> None:
    """The state may be another client's by then; ids would repeat (R12)."""
    path, odd = tmp_path / "agent.json", Odd()
    odd.calls = {"slow": lambda key: flow(_primed())}
    async with under_uvicorn(odd.app, complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with perdure.connect(url, state=path, patience=BRIEF) as client:
            running = asyncio.create_task(client.call_tool("slow"))
            await until(lambda: b'"position":"a"' in path.read_bytes())
        with pytest.raises(MCPError):
            await running
        key = str(odd.asked[0])
        odd.resumed = [event(good(key), at="b")]
        async with perdure.connect(url, state=path, patience=BRIEF) as client:
            (call,) = client.pending()
            await until(lambda: call.is_answered)
        async with perdure.connect(url, state=path, patience=BRIEF):
            assert json.loads(path.read_bytes())["start"] == 3
            assert text(await call) == "fine"
            assert json.loads(path.read_bytes())["start"] == 3


async def _primed() -> AsyncIterator[bytes]:
    yield b"id: a\nretry: 5\ndata:\n\n"
    await asyncio.Event().wait()


async def test_a_connection_that_is_given_up_while_it_is_made_is_left_at_once() -> None:
    odd, asked, left = Odd(), asyncio.Event(), asyncio.Event()

    async def hold(session: str, method: str) -> None:
        asked.set()
        await left.wait()

    odd.before = hold
    async with under_uvicorn(odd.app, complaint=".*") as port:

        async def join() -> None:
            async with perdure.connect(f"http://127.0.0.1:{port}/mcp"):
                raise AssertionError("it does not answer")

        joining = asyncio.create_task(join())
        await asked.wait()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        left.set()


async def test_leaving_while_the_server_is_away_takes_no_time(shop: ToolServer, proxy: CuttingProxy) -> None:
    """A call is on its way back, another waits to be sent, and a cancellation cannot be sent."""
    clock = asyncio.get_running_loop().time
    async with perdure.connect(proxy.url) as client:
        calls: list[asyncio.Task[object]] = [
            asyncio.create_task(client.call_tool("wait", {"gate": "g"})) for _ in range(2)
        ]
        await until(lambda: shop.seen == ["waiting at g"] * 2)
        proxy.refuse()
        proxy.cut()
        calls.append(asyncio.create_task(client.list_tools()))
        calls[0].cancel()
        accepted = proxy.accepted
        await until(lambda: proxy.accepted >= accepted + 3)
        left = clock()
    assert clock() - left < 60  # the client's patience is 300 s
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    assert [str(end) for end in ends[1:]] == ["Connection closed"] * 2
