"""The network, the server, the session or the storage goes, in real Chromium (R11, R13)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier

from tests.browser.test_reload import whole
from tests.support.clients.chromium import Browser
from tests.support.processes.cluster import Cluster
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def test_a_connection_that_is_cut(browser: Browser, servers: Cluster, gate: str) -> None:
    """All of them at once; the page sees its status change, and nothing else."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    assert servers.proxy.cut() >= 2
    await tab.saw("status", "reconnecting")
    open_gate(f"{gate}.2")
    await whole(tab, "a", 4)
    assert await tab.connected() == session
    status = [line[1] for line in await tab.record("status")]
    assert status == ["connecting", "connected", "reconnecting", "connected"]


async def test_a_reload_while_the_server_is_down(browser: Browser, servers: Cluster, gate: str) -> None:
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.call("put", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    servers.proxy.refuse()
    await servers.server.kill()
    await tab.reload()
    await tab.saw("status", "reconnecting")
    await servers.start()
    servers.proxy.upstreams = (servers.server.port,)
    servers.proxy.accept()
    open_gate(f"{gate}.2")
    await whole(tab, "a", 4)
    assert await tab.connected() == session


async def test_a_server_killed_and_restarted_during_a_reload(browser: Browser, servers: Cluster, gate: str) -> None:
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.call("put", key="a", n=4, gate=gate, pauses=[2])
    await tab.call("pay", key="b", n=4, gate=gate, pauses=[3])
    await tab.saw("progress", "a", 2)
    await tab.saw("progress", "b", 3)
    await asyncio.gather(tab.reload(), servers.crash())
    open_gate(f"{gate}.2")
    await whole(tab, "a", 4)
    await tab.saw("error", "b", -31001)
    assert await tab.connected() == session


@pytest.mark.parametrize("host", ["127.0.0.1", "plain.test"])
async def test_a_duplicated_tab_gets_a_session_of_its_own(
    browser: Browser, servers: Cluster, gate: str, host: str
) -> None:
    """R13: by Web Locks, and where the page is no secure context by asking around."""
    tab = await browser.open(servers.proxy.url, host=host)
    session = await tab.connected()
    assert await tab.eval("'locks' in navigator") == (host == "127.0.0.1")
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    copy = await tab.duplicate()
    other = await copy.connected()
    assert other != session
    open_gate(f"{gate}.2")
    await whole(tab, "a", 4)
    assert await copy.record("recovered") == []
    await asyncio.gather(tab.reload(), copy.reload())
    assert (await tab.connected(), await copy.connected()) == (session, other)


async def test_tabs_that_share_their_storage(browser: Browser, servers: Cluster) -> None:
    """With local storage one tab at a time goes on with the session; another has one that no reload finds."""
    tab = await browser.open(servers.proxy.url, storage="local")
    session = await tab.connected()
    other = await browser.open(servers.proxy.url, storage="local")
    assert await other.connected() != session
    await tab.reload()
    assert await tab.connected() == session
    await tab.close()
    await other.reload()
    assert await other.connected() == session


async def test_offline_and_back(browser: Browser, servers: Cluster, gate: str) -> None:
    """A call that is made while the browser is offline waits; those that run go on afterwards."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    await browser.offline(True)
    servers.proxy.cut()
    await tab.saw("status", "reconnecting")
    await tab.call("count", key="b", n=2)
    open_gate(f"{gate}.2")
    await browser.offline(False)
    await whole(tab, "a", 4)
    await whole(tab, "b", 2)
    assert await tab.connected() == session


CLOCK = "const now = Date.now; let by = 0; Date.now = () => now() + by; globalThis.setClock = (ms) => { by = ms; }"


async def test_a_connection_that_died_in_silence(browser: Browser, servers: Cluster, gate: str) -> None:
    """Nobody says that it is dead, but nothing comes any more, keep-alives included; and the clock was set back."""
    tab = await browser.open(servers.proxy.url, init=CLOCK, silence="300")
    await tab.connected()
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    servers.proxy.hold()
    await tab.eval("setClock(-3_600_000)")
    open_gate(f"{gate}.2")
    await tab.until("lab.status() === 'reconnecting'")
    servers.proxy.cut()
    servers.proxy.release()
    await whole(tab, "a", 4)


async def test_sleep_and_wake(browser: Browser, servers: Cluster, gate: str) -> None:
    """The page stands still while its connections die unheard; when it wakes, its watch finds them silent."""
    tab = await browser.open(servers.proxy.url, silence="300")
    session = await tab.connected()
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    await tab.freeze(True)
    servers.proxy.hold()
    before = servers.events()
    open_gate(f"{gate}.2")
    await until(lambda: servers.events() == before + 3)
    await tab.freeze(False)
    await tab.saw("status", "reconnecting")
    servers.proxy.cut()
    servers.proxy.release()
    await whole(tab, "a", 4)
    assert await tab.connected() == session


NEXT_PAGE = """
const key = Object.keys(sessionStorage).find((key) => key.startsWith('perdure'));
const state = JSON.parse(sessionStorage.getItem(key));
sessionStorage.setItem(key, JSON.stringify({...state, life: state.life + 1}));
"""


async def test_a_page_from_the_browsers_cache(caching_browser: Browser, servers: Cluster) -> None:
    """On the way back the old page is there as it was, and goes on; unless another one has gone on meanwhile.

    Chromium drops a page from its cache when another asks for the lock, so what that one does is done by hand here.
    """
    tab = await caching_browser.open(servers.proxy.url, host="plain.test")
    session = await tab.connected()
    await tab.eval("globalThis.mark = 'first'")
    blank = caching_browser.origin.replace("127.0.0.1", "plain.test") + "/blank"
    await tab.goto(blank)
    await tab.back()
    assert await tab.connected() == session
    assert await tab.eval("mark") == "first"
    await tab.eval("lab.ask('announce', {n: 1})")
    await tab.saw("notice", "notifications/resources/updated", "notice://1")
    await tab.goto(blank)
    await tab.eval(NEXT_PAGE)
    await tab.back()
    await tab.saw("trouble", "Error: another page has the session now")
    assert await tab.eval("[mark, lab.status()]") == ["first", "disconnected"]
    await tab.reload()
    assert await tab.connected() == session


async def test_a_handshake_that_is_cut_off(browser: Browser, servers: Cluster) -> None:
    """The connection of the first word goes before its answer has begun, and that of the second right after."""
    servers.proxy.cut_after(b"mcp-session-id", only="POST")
    lost = servers.proxy.cut_after(b"\r\n\r\n", only="POST")
    tab = await browser.open(servers.proxy.url)
    await lost.passed()
    session = await tab.connected()
    assert (await tab.eval("lab.ask('where')")).startswith(session)
    assert await tab.record("lost", "trouble") == []


async def test_a_request_that_found_nobody_is_not_sent_again(
    browser: Browser, servers: Cluster, tmp_path: Path
) -> None:
    """H8: it may have run."""
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    servers.proxy.cut()
    servers.proxy.refuse()
    await tab.call("pay", key="a", n=1)
    await tab.saw("error", "a", -31001)
    servers.proxy.accept()
    await tab.connected()
    assert await tab.answers("a") == [["error", "a", -31001, (await tab.answers("a"))[0][3]]]


async def test_more_calls_than_connections(browser: Browser, servers: Cluster, gate: str) -> None:
    """A browser has six connections to a server; eight calls and the standalone stream take turns."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    for key in "abcdefgh":
        await tab.call("count", key=key, n=4, gate=gate, pauses=[2])
        await tab.saw("progress", key, 2)
    assert (await tab.eval("lab.ask('where')")).startswith(session)
    open_gate(f"{gate}.2")
    for key in "abcdefgh":
        await whole(tab, key, 4)


@pytest.mark.parametrize("what", ["a call", "nothing"])
async def test_a_session_that_is_gone(browser: Browser, servers: Cluster, gate: str, what: str) -> None:
    """B5: one new session, the page is told, what ran there has an unknown outcome, and what was refused is sent."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    if what == "a call":
        await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
        await tab.saw("progress", "a", 2)
    await tab.eval(f"fetch({servers.proxy.url!r}, {{method: 'DELETE', headers: {{'mcp-session-id': {session!r}}}}})")
    await tab.saw("lost")
    if what == "a call":
        await tab.saw("error", "a")
    again = await tab.connected()
    assert again != session
    assert (await tab.eval("lab.ask('where')")).startswith(again)
    assert await tab.record("lost") == [["lost"]]
    await tab.reload()
    assert await tab.connected() == again


async def test_a_session_that_went_while_the_page_was_away(browser: Browser, servers: Cluster, gate: str) -> None:
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    page = await tab.eval("location.href")
    await tab.goto(browser.origin + "/blank")
    await tab.eval(f"fetch({servers.proxy.url!r}, {{method: 'DELETE', headers: {{'mcp-session-id': {session!r}}}}})")
    await tab.goto(page)
    assert await tab.connected() != session
    await tab.saw("error", "a", -31001)
    assert await tab.record("lost") == [["lost"]]


FORBIDDEN = (
    "Object.defineProperty(globalThis, 'sessionStorage', {get() { throw new DOMException('no', 'SecurityError') }})"
)
FULL = """
const set = Storage.prototype.setItem;
Storage.prototype.setItem = function (key, value) {
  if (key.startsWith('perdure')) throw new DOMException('full', 'QuotaExceededError');
  set.call(this, key, value);
};
"""


@pytest.mark.parametrize("init", [FORBIDDEN, FULL], ids=["forbidden", "full"])
async def test_storage_refused(browser: Browser, servers: Cluster, gate: str, init: str) -> None:
    """Everything works, cuts included; a reload begins a session, as with any other client."""
    tab = await browser.open(servers.proxy.url, init=init)
    session = await tab.connected()
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    servers.proxy.cut()
    open_gate(f"{gate}.2")
    await whole(tab, "a", 4)
    trouble = await tab.record("trouble")
    assert len(trouble) == (1 if init == FULL else 0), trouble
    await tab.reload()
    assert await tab.connected() != session


async def test_storage_really_full(browser: Browser, servers: Cluster, gate: str) -> None:
    """What is stored goes with the first write that fails, because an old position would show events twice."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.eval("lab.fill()")
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.until("lab.record().some(([what]) => what === 'trouble')")
    open_gate(f"{gate}.2")
    await whole(tab, "a", 4)
    await tab.eval("lab.empty()")
    await tab.reload()
    assert await tab.connected() != session


class Passes(TokenVerifier):
    """Tokens that may be taken back; all of them are one person's."""

    def __init__(self, *good: str) -> None:
        self.good = set(good)

    async def verify_token(self, token: str) -> AccessToken | None:
        if token not in self.good:
            return None
        return AccessToken(token=token, client_id="alice", subject="alice", scopes=[])


async def test_a_token_that_expires_in_the_middle_of_a_stream(browser: Browser) -> None:
    """R9, R11: the page is asked for another one, and nothing is lost; no token is stored."""
    shop, passes = ToolServer(), Passes("token-of-the-morning")
    async with (
        serve(shop.server, auth=passes, cors_origins=(browser.origin,), retry=0.1) as site,
        cutting_proxy(site.port) as proxy,
    ):
        tab = await browser.open(proxy.url, token="token-of-the-morning")
        session = await tab.connected()
        await tab.call("count", key="a", n=3, gate="g", pauses=[1])
        await tab.saw("progress", "a", 1)
        await tab.eval("localStorage.setItem('token', 'token-of-the-evening')")
        passes.good = {"token-of-the-evening"}
        proxy.cut()
        await tab.saw("asked", "true")
        shop.open("g/1")
        await whole(tab, "a", 3)
        assert await tab.connected() == session
        assert "token-of-the" not in await tab.eval("sessionStorage.getItem('perdure:' + lab.url)")
        await tab.eval("localStorage.removeItem('token')")
        passes.good.clear()
        await tab.call("count", key="b", n=1)
        await tab.saw("error", "b", None, "HTTP 401: no token: Error: signed out")


async def test_the_type_of_a_post_in_the_network_tab(browser: Browser, servers: Cluster) -> None:
    """P1: a fetch whose answer is an event stream."""
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    await tab.call("count", key="a", n=2)
    await whole(tab, "a", 2)
    seen = {(method, kind, mime) for method, kind, mime, url in await browser.responses() if url == servers.proxy.url}
    assert ("POST", "Fetch", "text/event-stream") in seen
    assert ("GET", "Fetch", "text/event-stream") in seen
    assert {kind for method, kind, _ in seen if method == "POST"} == {"Fetch"}
