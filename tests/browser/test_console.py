"""The console's page in real Chromium: what an operator sees of real servers, and what a store cannot do to it."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure._core.ids import Kind, NodeId, SessionId, StreamId
from perdure._core.principals import user_principal
from perdure._core.states import SessionState
from perdure._core.tool_steps import ToolStepKind
from perdure.store import SqliteStore
from perdure.store.records import AskRecord, CallRecord, Event, SessionRecord, StreamRecord
from perdure.store.steps import Append, OpenAsk, OpenStream, PutSession, PutToolStep, Step
from perdure.testing._values import a_tool_step
from tests.browser.console_page import BUILT, VIOLATIONS, Page, axe, build, open_page
from tests.support.clients.chromium import Browser
from tests.support.clients.raw_http import Peer
from tests.support.processes.cluster import cluster
from tests.support.processes.console_process import Console, consoling
from tests.support.servers.gate_file_tools import open_gate

pytestmark = pytest.mark.anyio

#: Bytes gzipped: the page may come through a tunnel.
MOST = 20_000

#: Sessions in the store that is only looked at: two full pages and a part of a third.
MANY = 230
#: What a peer may have written anywhere.
EVIL = '<img src="/x" onerror="globalThis.hit = 1"><script>globalThis.hit = 1</script>\u202eevil'
SHOWN = EVIL.replace("\u202e", "\\u202e")


def message(**members: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **members}).encode()


async def fill(path: Path) -> None:
    """A store that a server has left: many sessions, and one of a peer that means no good, with a call that runs."""
    store = SqliteStore(str(path))
    await store.open()
    now, node = time.time(), NodeId("a" * 22)
    fence = await store.join(node)
    steps: list[Step] = []
    for number in range(MANY):
        is_evil = number == 0
        record = SessionRecord(
            id=SessionId(f"{number:05d}{'x' * 38}"),
            owner=user_principal(EVIL if is_evil else ("alice" if number % 10 else "bob")),
            state=SessionState.ACTIVE if number % 2 else SessionState.DORMANT,
            version="2025-11-25",
            client_params=message(clientInfo={"name": EVIL, "version": "1"}),
            result=b"{}",
            initialized=True,
            sticky=(),
            incarnation=1,
            standalone=StreamId(f"s{number:021d}"),
            created=now - 3600 - number,
            active=now - 10 * number,
        )
        steps.append(PutSession(record=record))
    session, stream = SessionId(f"{0:05d}{'x' * 38}"), StreamId("c" * 22)
    call = CallRecord(
        session=session,
        incarnation=1,
        request_id=EVIL,
        stream=stream,
        method="tools/call",
        request=message(id=1, method="tools/call", params={"name": EVIL}),
        principal="",
    )
    opened = StreamRecord(id=stream, session=session, kind=Kind.CALL, node=node, fence=fence, opened=now - 60)
    payloads = [
        message(method="notifications/progress", params={"progressToken": 1, "progress": 1, "message": EVIL}),
        message(method=EVIL, params={EVIL: EVIL}),
        message(method="notifications/message", params={"data": "a" * 70_000 + EVIL}),
        EVIL.encode(),
    ]
    events = tuple(Event(seq, now - 50 + seq, payload, False) for seq, payload in enumerate(payloads, 1))
    failed = dataclasses.replace(opened, id=StreamId("d" * 22))
    answer = Event(1, now - 40, message(id=2, result={"isError": True, "content": []}), True)
    steps += [
        OpenStream(record=failed, calls=()),
        Append(stream=failed.id, fence=fence, events=(answer,), seal=True),
        OpenStream(record=opened, calls=(call,)),
        Append(stream=stream, fence=fence, events=events),
    ]
    done = {"stream": stream, "request_id": EVIL, "began": now - 30}
    steps += [
        PutToolStep(fence=fence, record=record)
        for record in (
            a_tool_step(1, name=EVIL, value=b'"secret"', ended=now - 29.75, **done),
            a_tool_step(2, name="nap", kind=ToolStepKind.SLEEP, **done | {"ended": now + 3600}),
            a_tool_step(3, name=EVIL, **done),
        )
    ]
    ask = AskRecord(session=call.session, id="ask-1", stream=stream, request=b"{}", node=node, call=stream)
    steps.append(OpenAsk(record=dataclasses.replace(ask, incarnation=call.incarnation, request_id=EVIL)))
    assert not any(await store.commit(steps))
    await store.leave(node)
    await store.aclose()


@pytest.fixture(scope="module")
async def left(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Console]:
    """A console on the store that was left."""
    path = tmp_path_factory.mktemp("left") / "log.db"
    await fill(path)
    async with consoling(f"sqlite:{path}") as console:
        yield console


async def test_a_call_is_killed_and_run_again_before_the_operators_eyes(browser: Browser, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    options = ("--retry", "100ms", "--max-stream-events", "5")
    async with cluster(tmp_path / "log.db", *options) as servers, consoling(servers.address) as console:
        page = await open_page(browser, console)
        await page.shows(".nodes", "alive")
        client = await Peer(port=servers.proxy.port).session()
        await page.click(".sessions a", client.id[:8])
        await page.shows("h1", f"Session {client.id[:8]}")
        async with await client.begin_call("put", n=9, gate=gate, pauses=[8]) as call:
            await call.until_messages(8)
            await page.shows(".timeline [data-is=progress]", "progress 8 of 9")
            await page.shows(".open-calls", "running put")
            await servers.crash()
        await page.shows(".timeline [data-is=rerun]", "run again from the start: attempt 2")
        await page.shows(".lane", "put attempt 2")
        open_gate(f"{gate}.8")
        await page.shows(".timeline [data-is=answer]", "counted to 9")
        # What was seen as it was written is what a page shows that comes later; but for what was forgotten meanwhile.
        await page.tab.reload()
        await page.shows(".timeline [data-is=answer]", "counted to 9")
        await page.shows(".timeline [data-is=gap]", "are no longer there")
        await page.shows(".timeline [data-is=rerun]", "attempt 2")
        await page.click(".timeline [data-is=answer] summary")
        await page.shows(".timeline [data-is=answer] pre", '"text": "counted to 9"')
        await page.shows(".timeline [data-is=answer] .about", ".000002.00000000")
        assert await page.tab.eval("globalThis.refused ?? []") == []


async def test_the_list_is_filtered_searched_and_paged(browser: Browser, left: Console) -> None:
    page = await open_page(browser, left, "#/sessions")
    await page.shows(".sum", f"1 to 100 of {MANY}")
    assert (await page.texts("tbody .id"))[:2] == ["00000xxx", "00001xxx"]
    await page.click(".paging a", "Next")
    await page.shows(".sum", f"101 to 200 of {MANY}")
    await page.click(".paging a", "Next")
    await page.shows(".sum", f"201 to {MANY} of {MANY}")
    assert (await page.texts("tbody .id"))[-1] == f"{MANY - 1:05d}xxx"
    assert await page.texts(".paging a") == ["First page", "Previous page"]
    await page.tab.back()
    await page.shows(".sum", f"101 to 200 of {MANY}")
    await page.tab.eval("document.querySelector('tbody tr:nth-child(80)').scrollIntoView()")
    scrolled = await page.tab.eval("scrollY")
    await page.click("tbody a", "00180xxx")
    await page.shows("h1", "Session 00180xxx")
    await page.tab.back()
    await page.shows(".sum", f"101 to 200 of {MANY}")
    await page.until(f"scrollY === {scrolled} && scrollY > 1000")
    await page.tab.reload()
    await page.shows(".sum", f"101 to 200 of {MANY}")
    await page.goto("#/sessions")
    await page.fill("owner", "bob")
    await page.shows(".sum", f"1 to {MANY // 10 - 1} of {MANY // 10 - 1}")
    assert set(await page.texts("tbody .owner")) == {"bob"}
    await page.fill("state", "active")
    await page.shows(".none", "Nothing fits these filters.")
    await page.click("button", "Clear")
    await page.fill("q", "0012")
    await page.shows(".sum", "1 to 10 of 10")
    await page.fill("q", "")
    await page.fill("active", "-3600")
    await page.shows(".sum", "of 0")
    await page.fill("owner", "x" * 300)
    await page.shows(".none", "owner has 300 characters; allowed are 200")
    await page.fill("owner", "")
    await page.fill("active", "60")
    await page.until("document.querySelectorAll('tbody tr').length < 10")


async def test_what_a_peer_wrote_is_shown_and_does_nothing(browser: Browser, left: Console) -> None:
    page = await open_page(browser, left, "#/sessions")
    await page.shows("tbody .owner", SHOWN)
    await page.fill("tool", EVIL)
    await page.shows(".sum", "1 to 1 of 1")
    await page.click("tbody a", "00000xxx")
    await page.shows(".lane", SHOWN)
    await page.shows(".open-calls", f"request {SHOWN}")
    await page.shows(".open-calls .chip", "asks")
    await page.shows(".facts", SHOWN)
    # The steps of its tool, and none of their values.
    await page.shows(".steps tr:nth-child(1)", "ended")
    await page.shows(".steps tr:nth-child(1)", "250 ms")
    await page.shows(".steps tr:nth-child(2)", "sleeps until")
    await page.shows(".steps tr:nth-child(3)", f"{SHOWN} #2")
    assert await page.tab.eval("document.body.innerText.includes('secret')") is False
    await page.until("document.querySelectorAll('.timeline > li').length === 7")
    # A tool that failed is an error in its lane, as it is in the list.
    await page.shows(".timeline [data-is=error]", "answer: the tool failed")
    signs = "['answer', 'error'].map((sign) => document.querySelectorAll(`.lanes .${sign}:not([d='M0 0'])`).length)"
    assert await page.tab.eval(signs) == [0, 1]
    await page.tab.eval("document.querySelectorAll('.timeline details').forEach((one) => { one.open = true; })")
    await page.shows(".timeline pre", SHOWN.replace('"', '\\"'))
    await page.click(".timeline button", "Load all")
    await page.until(f"[...document.querySelectorAll('pre')].some((one) => one.innerText.includes({'a' * 70_000!r}))")
    found = (
        "[globalThis.hit ?? 0, document.querySelectorAll('img, script:not([src])').length, globalThis.refused ?? []]"
    )
    assert await page.tab.eval(found) == [0, 0, []]
    # No part of the page makes markup of text.
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", (BUILT / "console.js").read_text()) == []
    )


async def test_a_session_is_ended_behind_a_question_and_only_where_that_is_allowed(
    browser: Browser, left: Console, tmp_path: Path
) -> None:
    page = await open_page(browser, left, "#/session/00001xxx")
    await page.shows(".none", "It has no stream.")
    assert await page.texts("button.danger") == []
    async with cluster(tmp_path / "log.db") as servers, consoling(servers.address, "--allow-end") as console:
        client = await Peer(port=servers.proxy.port).session()
        page = await open_page(browser, console, f"#/session/{client.id[:12]}")
        await page.click("button.danger", "End…")
        await page.shows("dialog", "This cannot be undone.")
        assert await page.tab.eval("document.activeElement.textContent") == "Keep it"
        await page.tab.press("Escape")
        await page.until("!document.querySelector('dialog')")
        await page.click("button.danger", "End…")
        await page.click("dialog button.danger")
        await page.shows(".pill", "ended")
        await page.shows("p.said", "operator ended")
        assert servers.rows("SELECT state FROM session WHERE id = ?", client.id) != [("active",)]


async def test_the_page_says_when_it_is_alone_and_comes_back_by_itself(browser: Browser, tmp_path: Path) -> None:
    await fill(tmp_path / "log.db")
    store = f"sqlite:{tmp_path / 'log.db'}"
    async with consoling(store) as console:
        page = await open_page(browser, console, "#/sessions")
        await page.shows("tbody .id", "00000xxx")
        (tmp_path / "log.db").rename(tmp_path / "away")
        await page.shows(".banner", "The store cannot be read")
        await page.shows("tbody .id", "00000xxx")
        (tmp_path / "away").rename(tmp_path / "log.db")
        await page.shows("#status", "live")
    await page.shows(".banner", "The connection to the console is lost")
    async with consoling(store, "--port", str(console.port)):
        await page.shows("#status", "live")
        await page.until("!document.querySelector('.banner')")
    async with consoling(store, "--port", str(console.port), has_ticket=True) as other:
        await page.shows(".banner", "This page has no access.")
        await page.tab.reload()
        await page.shows(".banner", "This page has no access.")
        assert await page.texts("main *") == []
        # The address lets in, and is neither in the address bar nor of use again; the page stays in without it.
        page = await open_page(browser, other, "#/sessions")
        assert await page.tab.eval("location.href") == f"http://127.0.0.1:{other.port}/#/sessions"
        assert await page.tab.eval("document.cookie") == ""
        await page.tab.reload()
        await page.shows("tbody .id", "00000xxx")
        again = await other.ask("/api/enter", method="POST")
        assert again.status == 401
        assert other.process.stdout is not None
        assert b"the next one needs " in await other.process.stdout.readline()


async def test_a_page_without_access_takes_the_token(browser: Browser, left: Console) -> None:
    page = Page(tab=await browser.visit(f"http://localhost:{left.port}/"))
    await page.shows(".banner", "This page has no access.")
    for token, shows in (("wrong", ".banner"), (left.token, "tbody .id")):
        await page.tab.eval(f"document.querySelector('.banner input').value = {token!r}")
        await page.click(".banner button", "Enter")
        await page.until("document.querySelector('.banner input')?.value !== 'wrong'")
        await page.shows(shows, "")
    await page.shows("#status", "live")


async def test_every_page_says_at_once_that_nodes_hold_what_is_not_written(browser: Browser, tmp_path: Path) -> None:
    """While the store fails nothing in it changes, so the page has to be told."""
    path = tmp_path / "log.db"
    async with SqliteStore(str(path)) as store, consoling(f"sqlite:{path}") as console:
        await store.join(node := NodeId("n" * 22))
        liveness = store.liveness(node, lease=15.0, monotonic=time.monotonic)
        page = await open_page(browser, console)
        await page.shows("#status", "live")
        await page.shows(".health .pill", "healthy")
        liveness.hold(True)
        await page.shows("#status", "store degraded")
        await page.shows(".health .pill", "degraded")
        await page.click("nav a", "Sessions")
        await page.shows("#status", "store degraded")
        liveness.hold(False)
        await page.shows("#status", "live")


async def test_rows_stay_in_their_places_while_they_are_used(browser: Browser, tmp_path: Path) -> None:
    async with cluster(tmp_path / "log.db") as servers, consoling(servers.address) as console:
        first = await Peer(port=servers.proxy.port).session()
        page = await open_page(browser, console, "#/sessions")
        await page.shows("tbody .id", first.id[:8])
        await page.tab.hover("tbody .owner")
        second = await Peer(port=servers.proxy.port).session()
        await page.shows(".newer", "Show 1 newer")
        assert await page.texts("tbody .id") == [first.id[:8]]
        await page.click(".newer")
        await page.until("document.querySelectorAll('tbody tr').length === 2")
        assert await page.texts("tbody .id") == [second.id[:8], first.id[:8]]


async def test_every_page_is_accessible_and_fits_a_phone(browser: Browser, left: Console, tmp_path: Path) -> None:
    page = await open_page(browser, left)
    await page.tab.eval(axe())
    for hash_, there in (("#/", ".sessions a"), ("#/sessions?q=0000", ".sum"), ("#/session/00000xxx", ".timeline li")):
        await page.goto(hash_)
        await page.until(f"!!document.querySelector({there!r})?.textContent")
        if there == ".timeline li":
            await page.click(".timeline summary")
        for width, dark in ((1280, False), (360, True)):
            await page.tab.shoot(tmp_path / "page.png", width=width, dark=dark)
            edges = "[...document.querySelectorAll('main :is(td, th, dd, button, input, select, summary, pre, svg)')]"
            rightmost = f"Math.max(...{edges}.map((one) => one.getBoundingClientRect().right))"
            assert max(await page.tab.eval(f"[document.documentElement.scrollWidth, {rightmost}]")) <= width
            assert await page.tab.eval(VIOLATIONS) == []


async def test_the_keyboard_reaches_everything(browser: Browser, left: Console) -> None:
    page = await open_page(browser, left)
    await page.shows(".sessions a", "00000xxx")
    await page.tab.press("Tab")
    assert await page.tab.eval("document.activeElement.textContent") == "Skip to the content"
    await page.tab.press("Enter")
    for _ in range(2):  # the link to all sessions, then the first of them
        await page.tab.press("Tab")
    await page.tab.press("Enter")
    await page.shows("h1", "Session 00000xxx")
    await page.shows(".lane", SHOWN)
    assert await page.tab.eval("document.activeElement.tagName") == "H1"
    for _ in range(2):  # the button that copies the id, then the first lane
        await page.tab.press("Tab")
    await page.tab.press("Enter")
    await page.until("location.hash.includes('stream=') && !!document.querySelector('[aria-pressed=true]')")
    await page.tab.back()
    await page.until("!document.querySelector('[aria-pressed=true]')")


def test_the_page_in_the_repository_is_built_of_these_sources_and_small(tmp_path: Path) -> None:
    """Whoever installs from the repository may have no node, so the built page is in it."""
    found = re.fullmatch(r"console.js: (\d+) bytes gzipped\n", build(tmp_path))
    assert found is not None
    assert int(found[1]) <= MOST
    fresh, kept = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in (tmp_path, BUILT))
    assert sorted(fresh) == ["console.css", "console.js", "icon.svg", "index.html"]
    stale = sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))
    assert stale == [], "run `make page`, and commit what it writes"
