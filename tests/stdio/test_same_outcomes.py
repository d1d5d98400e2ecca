"""The bridge and `perdure.connect` are two adapters over one engine: a response means the same to both (promise 3)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError
from starlette.responses import Response

import perdure
from tests.client.odd_server import BRIEF, Odd
from tests.remote.test_call import RESPONSES, outcome
from tests.stdio.stdio_bridges import a_host
from tests.support.servers.in_process import under_uvicorn

pytestmark = pytest.mark.anyio


async def test_every_response_to_a_tools_call_has_one_outcome_in_both_clients(folder: Path) -> None:
    odd = Odd()
    odd.calls = {case: made for case, (made, _, _) in RESPONSES.items()}
    expected = {case: of_call for case, (_, of_call, _) in RESPONSES.items()}
    async with (
        under_uvicorn(odd.app, complaint=".*") as port,
        a_host(folder, f"http://127.0.0.1:{port}/mcp") as host,
        asyncio.timeout(60),
        perdure.connect(host.url, patience=BRIEF) as client,
    ):
        bridge = await host.session("--no-resume", "--patience", "500ms")

        async def by_connect(case: str) -> dict[str, Any]:
            with pytest.raises(MCPError) as raised:
                await client.call_tool(case)
            return raised.value.error.model_dump()

        seen = {case: outcome((await bridge.answer(bridge.begin_call(case)))["error"]) for case in RESPONSES}
        assert seen == expected
        assert {case: outcome(await by_connect(case)) for case in RESPONSES} == expected


async def test_a_session_that_is_lost_while_a_call_runs_has_one_outcome_in_both_clients(folder: Path) -> None:
    """The call ran, and its answer is out of reach with its session."""
    odd = Odd(lost=lambda key: Response(b"id: a\nretry: 1\ndata:\n\n", media_type="text/event-stream"))
    odd.get = lambda request: Response(status_code=404 if "last-event-id" in request.headers else 405)
    async with (
        under_uvicorn(odd.app, complaint=".*") as port,
        a_host(folder, f"http://127.0.0.1:{port}/mcp") as host,
        asyncio.timeout(30),
        perdure.connect(host.url, patience=BRIEF) as client,
    ):
        bridge = await host.session("--no-resume")
        answer = await bridge.answer(bridge.begin_call("lost"))
        with pytest.raises(perdure.OutcomeUnknown) as unknown:
            await client.call_tool("lost")
        data = unknown.value.error.data
        assert (answer["error"]["code"], answer["error"]["data"]) == (unknown.value.error.code, data)
        assert (data["outcome"], data["reason"], len(odd.asked)) == ("unknown", "its session is gone", 2)
