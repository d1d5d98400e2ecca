"""An HTTP client and an ASGI application in one event loop, without a socket between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.http.event_stream import BREAK_OFF
from perdure.serve import in_process
from perdure.serve.in_process import MAX_UNREAD, InProcess

pytestmark = pytest.mark.anyio

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def part(body: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost", timeout=None) as client:
        yield client


async def test_a_request_and_its_response() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        body = (await receive())["body"]
        await send({**START, "status": 201})
        await send(part(body.upper(), last=True))
        assert (await receive())["type"] == "http.disconnect", "the response is complete"

    async with client_of(app) as client:
        response = await client.post("/a%20b/mcp?x=1", content=b"bread", headers={"X-Of": "rye"})
    assert (response.status_code, response.text, response.headers["content-type"]) == (201, "BREAD", "text/plain")
    [scope] = seen
    assert (scope["method"], scope["path"], scope["raw_path"]) == ("POST", "/a b/mcp", b"/a%20b/mcp")
    assert (scope["query_string"], dict(scope["headers"])[b"x-of"]) == (b"x=1", b"rye")
    assert dict(scope["headers"])[b"host"] == b"localhost"


async def test_a_stream_is_read_as_it_is_written_and_its_writer_waits_for_the_reader() -> None:
    written: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for number in range(4):
            await send(part(bytes(MAX_UNREAD)))
            written.append(number)
        await send(part(b"", last=True))

    async with client_of(app) as client, client.stream("GET", "/") as response:
        assert response.status_code == 200
        for _ in range(20):
            await asyncio.sleep(0)
        assert written == [0], "one more waits to be taken"
        assert sum([len(chunk) async for chunk in response.aiter_raw()]) == 4 * MAX_UNREAD
        assert written == [0, 1, 2, 3]


@pytest.mark.parametrize("when", ["before the head", "in the body", "while it writes"])
async def test_a_client_that_leaves_is_told_to_the_application(when: str) -> None:
    left, begun = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        begun.set()
        if when != "before the head":
            await send(START)
            await send(part(b"first"))
        if when == "while it writes":
            for _ in range(3):
                await send(part(bytes(MAX_UNREAD)))
        assert (await receive())["type"] == "http.disconnect"
        await send(part(b"for nobody"))
        left.set()

    async with client_of(app) as client:
        if when == "before the head":
            asking = asyncio.create_task(client.get("/"))
            await begun.wait()
            asking.cancel()
        else:
            async with client.stream("GET", "/") as response:
                assert (await anext(response.aiter_raw())).startswith(b"first")
        await left.wait()


@pytest.mark.parametrize("how", ["fails", "returns", "breaks off"])
async def test_a_response_that_is_not_complete_is_an_error(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send(START)
            await send(part(b"half"))
        if how == "fails":
            raise ValueError("no flour")
        if how == "breaks off":
            scope[BREAK_OFF]()
            assert (await receive())["type"] == "http.request"
            assert (await receive())["type"] == "http.disconnect"

    async with client_of(app) as client:
        for path in ("/", "/late"):
            with pytest.raises(httpx2.RemoteProtocolError):
                await client.get(path)
    assert ("no flour" in caplog.text) == (how == "fails")


async def test_requests_end_when_the_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each learns that its client has left; one that does not care is cancelled."""
    monkeypatch.setattr(in_process, "STOP_SECONDS", 0.01)
    ends: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(part(b"."))
        if scope["path"] == "/leaves":
            ends.append((await receive())["type"])
            return
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    client = httpx2.AsyncClient(transport=InProcess(app), base_url="http://localhost", timeout=None)
    for path in ("/leaves", "/stays"):
        request = client.build_request("GET", path)
        assert (await client.send(request, stream=True)).status_code == 200
    await client.aclose()
    assert ends == ["http.disconnect", "cancelled"]
