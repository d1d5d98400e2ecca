"""Servers that answer nonsense: the request that met it gets an error, the client goes on, nothing hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from mcp.shared.exceptions import MCPError
from starlette.responses import Response, StreamingResponse

import perdure
from tests.client.conftest import Inbox, text
from tests.client.odd_server import BRIEF, Odd, event, events, good, odd_client, result
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio


def endless(key: object) -> Response:
    async def frames() -> AsyncIterator[bytes]:
        yield b"data: "
        while True:
            yield b"x" * 1_000_000
            await asyncio.sleep(0)

    return StreamingResponse(frames(), media_type="text/event-stream")


ODDITIES: dict[str, Callable[[object], Response]] = {
    "no type": lambda key: Response(b"{}"),
    "no JSON": lambda key: Response("{", media_type="application/json"),
    "a list": lambda key: Response("[]", media_type="application/json"),
    "a request": lambda key: Response(b'{"jsonrpc":"2.0","id":1,"method":"ping"}', media_type="application/json"),
    "no JSON in an event": lambda key: events(event(b"{")),
    "another's answer": lambda key: Response(good("another"), media_type="application/json"),
    "without end": endless,
    "a wrong result": lambda key: events(event(result(key, content="no list"))),
    "400 with a list": lambda key: Response("[1]", status_code=400, media_type="application/json"),
    "503 for ever": lambda key: Response(status_code=503, headers={"retry-after": "0"}),
    "a redirect to itself": lambda key: Response(status_code=307, headers={"location": "/mcp"}),
    "positions that lead nowhere": lambda key: events(event(b"", at="1")),
}
"""The server may have taken the first seven. `tests/remote/test_call.py` has those that the table is about."""


async def test_an_odd_answer_is_an_error_of_one_call() -> None:
    odd = Odd(good=lambda key: events(event(good(key))), **ODDITIES)
    async with odd_client(odd, read_timeout_seconds=2) as client:
        for number, oddity in enumerate(ODDITIES):
            odd.asked.clear()
            with pytest.raises((MCPError, ValueError)) as raised:
                await client.call_tool(oddity)
            assert isinstance(raised.value, perdure.OutcomeUnknown) == (number < 7), (oddity, raised.value)
            assert len(odd.asked) == 1 or oddity in ("503 for ever", "a redirect to itself")
            assert text(await client.call_tool("good")) == "fine"


async def test_bytes_cut_anywhere_comments_and_unknown_events_are_no_trouble() -> None:
    odd = Odd()

    def call(key: object) -> Response:
        whole = b": hello\r\n\r\nevent: other\ndata: {}\n\nid: 7\nretry: 1\ndata:\n\n" + event(good(key), at="8")

        async def bytes_one_by_one() -> AsyncIterator[bytes]:
            for byte in whole:
                yield bytes([byte])

        return StreamingResponse(bytes_one_by_one(), media_type="text/event-stream; charset=utf-8")

    odd.calls = {"good": call}
    async with (
        under_uvicorn(odd.app, complaint=".*") as port,
        perdure.connect(f"http://127.0.0.1:{port}/mcp", patience=BRIEF) as client,
    ):
        assert text(await client.call_tool("good")) == "fine"


async def test_notifications_with_odd_params_are_handed_on_or_dropped_and_the_call_ends() -> None:
    odd, inbox = Odd(), Inbox()
    notes: list[dict[str, object]] = [
        {"method": "notifications/progress", "params": {"progressToken": [1], "progress": 1}},
        {"method": "notifications/progress", "params": {"progressToken": {}, "progress": "x"}},
        {"method": "notifications/perdure/gap", "params": {"from": "a", "to": None}},
        {"method": "notifications/cancelled", "params": {"requestId": [2]}},
        {"method": "notifications/unheard-of"},
    ]
    odd.calls = {
        "chatty": lambda key: events(
            *(event(json.dumps({"jsonrpc": "2.0", **note}).encode()) for note in notes), event(good(key))
        )
    }
    async with (
        under_uvicorn(odd.app, complaint=".*") as port,
        perdure.connect(f"http://127.0.0.1:{port}/mcp", patience=BRIEF, message_handler=inbox) as client,
    ):
        assert text(await client.call_tool("chatty")) == "fine"
        await until(lambda: any(isinstance(error, perdure.EventsLost) for error in inbox.errors))
