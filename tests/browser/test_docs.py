"""The examples of docs/browser.md, as one page that a visitor uses."""

from __future__ import annotations

import asyncio
import re

import pytest
from mcp.server.mcpserver import Context, MCPServer
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

import perdure
from perdure.store import MemoryStore
from tests.support.clients.chromium import Browser
from tests.support.processes.serving import ROOT
from tests.support.servers.in_process import under_uvicorn

pytestmark = pytest.mark.anyio

PAGE = "<!doctype html><button>Bake</button><output></output><script type=module src=/page.js></script>"
RESULT = '"text":"3 loaves"'


async def test_the_examples(browser: Browser) -> None:
    blocks = re.findall(r"```ts\n(.*?)```", (ROOT / "docs" / "browser.md").read_text(), re.DOTALL)
    script = await browser.do("compile", code="\n".join(blocks))
    server, oven = MCPServer("bakery", log_level="WARNING"), asyncio.Event()

    @server.tool()
    async def bake(loaves: int, ctx: Context) -> str:
        for loaf in range(1, loaves + 1):
            await ctx.report_progress(loaf, loaves)
            if loaf == 2:
                await oven.wait()
        return f"{loaves} loaves"

    app = perdure.asgi(server, store=MemoryStore())
    routes = [
        Route("/", lambda _: HTMLResponse(PAGE)),
        Route("/page.js", lambda _: Response(script, media_type="text/javascript")),
        Route("/token", lambda _: PlainTextResponse("fresh")),
        Mount("/", app),
    ]
    async with under_uvicorn(Starlette(routes=routes, lifespan=app.lifespan)) as port:
        tab = await browser.visit(f"http://127.0.0.1:{port}/")
        says = "document.querySelector('output').textContent.includes({!r})"
        await tab.until(says.format("signed in as from the sign-in"))
        await tab.until(says.format("speaks 2026-07-28"))
        await tab.eval("document.querySelector('button').click()")
        await tab.until(says.format("loaf 2"))
        await tab.reload()
        oven.set()
        await tab.until(says.format("loaf 3, after a reload"))
        await tab.until(says.format(RESULT))
        app.begin_stop()
