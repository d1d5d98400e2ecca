"""Tools that ask in the middle of a call, with stock clients of 2026-07-28 that know neither tasks nor Perdure.

Each round of a call goes to the other one of two processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Client as FastClient
from mcp_types import TextContent

from tests.clients.balancer import Balancer, balancer
from tests.clients.node_clients import node_client
from tests.clients.python_clients import python_client
from tests.clients.stock_client import MODEL_SAYS, USER_SAYS
from tests.support.processes.node_programs import node_modules
from tests.support.processes.serving import serving

pytestmark = pytest.mark.anyio

Call = Callable[[str, dict[str, Any]], Awaitable[str]]

STORIES: list[tuple[str, dict[str, Any], str, int]] = [
    ("ask_each", {"questions": ["one?", "two?"]}, f"{USER_SAYS} {USER_SAYS}", 2),
    ("ask_all", {"questions": ["one?", "two?"]}, f"{USER_SAYS} {USER_SAYS}", 2),
    ("sample", {"prompt": "Write!"}, MODEL_SAYS, 1),
]
"""A tool, what comes of it, and how often its client is asked."""


@asynccontextmanager
async def python(url: str, asked: list[str]) -> AsyncIterator[Call]:
    async with python_client(url, mode="auto") as client:
        assert client.protocol == "2026-07-28"
        client.asked = asked
        yield lambda tool, arguments: client.result(tool, **arguments)


@asynccontextmanager
async def typescript(url: str, asked: list[str]) -> AsyncIterator[Call]:
    node_modules(Path(__file__).parent)
    async with node_client("ts2.mjs", url, mode="2026-07-28") as client:
        assert client.protocol == "2026-07-28"
        client.asked = asked
        yield lambda tool, arguments: client.result(tool, **arguments)


@asynccontextmanager
async def fastmcp(url: str, asked: list[str]) -> AsyncIterator[Call]:
    async def elicit(message: str, response_type: Any, params: Any, context: Any) -> Any:
        asked.append(message)
        return {"answer": USER_SAYS}

    async def sample(messages: Any, params: Any, context: Any) -> str:
        asked.append("model")
        return MODEL_SAYS

    async with FastClient(url, elicitation_handler=elicit, sampling_handler=sample) as client:

        async def call(tool: str, arguments: dict[str, Any]) -> str:
            [content, *_] = (await client.call_tool(tool, arguments)).content
            assert isinstance(content, TextContent)
            return content.text

        yield call


@pytest.mark.parametrize(
    ("server", "tools"), [("asking_tools", 3), ("fastmcp_asking_tools", 2)]
)  # FastMCP has no word for models
async def test_stock_clients_answer_what_tools_ask_at_any_node(server: str, tools: int, tmp_path: Path) -> None:
    """Each question reaches the user once."""
    target, store = f"tests.support.servers.{server}:server", f"sqlite:{tmp_path / 'log.db'}"
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(serving(target, "--store", store, "--eras", "both")) for _ in range(2)]
        between = await stack.enter_async_context(balancer(*(node.port for node in nodes)))
        for connect in (python, typescript, fastmcp):
            asked: list[str] = []
            async with connect(between.url, asked) as call:
                # FastMCP's client takes tasks where its extension is installed, and has no answers of a model in them.
                for tool, arguments, outcome, questions in STORIES[: 2 if connect is fastmcp else tools]:
                    del asked[:]
                    assert await call(tool, arguments) == outcome, (connect, tool)
                    assert len(asked) == questions, (connect, tool, asked)
        assert alternated(between)


def alternated(between: Balancer) -> bool:
    calls = between.passed["tools/call"]
    return calls.total() >= 2 * 5 and max(calls.values()) - min(calls.values()) <= 1
