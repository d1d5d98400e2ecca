"""Pages without sessions (2026-07-28), in real Chromium: each call outlives its connection, its page and its server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import ToolAnnotations

from tests.browser.test_servers import for_pages
from tests.support.clients.chromium import Browser, Tab
from tests.support.processes.cluster import Cluster
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.changing_server import new_server
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import serve, under_uvicorn, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def connected(tab: Tab) -> None:
    await tab.until("globalThis.lab?.status() === 'connected' && lab.version() === '2026-07-28'")


async def opened(browser: Browser, url: str, **query: str) -> Tab:
    """A page whose client speaks 2026-07-28."""
    tab = await browser.open(url, single="", **query)
    await connected(tab)
    return tab


async def has_handles(tab: Tab, number: int = 1) -> None:
    await tab.until(f"lab.positions().calls.filter(({{task}}) => task).length === {number}")


async def test_a_task_goes_on_over_a_reload(browser: Browser, servers: Cluster, gate: str) -> None:
    """The next page finds it by its handle, and tells its progress. Calls of the new page are told apart from it."""
    tab = await opened(browser, servers.proxy.url)
    assert await tab.eval("lab.session()") is None
    await tab.call("pay", key="a", n=5, gate=gate, pauses=[2, 4], log=f"{gate}.diary")
    await tab.saw("progress", "a", 2)
    await has_handles(tab)
    await tab.reload()
    await tab.saw("recovered", "a")
    await connected(tab)
    await tab.call("count", key="b", n=3)
    await tab.saw("result", "b", "counted to 3")
    open_gate(f"{gate}.2")
    await tab.saw("progress", "a", 4)
    open_gate(f"{gate}.4")
    await tab.saw("result", "a", "counted to 5")
    assert len(diary(Path(f"{gate}.diary"))) == 1
    assert (await tab.eval("lab.positions()"))["calls"] == []
    assert await tab.record("trouble") == []


async def test_a_call_without_a_handle_is_found_by_its_key(browser: Browser, servers: Cluster, gate: str) -> None:
    """Over a reload, and over a cut of its connection: it runs once, though its tool would run again."""
    tab = await opened(browser, servers.proxy.url)
    await tab.call("count", key="a", n=3, gate=gate, pauses=[1], log=f"{gate}.diary")
    await tab.saw("progress", "a", 1)
    assert servers.proxy.cut() >= 1
    await tab.saw("status", "reconnecting")
    await tab.reload()
    await tab.saw("recovered", "a")
    open_gate(f"{gate}.1")
    await tab.saw("result", "a", "counted to 3")
    assert len(diary(Path(f"{gate}.diary"))) == 1
    assert await tab.record("trouble") == []


async def test_a_server_killed_in_the_middle(browser: Browser, servers: Cluster, gate: str) -> None:
    """A tool that may run again has its result; the outcome of any other is unknown, and it has run once."""
    tab = await opened(browser, servers.proxy.url)
    for tool in ("put", "pay"):
        await tab.call(tool, key=tool, n=3, gate=gate, pauses=[2], log=f"{gate}.{tool}")
        await tab.saw("progress", tool, 2)
    await has_handles(tab, 2)
    await servers.kill()
    open_gate(f"{gate}.2")
    await servers.restart()
    await tab.saw("result", "put", "counted to 3")
    await tab.saw("error", "pay", -31001)
    assert [len(diary(Path(f"{gate}.{tool}"))) for tool in ("put", "pay")] == [2, 1]
    assert await tab.eval("lab.tools()") > 3


async def test_a_page_without_a_network(browser: Browser, servers: Cluster, gate: str) -> None:
    tab = await opened(browser, servers.proxy.url)
    await tab.call("pay", key="a", n=3, gate=gate, pauses=[1])
    await has_handles(tab)
    await browser.offline(True)
    await tab.saw("status", "reconnecting")
    open_gate(f"{gate}.1")
    await browser.offline(False)
    await tab.saw("result", "a", "counted to 3")
    assert await tab.record("trouble") == []


@pytest.mark.parametrize("room", [0, 4096])
async def test_storage_that_is_full_is_told(browser: Browser, servers: Cluster, gate: str, room: int) -> None:
    """Also where only the arguments of a call do not fit: without them a reload cannot send it again by its key."""
    tab = await opened(browser, servers.proxy.url)
    await tab.eval(f"lab.fill({room})")
    await tab.call("count", key="a", n=2, gate=gate, pauses=[1], log=f"{gate}.diary", padding="x" * 8192)
    await tab.until("lab.record().some(([what]) => what === 'trouble')")
    open_gate(f"{gate}.1")
    await tab.saw("result", "a", "counted to 2")
    assert len(await tab.record("trouble")) == 1


async def test_questions_of_a_task_reach_the_clients_handlers(browser: Browser, servers: Cluster) -> None:
    """Those of a call that an earlier page made are for the page, because the client knows no such call."""
    tab = await opened(browser, servers.proxy.url)
    await tab.call("ask", key="a", question="who?")
    await tab.saw("result", "a", "forty-two")
    assert await tab.record("asked") == [["asked", "who?"]]
    waiting = await opened(browser, servers.proxy.url, answer="wait")
    await waiting.call("ask", key="b", question="where?")
    await waiting.saw("asked", "where?")
    await waiting.reload()
    await waiting.saw("result", "b", "forty-three")
    assert await waiting.record("question") == [["question", "elicitation/create", "where?"]]


async def test_a_call_that_is_given_up_is_cancelled(browser: Browser, servers: Cluster, gate: str) -> None:
    """By the page that made it, and by the next one; by its handle, and by its key where it has none."""
    tab = await opened(browser, servers.proxy.url)
    before = servers.rows("SELECT stream FROM call")
    for key in "ab":
        await tab.call("pay", key=key, n=3, gate=gate + key, pauses=[1])
    await tab.call("count", key="c", n=3, gate=gate + "c", pauses=[1])
    await tab.saw("progress", "c", 1)
    await has_handles(tab, 2)
    for key in "ac":
        await tab.eval(f"lab.abort('{key}')")
        await tab.saw("error", key)
    await tab.reload()  # perhaps before the server has answered: the next page tells it again
    await tab.saw("recovered", "b")
    await tab.eval("lab.cancel('b')")
    await tab.saw("error", "b", -32800)
    cancelled = "SELECT stream FROM call WHERE state = 'cancelled'"
    await until(lambda: len(set(servers.rows(cancelled)) - set(before)) == 3)


@pytest.mark.parametrize("kind", ["Perdure's", "the SDK's own"])
async def test_listening_comes_back(browser: Browser, kind: str) -> None:
    """The page cannot tell what it missed: it gets one cue for each thing that it listens to."""
    async with AsyncExitStack() as stack:
        if kind == "Perdure's":
            site = serve(new_server(), cors_origins=(browser.origin,))
            port = (await stack.enter_async_context(site)).port
        else:
            anybody = TransportSecuritySettings(enable_dns_rebinding_protection=False)
            app = new_server().streamable_http_app(transport_security=anybody)
            port = await stack.enter_async_context(under_uvicorn(for_pages(app)))
        proxy = await stack.enter_async_context(cutting_proxy(port))
        tab, other = await opened(browser, proxy.url), await opened(browser, f"http://127.0.0.1:{port}/mcp")
        wanted = '{"toolsListChanged":true,"promptsListChanged":true}'
        assert await tab.eval(f"lab.listen({wanted})") == wanted
        before = len(await tab.record("notice"))
        proxy.refuse()
        assert proxy.cut() >= 1
        await other.eval("lab.ask('change', {what: 'prompts'})")
        proxy.accept()

        async def cues() -> list[str]:
            return [line[1] for line in (await tab.record("notice"))[before:]]

        async def has_two() -> bool:
            return len(await cues()) >= 2

        await until(has_two)
        assert (await cues())[:2] == [f"notifications/{one}/list_changed" for one in ("tools", "prompts")]
        assert await tab.record("trouble") == []
        await tab.close()
        await other.close()


async def test_a_server_without_keys_and_tasks(browser: Browser) -> None:
    """The SDK's own: what its tool says of itself decides. A page that comes after is told the same."""
    server, seen, gate = MCPServer("plain", version="1"), list[str](), asyncio.Event()

    async def work(key: str, ctx: Context) -> str:
        seen.append(key)
        await ctx.report_progress(1)
        await gate.wait()
        return f"done {key}"

    server.add_tool(work, name="look", annotations=ToolAnnotations(read_only_hint=True))
    server.add_tool(work, name="act")
    anybody = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = for_pages(server.streamable_http_app(transport_security=anybody))
    async with under_uvicorn(app) as port, cutting_proxy(port) as proxy:
        tab = await opened(browser, proxy.url)
        for tool in ("look", "act"):
            await tab.call(tool, key=tool)
            await tab.saw("progress", tool, 1)
        proxy.cut()
        await tab.saw("error", "act", -31001)
        await until(lambda: seen.count("look") == 2)
        await tab.call("act", key="c")
        await tab.saw("progress", "c", 1)
        await tab.reload()
        await tab.saw("error", "c", -31001)
        gate.set()
        await tab.saw("result", "look", "done look")
        assert (seen.count("act"), seen.count("c")) == (1, 1)
        await tab.close()


async def test_a_server_of_the_other_revisions_gets_a_session(browser: Browser) -> None:
    shop = ToolServer()
    async with serve(shop.server, eras="session", cors_origins=(browser.origin,)) as site:
        tab = await browser.open(site.url, single="")
        session = await tab.connected()
        await tab.call("count", key="a", n=3, gate="g", pauses=[1])
        await tab.saw("progress", "a", 1)
        await tab.reload()
        shop.open("g/1")
        await tab.saw("result", "a", "counted to 3")
        assert await tab.connected() == session
        await tab.close()
