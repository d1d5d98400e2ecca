"""A new session for one that is gone: whole or not at all, once, whichever request noticed it (B5, H8, H6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from mcp.shared.exceptions import MCPError
from starlette.responses import Response

import perdure
from tests.client.conftest import text
from tests.client.odd_server import BRIEF, Odd, event, events, flow, good, json_of, odd_client, result, silent
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio


def fine(key: object) -> Response:
    return events(event(good(key)))


class Slow(Odd):
    """Takes its time over `initialized` of every session but the first."""

    def __init__(self) -> None:
        super().__init__(good=fine)
        self.may_go_on = asyncio.Event()
        self.before = self.wait

    async def wait(self, session: str, method: str) -> None:
        if method == "notifications/initialized" and session != "odd-1":
            await self.may_go_on.wait()


async def test_a_caller_that_gives_up_while_a_session_is_renewed_does_not_leave_it_half_made() -> None:
    odd = Slow()
    odd.get = lambda request: silent()
    async with odd_client(odd) as client:
        await until(lambda: ("odd-1", "GET") in odd.heard)
        odd.ended.add("odd-1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.call_tool("good")
        odd.may_go_on.set()
        assert text(await client.call_tool("good")) == "fine"
        await until(lambda: ("odd-2", "GET") in odd.heard)
        assert odd.sessions == 2


async def test_nothing_is_sent_in_a_new_session_before_it_is_initialized() -> None:
    """L25: a call made in the middle of the renewal waits for its end."""
    odd = Slow()
    async with odd_client(odd) as client, asyncio.TaskGroup() as group:
        odd.ended.add("odd-1")
        first = group.create_task(client.call_tool("good"))
        await until(lambda: ("odd-2", "notifications/initialized") in odd.heard)
        second = group.create_task(client.call_tool("good"))
        await anyio.wait_all_tasks_blocked()
        assert [what for what in odd.heard if what[1] == "tools/call"] == [("odd-1", "tools/call")]
        odd.may_go_on.set()
        assert (text(await first), text(await second)) == ("fine", "fine")
        methods = [method for session, method in odd.heard if session == "odd-2"]
        assert methods[0] == "notifications/initialized"
        assert odd.sessions == 2


async def test_a_server_that_stays_busy_is_unreachable_and_the_call_did_not_run() -> None:
    odd = Odd(good=fine)
    async with odd_client(odd) as client:
        odd.initialize = lambda key: Response(status_code=503)
        odd.ended.add("odd-1")
        with pytest.raises(perdure.Unreachable):
            await client.call_tool("good")
        assert odd.asked == []


async def test_a_new_handshake_that_cannot_be_read_is_refused_and_the_next_one_may_be_better() -> None:
    odd = Odd(good=fine)
    async with odd_client(odd) as client:
        welcome = odd.initialize
        odd.initialize = lambda key: json_of(result(key, protocolVersion="1999-01-01", capabilities=7))
        odd.ended.add("odd-1")
        with pytest.raises(MCPError, match="no new one"):
            await client.call_tool("good")
        odd.initialize = welcome
        assert text(await client.call_tool("good")) == "fine"
        assert client.session_id == "odd-2"


async def test_a_server_that_answers_404_to_every_get_has_no_such_stream() -> None:
    """Many servers have no route for it. A session that has just begun is not gone."""
    odd = Odd(good=fine)
    odd.get = lambda request: Response(status_code=404)
    async with odd_client(odd) as client:
        await until(lambda: (client.session_id, "GET") in odd.heard)
        for _ in range(3):
            assert text(await client.call_tool("good")) == "fine"
        assert (odd.sessions, [what for what in odd.heard if what[1] == "GET"]) == (1, [("odd-1", "GET")])


async def test_an_earlier_session_that_is_gone_is_noticed_by_the_stream_that_listens(tmp_path: Path) -> None:
    """A program that makes no call at all hears what the server has to say."""
    odd, path = Odd(), tmp_path / "agent.json"
    odd.get = lambda request: silent()
    async with under_uvicorn(odd.app, complaint=".*") as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with perdure.connect(url, state=path, patience=BRIEF) as client:
            await until(lambda: ("odd-1", "GET") in odd.heard)
        odd.ended.add("odd-1")
        async with perdure.connect(url, state=path, patience=BRIEF) as client:
            await until(lambda: ("odd-2", "GET") in odd.heard)
            assert client.session_id == "odd-2"


async def test_the_stream_of_the_old_session_is_let_go() -> None:
    odd = Odd(good=fine)
    open_streams: list[int] = []

    def get(request: object) -> Response:
        open_streams.append(1)

        async def frames() -> AsyncIterator[bytes]:
            try:
                yield b": here\n\n"
                await asyncio.Event().wait()
            finally:
                open_streams.pop()

        return flow(frames())

    odd.get = get
    async with odd_client(odd) as client:
        await until(lambda: len(open_streams) == 1)
        odd.ended.add("odd-1")
        await client.call_tool("good")
        await until(lambda: ("odd-2", "GET") in odd.heard)
        await until(lambda: len(open_streams) == 1)
