"""What a page's transport does with a response, in real Chromium: the table of `_core/delivery.py` at work (H6, H8)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.browser.test_reload import whole
from tests.browser.test_servers import INITIALIZED, Front, for_pages
from tests.support.clients.chromium import Browser, Tab
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

ERROR = {"code": -32050, "message": "the server says so"}


class Odd:
    """A server with sessions that answers requests by `answers`, and has no stream to GET."""

    def __init__(self, **answers: Callable[[Any], Response]) -> None:
        self.answers = answers
        self.sessions = 0
        #: Ids of the requests, by method.
        self.asked: dict[str, list[object]] = {}
        self.gets = 0

    async def handle(self, request: Request) -> Response:
        if request.method == "GET":
            self.gets += 1
            return Response(status_code=404)
        message = await request.json()
        if "id" not in message:
            return Response(status_code=202)
        method, key = message["method"], message["id"]
        self.asked.setdefault(method, []).append(key)
        if method == "initialize":
            self.sessions += 1
            headers = {"mcp-session-id": f"odd-{self.sessions}"}
            return JSONResponse({"jsonrpc": "2.0", "id": key, "result": INITIALIZED}, headers=headers)
        return self.answers[message["params"]["name"] if method == "tools/call" else "list"](key)


def failed(status: int, **named: object) -> Response:
    return JSONResponse({"jsonrpc": "2.0", **named, "error": ERROR}, status_code=status)


def found(key: object) -> Response:
    return JSONResponse({"jsonrpc": "2.0", "id": key, "result": {"tools": []}})


@asynccontextmanager
async def a_page(browser: Browser, odd: Odd) -> AsyncIterator[Tab]:
    app = Starlette(routes=[Route("/mcp", odd.handle, methods=["GET", "POST"])])
    async with under_uvicorn(for_pages(app)) as port:
        tab = await browser.open(f"http://127.0.0.1:{port}/mcp")
        await tab.connected()
        yield tab
        await tab.close()


@pytest.mark.parametrize(
    ("answer", "ending"),
    [
        (lambda key: failed(500, id=key), -32050),
        (lambda key: failed(503, id=key), -32050),
        (lambda key: failed(500, id=None), -31001),
        (lambda key: failed(503, id=None), -31001),
        (lambda key: failed(400, id="server-error"), -32050),
        (lambda key: failed(403, id=None), -32050),
        (lambda key: JSONResponse({"jsonrpc": "2.0", "id": None, "result": {}}), -31001),
        (lambda key: Response("<p>", media_type="text/html"), -31001),
        (lambda key: Response(status_code=202), -31001),
        (lambda key: Response(status_code=403), None),
    ],
    ids=[
        *("500 with its error", "503 with its error", "500 with an error without id", "503 with an error without id"),
        *("400 with a server's own id", "403 with an error", "a result without id", "a page", "202", "403"),
    ],
)
async def test_a_call_ends_as_the_response_says(
    browser: Browser, answer: Callable[[Any], Response], ending: int | None
) -> None:
    """H8: it is sent once. Its outcome is unknown, unless the server says what became of it or that it did not run."""
    odd = Odd(pay=answer)
    async with a_page(browser, odd) as tab:
        await tab.call("pay", key="a")
        await tab.saw("error", "a", ending)
        assert len(odd.asked["tools/call"]) == 1


async def test_a_server_that_answers_404_to_every_get_keeps_its_session(browser: Browser) -> None:
    """H6: a stream that was never there is no sign that the session is gone."""
    odd = Odd(list=found)
    async with a_page(browser, odd) as tab:
        await until(lambda: odd.gets == 1)
        assert await tab.eval("lab.tools()") == 0
        assert (await tab.connected(), odd.sessions, odd.gets) == ("odd-1", 1, 1)
        assert await tab.record("lost", "trouble") == []


async def test_a_read_that_may_have_arrived_is_sent_again_under_a_new_id(browser: Browser) -> None:
    """A12: the server may still have the first one, and refuses an id that is in use."""
    odd = Odd()
    odd.answers["list"] = lambda key: found(key) if len(odd.asked["tools/list"]) > 1 else Response(status_code=502)
    async with a_page(browser, odd) as tab:
        assert await tab.eval("lab.tools()") == 0
        assert len(odd.asked["tools/list"]) == len(set(odd.asked["tools/list"])) == 2


async def test_a_read_that_makes_the_server_fail_is_not_sent_again(browser: Browser) -> None:
    odd = Odd(list=lambda key: Response("broken", status_code=500))
    async with a_page(browser, odd) as tab:
        assert await tab.eval("lab.tools().catch(String)") == "Error: HTTP 500: broken"
        assert len(odd.asked["tools/list"]) == 1


async def test_a_running_call_outlives_a_time_in_which_it_may_not_be_read(browser: Browser) -> None:
    """Promise 3: it runs, and its answer is in the log; 403 says nothing about that."""
    shop = ToolServer()
    front = Front(shop, browser.origin)
    async with front.serving() as url, cutting_proxy(int(url.split(":")[2].partition("/")[0])) as proxy:
        tab = await browser.open(proxy.url)
        await tab.connected()
        await tab.call("count", key="a", n=4, gate="g", pauses=[2])
        await tab.saw("progress", "a", 2)
        front.own = Response(json.dumps({"jsonrpc": "2.0", "id": None, "error": ERROR}), 403)
        proxy.cut()
        await until(lambda: any(front.refused))
        front.own = None
        shop.open("g/2")
        await whole(tab, "a", 4)
