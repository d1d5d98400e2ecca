"""Calls of before, in the hands of their next owner: notifications, results, errors, cancelling (R12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

import perdure
from tests.client.conftest import Inbox, Progress, text
from tests.support.servers.in_process import Site, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

Left = Callable[..., AbstractAsyncContextManager[perdure.Client]]


@pytest.fixture
def left(shop: ToolServer, site: Site, tmp_path: Path) -> Left:
    """A client that comes after one that left its block while a call ran: it cancelled nothing, so the call goes on."""
    url, path = f"http://127.0.0.1:{site.port}/mcp", tmp_path / "agent.json"

    @asynccontextmanager
    async def left(
        tool: str, arguments: dict[str, object], *, when: Callable[[], object], **options: Any
    ) -> AsyncIterator[perdure.Client]:
        async with perdure.connect(url, state=path) as before:
            call = asyncio.create_task(before.call_tool(tool, dict(arguments), None, Progress()))
            await until(when)
            await until(lambda: b'"position":"c' in path.read_bytes())
        with pytest.raises(MCPError, match="Connection closed"):
            await call
        async with perdure.connect(url, state=path, **options) as client:
            yield client

    return left


async def test_notifications_first_then_the_result(shop: ToolServer, left: Left) -> None:
    inbox = Inbox()
    arguments = {"n": 6, "gate": "g", "pauses": [3]}
    async with left("count", arguments, when=lambda: "g/3" in shop.gates, message_handler=inbox) as client:
        (call,) = client.pending()
        assert (call.tool, call.arguments, call.is_answered) == ("count", arguments, False)
        assert repr(call) == f"PendingCall(tool='count', arguments={arguments})"
        shop.open("g/3")
        notes = [note async for note in call]
        result = await call
        progress = [note.params.progress for note in notes if isinstance(note, types.ProgressNotification)]
        assert progress in [list(range(first, 7)) for first in (1, 2, 3, 4)]  # as far as the one before had read
        assert text(result) == "counted to 6"
        assert client.pending() == []
        assert await call == result


async def test_what_was_read_but_not_looked_at_is_there_for_the_next_process(
    shop: ToolServer, site: Site, left: Left, tmp_path: Path
) -> None:
    """At least once: only what the program has dealt with is before it."""
    arguments = {"n": 9, "gate": "g", "pauses": [3]}
    async with left("count", arguments, when=lambda: "g/3" in shop.gates) as client:
        (call,) = client.pending()
        shop.open("g/3")
        await until(lambda: call.is_answered)
        async for note in call:
            if isinstance(note, types.ProgressNotification) and note.params.progress == 5:
                break  # in the middle of dealing with it
    async with perdure.connect(f"http://127.0.0.1:{site.port}/mcp", state=tmp_path / "agent.json") as client:
        (call,) = client.pending()
        seen = [note.params.progress async for note in call if isinstance(note, types.ProgressNotification)]
        assert seen == [5, 6, 7, 8, 9]
        assert text(await call) == "counted to 9"


async def test_an_error_of_the_tool_is_raised(shop: ToolServer, left: Left) -> None:
    async with left("wait", {"gate": "g"}, when=lambda: "waiting at g" in shop.seen) as client:
        (call,) = client.pending()
        await call.cancel()
        with pytest.raises(MCPError, match="cancelled") as cancelled:
            await call
        assert cancelled.value.code == -32800
        await until(lambda: "cancelled at g" in shop.seen)
        assert client.pending() == []


async def test_who_still_waits_when_the_client_leaves_is_told(shop: ToolServer, left: Left) -> None:
    async with left("wait", {"gate": "g"}, when=lambda: "waiting at g" in shop.seen) as client:
        (call,) = client.pending()
        waiting = asyncio.create_task(call.result())
        await asyncio.sleep(0)
    with pytest.raises(MCPError, match="Connection closed"):
        await waiting


async def test_new_calls_and_earlier_ones_do_not_disturb_each_other(shop: ToolServer, left: Left) -> None:
    """Their ids are not the same, though the SDK's client counts from the beginning again."""
    async with left("wait", {"gate": "g"}, when=lambda: "waiting at g" in shop.seen) as client:
        (call,) = client.pending()
        for number in range(1, 6):
            assert text(await client.call_tool("count", {"n": number})) == f"counted to {number}"
        shop.open("g")
        assert text(await call) == "went through g"
