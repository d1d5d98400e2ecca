"""A server that logs and has subscriptions, and hosts that know its address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stdio.stdio_bridges import PATIENCE, Host, HostedBridge, Message, a_host
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

FIRST = "Token file not found (first run or clean slate)"
RESUMED = "Session resumed successfully"
HOST = "perdure: The host is process "
REJECTED = "Broker rejected resume token, starting fresh session"


async def sentences(bridge: HostedBridge, count: int = 1) -> list[str]:
    """Return the sentences of a bridge on stderr, without the one about its host; waits for so many. They are written a
    moment after the fact."""

    def told() -> list[str]:
        return [line.removeprefix("perdure: ") for line in bridge.told() if not line.startswith(HOST)]

    async with asyncio.timeout(PATIENCE):
        await until(lambda: len(told()) >= count)
    return told()


@dataclass(frozen=True, kw_only=True)
class ServedHost:
    tool_server: ToolServer
    site: Site
    host: Host

    async def saw(self, what: str, bridge: HostedBridge) -> None:
        """Wait until a tool has seen this; the bridge through which it was called must live that long."""
        try:
            async with asyncio.timeout(PATIENCE):
                await until(lambda: what in self.tool_server.seen)
        except TimeoutError:
            state = "has ended" if bridge.ended else "runs"
            raise AssertionError(f"{what}: not seen; the bridge {state}: {bridge.told()} {bridge.order}") from None

    @property
    def sessions(self) -> list[str]:
        return self.site.app.session_ids()


def noted_calls(hosted: ServedHost) -> list[Message]:
    """The calls in the positions of the only bridge."""
    [positions] = hosted.host.tokens.glob("*/positions-*[0-9]")
    return list(json.loads(positions.read_text())["calls"].values())


@asynccontextmanager
async def serving_host(folder: Path, *, logs: bool = True, **settings: Any) -> AsyncIterator[ServedHost]:
    tool_server = ToolServer(logs=logs, subscribes=True)
    settings.setdefault("retry", 0.05)
    async with serve(tool_server.server, **settings) as site, a_host(folder, site.url) as host:
        yield ServedHost(tool_server=tool_server, site=site, host=host)


async def question(bridge: HostedBridge, count: int = 1) -> Message:
    """The last of so many requests of the server."""
    await bridge.until(lambda: len(bridge.asked()) == count, "a question")
    return bridge.asked()[-1]


def reply(bridge: HostedBridge, asked: Message, answer: str) -> None:
    bridge.say({"jsonrpc": "2.0", "id": asked["id"], "result": {"action": "accept", "content": {"answer": answer}}})
