"""The page of `make demo`, as a visitor uses it: calls go on over a reload, dropped connections and a killed server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator

import pytest

from tests.browser.console_page import VIOLATIONS, axe
from tests.support.clients.chromium import Browser
from tests.support.clients.demo_page import have_page
from tests.support.processes.starting import ROOT, start

pytestmark = pytest.mark.anyio

#: A server that is killed is up again after two seconds or so; the waits in between grow.
PATIENCE = 90


@pytest.fixture(scope="module")
def built() -> None:
    have_page()


@pytest.fixture(scope="module")
async def page(built: None) -> AsyncIterator[str]:
    """The demo without its scenes; gives the page's address."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = await start("examples.demo", "--page", "--port", "0", cwd=ROOT, env=env, errors=None)
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            if re.fullmatch(r"http://127\.0\.0\.1:\d+/", line.decode().strip()):
                break
        yield line.decode().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()


SEEN = "[...document.querySelectorAll('.ours .bar')].every((bar) => bar.ariaValueNow >= {})"
SAYS = "[...document.querySelectorAll('{} .said')].every((lane) => lane.textContent.startsWith('{}'))"


async def test_calls_go_on_whatever_the_visitor_does(browser: Browser, page: str) -> None:
    """And the same calls over the stock transport end with the page that made them."""
    tab = await browser.visit(page)
    await tab.until("document.querySelector('#status').textContent === 'connected'")
    # A busy machine kills the server seconds after the click: the calls still run then.
    await tab.eval("document.querySelector('#loaves').value = 29; document.querySelector('[value=five]').click()")
    await tab.until(SEEN.format(1) + " && " + SEEN.format(1).replace("ours", "stock"))
    await tab.reload()
    await tab.until("document.querySelectorAll('.call').length === 5 && " + SEEN.format(3))
    assert await tab.eval(SAYS.format(".stock[data-is=failed]", "gone with the page"))
    await tab.eval("document.querySelector('#cut').click()")
    await tab.until("document.querySelector('#calls').textContent.includes(' cut') && " + SEEN.format(5))
    await tab.eval("document.querySelector('#restart').click()")
    await tab.until("document.querySelector('[data-held=down] .said')?.textContent.startsWith('no connection')")
    again = SAYS.format(".ours[data-held=again]", "running again from the start")
    await tab.until(f"document.querySelector('[data-held=again]') && {again}", seconds=PATIENCE)
    finished = "document.querySelectorAll('.ours[data-is=done]').length === 5"
    await tab.until(finished, seconds=PATIENCE)
    events, *sums = await tab.eval(
        "['events', 'loads', 'gaps', 'lost', 'twice'].map((id) => document.getElementById(id).textContent)"
    )
    # A second run is silent until it reports more than the first one did: on a busy machine heartbeats count, too.
    assert int(events) >= 150
    assert sums == ["2", "0", "0", "0"]
    chips = "[...document.querySelectorAll('.chips')].map((all) => [...all.children].map((one) => one.textContent))"
    for told in await tab.eval(chips):
        # Five calls take turns, so one may have had no connection then, or lose one more as the server comes back.
        told = [one for one in told if not re.fullmatch(r"\d cuts?", one)]
        assert told[:3] == ["1 reload", "1 kill", "1 re-run"]
        assert told[3].endswith(" from the log")


@pytest.mark.parametrize("trouble", ["cut", pytest.param("restart", marks=pytest.mark.long)])
async def test_the_same_call_on_the_stock_server_is_lost(browser: Browser, page: str, trouble: str) -> None:
    tab = await browser.visit(page)
    await tab.until("document.querySelector('#status').textContent === 'connected'")
    await tab.eval("document.querySelector('#loaves').value = 12; document.querySelector('[value=one]').click()")
    await tab.until(SEEN.format(2) + " && " + SEEN.format(1).replace("ours", "stock"))
    await tab.eval(f"document.querySelector('#{trouble}').click()")
    await tab.until("document.querySelector('.ours').dataset.is === 'done'", seconds=PATIENCE)
    assert await tab.eval("document.querySelector('.stock').dataset.is") == "failed"
    assert await tab.eval("document.querySelector('.stock .said').textContent") == "lost with its connection"


async def test_positions_are_folded(browser: Browser, page: str) -> None:
    tab = await browser.visit(page)
    await tab.until("document.querySelector('#status').textContent === 'connected'")
    await tab.eval("document.querySelector('#loaves').value = 5; document.querySelector('[value=one]').click()")
    await tab.until("document.querySelector('.position').textContent && document.querySelector('.where')")
    shown = "['.position', '#timeline .where'].map((one) => document.querySelector(one).checkVisibility())"
    assert await tab.eval(shown) == [False, False]
    await tab.eval("document.querySelector('.place summary').click(); document.querySelector('#details').click()")
    assert await tab.eval(shown) == [True, True]
    await tab.eval(axe())
    assert await tab.eval(VIOLATIONS) == []


async def test_on_a_phone_a_button_shows_what_it_does(browser: Browser, page: str) -> None:
    """The buttons, and the newest call, are on the screen together."""
    tab = await browser.visit(page)
    await tab.resize(360, 640)
    await tab.until("document.querySelector('#status').textContent === 'connected'")
    await tab.eval("document.querySelector('#loaves').value = 8; document.querySelector('[value=one]').click()")
    await tab.until(SEEN.format(1))
    await tab.eval("document.querySelector('#cut').click()")
    await tab.until("document.querySelector('#latest').textContent.endsWith('lost its connection')")
    places = await tab.eval(
        "['.ours .said', '#latest', '[value=one]', '#reload', '#cut', '#restart'].map((one) => {"
        " const { top, bottom, left, right } = document.querySelector(one).getBoundingClientRect();"
        " return [Math.round(top), Math.round(bottom), Math.round(left), Math.round(right)]; })"
    )
    for top, bottom, left, right in places:
        assert 0 <= top < bottom <= 640, places
        assert 0 <= left < right <= 360, places
    assert places[0][1] <= places[1][0], "the call is not below the buttons"
    assert await tab.eval("document.documentElement.scrollWidth") == 360
    await tab.eval(axe())
    assert await tab.eval(VIOLATIONS) == []


async def test_other_sites_cannot_make_trouble(browser: Browser, page: str) -> None:
    """A plain POST goes out from any page; the header that ours sends does not."""
    other = await browser.visit(browser.origin + "/blank")
    answer = f"fetch('{page}demo/cut', {{method: 'POST', mode: 'no-cors'}}).then((response) => response.type)"
    assert await other.eval(answer) == "opaque"
    stock = f"fetch('{page}stock', {{method: 'POST', headers: {{'content-type': 'application/json'}}, body: '{{}}'}})"
    assert await other.eval(stock + ".then(() => 'read', () => 'refused')") == "refused"
    tab = await browser.visit(page)
    assert await tab.eval("fetch('/demo/cut', {method: 'POST'}).then((response) => response.status)") == 403
