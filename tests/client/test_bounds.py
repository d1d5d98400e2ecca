"""Whatever a server can make a client keep, or wait for, has a limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx2
import mcp_types as types
import pytest
from mcp.client.session import ClientRequestContext
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import perdure
from perdure._core.reconnect import FREE_POLLS, MOST_ASKED, Course, Patience, delay
from perdure._core.sse import MAX_EVENT_BYTES
from perdure.client import incoming
from perdure.client.incoming import MAX_ASK_BYTES, MAX_ASKS
from perdure.remote.endpoint import HttpResponse
from tests.client.conftest import text
from tests.client.odd_server import Odd, event, events, flow, good, odd_client
from tests.support.servers.in_process import Site, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def test_a_body_without_end_is_given_up() -> None:
    odd, sent = Odd(), 0

    def endless(key: object) -> Response:
        async def body() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                yield b" " * 1_000_000
                sent += 1_000_000
                await asyncio.sleep(0)

        return StreamingResponse(body(), media_type="application/json")

    odd.calls = {"endless": endless, "good": lambda key: events(event(good(key)))}
    async with odd_client(odd) as client:
        with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "limit" in error.reason):
            await client.call_tool("endless")
        assert sent < 4 * MAX_EVENT_BYTES
        assert text(await client.call_tool("good")) == "fine"


async def test_comments_without_end_do_not_pile_up_and_the_answer_is_found_behind_them() -> None:
    odd = Odd()

    def chatty(key: object) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield (b": " + b"x" * 1_000 + b"\n") * 1_000
            yield event(good(key))

        return flow(frames())

    odd.calls = {"chatty": chatty}
    async with odd_client(odd) as client:
        assert text(await client.call_tool("chatty")) == "fine"


@pytest.mark.parametrize(
    ("size", "remembered"), [(10, 1), (MAX_ASK_BYTES, 0)], ids=["small ones", "large ones are not written down"]
)
async def test_questions_have_a_limit_and_its_answer_is_an_error(size: int, remembered: int, tmp_path: Path) -> None:
    odd, answer, path = Odd(), asyncio.Event(), tmp_path / "agent.json"
    asked = 0

    async def think(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        nonlocal asked
        asked += 1
        await answer.wait()
        return types.ElicitResult(action="decline")

    def nosy(key: object) -> Response:
        schema = {"type": "object", "properties": {}}
        asks = [
            {
                "jsonrpc": "2.0",
                "id": f"q{n}",
                "method": "elicitation/create",
                "params": {"message": "x" * size, "requestedSchema": schema},
            }
            for n in range(MAX_ASKS + 5)
        ]

        async def frames() -> AsyncIterator[bytes]:
            for ask in asks:
                yield event(json.dumps(ask).encode())
            await answer.wait()
            yield event(good(key))

        return flow(frames())

    odd.calls = {"nosy": nosy}
    async with odd_client(odd, elicitation_callback=think, state=path) as client:
        call = asyncio.create_task(client.call_tool("nosy"))
        await until(lambda: asked == MAX_ASKS and len(odd.replies) == 5)
        assert {reply["error"]["code"] for reply in odd.replies} == {types.INTERNAL_ERROR}
        kept = json.loads(path.read_bytes())["asks"].values()
        assert sum(1 for ask in kept if ask["message"]) == remembered * MAX_ASKS
        answer.set()
        assert text(await call) == "fine"


async def test_slow_callbacks_slow_the_server_down(
    shop: ToolServer, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not pile up: the stream is not read, the call that feeds it waits, and nothing is lost."""
    monkeypatch.setattr(incoming, "MAX_CALLBACKS", 50)
    release, running, most, seen = asyncio.Event(), 0, 0, 0

    async def slow(progress: float, total: float | None, message: str | None) -> None:
        nonlocal running, most, seen
        running, seen = running + 1, seen + 1
        most = max(most, running)
        await release.wait()
        running -= 1

    async with perdure.connect(f"http://127.0.0.1:{site.port}/mcp") as client:
        call = asyncio.create_task(client.call_tool("flood", {"n": 2_500, "size": 4_000}, None, slow))
        await until(lambda: running >= 50)
        sent = -1
        while sent != shop.sent:
            sent = shop.sent
            await asyncio.sleep(0.3)
        assert most <= 52
        assert sent < 2_500
        release.set()
        assert text(await call) == "flooded 2500"
        await until(lambda: seen == 2_500)


@pytest.mark.parametrize("position", ["ä✓", "\x01", "x" * 2_000], ids=["beyond ASCII", "control", "long"])
async def test_a_position_is_sent_back_as_it_came_or_not_at_all(position: str) -> None:
    odd, sent = Odd(), list[bytes]()

    def slow(key: object) -> Response:
        odd.resumed = [event(good(key))]
        return events(f"id: {position}\nretry: 1\ndata:\n\n".encode())

    resume = odd.get

    def get(request: Request) -> Response | Awaitable[Response]:
        sent.extend(value for name, value in request.headers.raw if name == b"last-event-id")
        return resume(request)

    odd.calls, odd.get = {"slow": slow}, get
    async with odd_client(odd) as client:
        if position.isprintable() and len(position) < 100:
            assert text(await client.call_tool("slow")) == "fine"
            assert sent == [position.encode()]
        else:
            with pytest.raises(perdure.OutcomeUnknown):
                await client.call_tool("slow")
            assert sent == []


async def test_a_server_that_wants_us_back_at_once_for_ever_gets_us_at_our_own_pace() -> None:
    """`retry: 0` and nothing to say: a loop without a pause."""
    odd = Odd()
    odd.calls = {"idle": lambda key: events(b"id: a\nretry: 0\ndata:\n\n")}
    patience = perdure.Patience(first_delay=0.2, max_delay=0.2)
    async with odd_client(odd, patience=patience) as client:
        with pytest.raises(MCPError, match="timed out"):
            await client.call_tool("idle", read_timeout_seconds=1.0)
    assert FREE_POLLS <= len([what for what in odd.heard if what[1] == "GET"]) < FREE_POLLS + 15


def test_what_a_server_asks_for_has_a_limit() -> None:
    for course in (Course().opened().told(1e12), Course().failed(0.0, at_least=1e12)):
        assert delay(course, Patience(), now=0.0, chance=0.0) == MOST_ASKED


def retry_after(headers: list[tuple[bytes, bytes]]) -> float | None:
    return HttpResponse(httpx2.Response(503, headers=headers)).retry_after


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("9" * 400, 999_999_999.0),
        ("", None),
        ("-3", None),
        ("soon", None),
        ("²", None),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
    ],
)
def test_retry_after_in_seconds_or_as_a_date_that_has_passed(value: str, seconds: float | None) -> None:
    assert retry_after([(b"retry-after", value.encode())]) == seconds


def test_a_date_is_read_by_the_servers_own_clock_or_else_by_ours() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 30 < (retry_after([(b"retry-after", later.encode())]) or 0) <= 90
    headers = [(b"date", b"Mon, 01 Jan 2001 00:00:00 GMT"), (b"retry-after", b"Mon, 01 Jan 2001 00:02:00 GMT")]
    assert retry_after(headers) == 120.0
