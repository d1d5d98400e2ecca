"""A page is reloaded in the middle of its calls, in real Chromium (R11, R12)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients.chromium import Browser, Tab
from tests.support.processes.cluster import Cluster
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

Sessions = Callable[[], list[tuple[object, ...]]]

RELOADS = 11


async def whole(tab: Tab, key: str, n: int) -> None:
    """A call has arrived: each report once and in order, and its result."""
    await tab.saw("result", key)
    assert await tab.progress(key) == list(range(1, n + 1))
    assert await tab.answers(key) == [["result", key, f"counted to {n}"]]


@pytest.mark.parametrize(("sdk", "private"), [("1", False), ("2", True)], ids=["sdk 1", "sdk 2, private window"])
async def test_a_call_goes_on_over_a_reload(
    chromium: Browser, servers: Cluster, gate: str, sdk: str, private: bool, sessions: Sessions
) -> None:
    """R11, R12: the same session, each report once, and the result; and the client is whole."""
    async with chromium.window(private=private) as browser:
        tab = await browser.open(servers.proxy.url, sdk=sdk)
        session = await tab.connected()
        await tab.call("count", key="a", n=6, gate=gate, pauses=[2, 4])
        await tab.saw("progress", "a", 2)
        await tab.reload()
        open_gate(f"{gate}.2")
        await tab.saw("recovered", "a")
        await tab.saw("progress", "a", 4)
        assert await tab.connected() == session
        assert await tab.eval("lab.server()") == "gate_file_tools"
        assert "tools" in await tab.eval("lab.capabilities()")
        open_gate(f"{gate}.4")
        await whole(tab, "a", 6)
        assert sessions() == [(session, 1)]
        assert (await tab.eval("lab.positions()"))["calls"] == []


async def test_without_a_running_call_the_client_shakes_hands_again(
    browser: Browser, servers: Cluster, sessions: Sessions
) -> None:
    """R10: a reattach, so the session's second incarnation."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.reload()
    assert await tab.connected() == session
    assert await tab.eval("lab.server()") == "gate_file_tools"
    assert sessions() == [(session, 2)]
    assert (await tab.eval("lab.ask('where')")).startswith(session)


async def test_a_call_that_ends_while_the_page_is_away(browser: Browser, servers: Cluster, gate: str) -> None:
    """R12: its result is in the log."""
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    await tab.call("count", key="a", n=3, gate=gate, pauses=[1])
    await tab.saw("progress", "a", 1)
    page = await tab.eval("location.href")
    await tab.goto(browser.origin + "/blank")
    open_gate(f"{gate}.1")
    await tab.goto(page)
    await whole(tab, "a", 3)


BUSY = "addEventListener('beforeunload', () => { for (const end = Date.now() + 500; Date.now() < end; ); })"


async def test_a_call_that_ends_while_the_page_goes(browser: Browser, servers: Cluster, gate: str) -> None:
    """R12: what reaches a page that is on its way out is shown by the next one, and by that alone."""
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    await tab.call("count", key="a", n=3, gate=gate, pauses=[1])
    await tab.saw("progress", "a", 1)
    await tab.eval(BUSY)
    before = servers.events()
    reload = asyncio.create_task(tab.reload())
    open_gate(f"{gate}.1")
    await until(lambda: servers.events() == before + 3)
    await reload
    await whole(tab, "a", 3)


async def test_five_calls_at_once(browser: Browser, servers: Cluster, gate: str, sessions: Sessions) -> None:
    """R12: all of them, each by itself."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    for key in "abcde":
        await tab.call("count", key=key, n=4, gate=gate + key, pauses=[2])
    for key in "abcde":
        await tab.saw("progress", key, 2)
    await tab.reload()
    await tab.connected()
    for key in "edcba":
        open_gate(f"{gate}{key}.2")
        await whole(tab, key, 4)
    assert sessions() == [(session, 1)]


async def test_ids_of_old_calls_and_new_ones_are_kept_apart(browser: Browser, servers: Cluster, gate: str) -> None:
    """R10: the client counts from 0 again, and the old call still has its number."""
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    await tab.call("count", key="old", n=2, gate=f"{gate}old", pauses=[1])
    await tab.saw("progress", "old", 1)
    await tab.reload()
    await tab.saw("recovered", "old")
    await tab.call("count", key="new", n=2, gate=f"{gate}new", pauses=[1])
    await tab.saw("progress", "new", 1)
    open_gate(f"{gate}old.1")
    await whole(tab, "old", 2)
    open_gate(f"{gate}new.1")
    await whole(tab, "new", 2)


async def test_many_reloads_in_a_row(browser: Browser, servers: Cluster, gate: str, sessions: Sessions) -> None:
    """R12, promise 2: whenever the reload comes, no event is lost and none is shown twice."""
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    n = 20_000
    await tab.call("count", key="a", n=n, interval=0.003, gate=gate, pauses=[n])
    await tab.saw("progress", "a", 1)
    for number in range(RELOADS):
        await tab.reload()
        if number % 5 == 0:  # the others come in the middle of the beginning
            before = len(await tab.progress("a"))
            await tab.until(f"globalThis.lab?.record().filter(([what]) => what === 'progress').length > {before}")
    await tab.until("globalThis.lab?.has('a')")
    await tab.eval("lab.cancel('a')")
    await tab.saw("error", "a")
    seen = await tab.progress("a")
    assert seen == list(range(1, len(seen) + 1))
    assert await tab.answers("a") == [["error", "a", -32800, (await tab.answers("a"))[0][3]]]
    assert sessions() == [(session, 1)]
    print(f"{len(seen)} events over {RELOADS} reloads")


async def test_notices_of_the_session_go_on(browser: Browser, servers: Cluster) -> None:
    """R11: what belongs to no call is on the standalone stream, whose position is kept too."""
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    for start in (1, 11, 21):
        await tab.until("lab.positions().standalone !== undefined")
        await tab.eval(f"lab.ask('announce', {{n: 10, start: {start}}})")
        await tab.reload()
    await tab.saw("notice", "notifications/resources/updated", "notice://30")
    notices = [line[2] for line in await tab.record("notice")]
    assert notices == [f"notice://{number}" for number in range(1, 31)]


async def test_pending_gives_the_calls_to_a_page_that_asks(browser: Browser, servers: Cluster, gate: str) -> None:
    """R12: nothing is read before somebody takes it."""
    tab = await browser.open(servers.proxy.url, recover="pending")
    await tab.connected()
    await tab.call("count", key="a", n=4, gate=gate, pauses=[2])
    await tab.saw("progress", "a", 2)
    await tab.reload()
    open_gate(f"{gate}.2")
    await tab.connected()
    assert await tab.progress("a") == [1, 2]
    assert await tab.eval("lab.pending()") == ["a"]
    await whole(tab, "a", 4)
    assert await tab.eval("lab.pending()") == []


async def test_a_recovered_call_can_be_cancelled(browser: Browser, servers: Cluster, gate: str) -> None:
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    await tab.call("count", key="a", n=2, gate=gate, pauses=[1])
    await tab.saw("progress", "a", 1)
    await tab.reload()
    await tab.saw("recovered", "a")
    await tab.eval("lab.cancel('a')")
    await tab.saw("error", "a", -32800)


async def test_a_question_that_nobody_answered_is_asked_again(browser: Browser, servers: Cluster) -> None:
    """P6 over a reload: the form was on the page that went."""
    tab = await browser.open(servers.proxy.url, answer="wait")
    await tab.connected()
    await tab.call("ask", key="a", question="who?")
    await tab.saw("asked", "who?")
    await tab.eval("localStorage.setItem('answer', 'now')")
    await tab.reload()
    await tab.saw("result", "a", "forty-two")
    assert await tab.record("asked") == [["asked", "who?"], ["asked", "who?"]]


async def test_a_call_that_left_without_a_word_has_an_unknown_outcome(browser: Browser, servers: Cluster) -> None:
    """Promise 3: nothing had come back when the page went; it may have run, and the page is told."""
    tab = await browser.open(servers.proxy.url)
    await tab.connected()
    servers.proxy.hold()
    await tab.call("count", key="a", n=2)
    await tab.reload()
    servers.proxy.release()
    await tab.saw("error", "a", -31001)
    assert await tab.answers("a") == [["error", "a", -31001, (await tab.answers("a"))[0][3]]]
    assert json.dumps(await tab.eval("lab.positions()")).count("count") == 0


async def test_a_call_that_the_client_gave_up(browser: Browser, servers: Cluster, gate: str) -> None:
    """Its answer is for nobody, on this page and on the next; and a page that goes on by a position sends nothing."""
    tab = await browser.open(servers.proxy.url, recover="pending")
    await tab.connected()
    await tab.call("pay", key="a", n=2, gate=gate, pauses=[1])
    await tab.call("pay", key="b", n=2, gate=gate, pauses=[1], log=f"{gate}.diary")
    await tab.saw("progress", "a", 1)
    await tab.saw("progress", "b", 1)
    await tab.eval("lab.abort('a')")
    await tab.until("lab.positions().calls.length === 1")
    await tab.reload()
    await tab.connected()
    (call,) = (await tab.eval("lab.positions()"))["calls"]
    await tab.call("pay", key="b", resume=call["position"])
    open_gate(f"{gate}.1")
    await tab.saw("result", "b", "counted to 2")
    assert len(diary(Path(f"{gate}.diary"))) == 1
    assert await tab.record("trouble") == []


async def test_a_page_that_begins_twice_in_one_breath(browser: Browser, servers: Cluster, sessions: Sessions) -> None:
    """A transport that was closed while it began leaves no lock behind."""
    tab = await browser.open(servers.proxy.url, twice="")
    session = await tab.connected()
    await tab.reload()
    assert await tab.connected() == session
    assert sessions() == [(session, 2)]


async def test_a_session_that_the_page_has_ended(browser: Browser, servers: Cluster) -> None:
    tab = await browser.open(servers.proxy.url)
    session = await tab.connected()
    await tab.eval("lab.end()")
    await tab.reload()
    assert await tab.connected() != session
    assert await tab.record("lost", "trouble") == []
