"""The page of `make demo`, as a visitor uses it: calls go on over a reload, dropped connections and a killed server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from tests.support.chromium import PACKAGE, Browser
from tests.support.node import node_modules, program
from tests.support.serving import ROOT, python_path

pytestmark = pytest.mark.anyio

#: A server that is killed is up again after two seconds or so; the waits in between grow.
PATIENCE = 90


@pytest.fixture(scope="module")
def built() -> None:
    node_modules(PACKAGE)
    subprocess.run([program("node"), PACKAGE / "build.mjs"], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
async def page(built: None) -> AsyncIterator[str]:
    """The demo without its scenes; gives the page's address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "examples.demo", "--page", "--port", "0"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            if re.fullmatch(r"http://127\.0\.0\.1:\d+/", line.decode().strip()):
                break
        yield line.decode().strip()
    finally:
        process.terminate()
        await process.communicate()


async def test_calls_go_on_whatever_the_visitor_does(browser: Browser, page: str) -> None:
    tab = await browser.visit(page)
    await tab.until("document.querySelector('#status').textContent === 'connected'")
    await tab.eval("document.querySelector('#loaves').value = 20; document.querySelector('[value=five]').click()")
    seen = "[...document.querySelectorAll('.bar')].every((bar) => bar.ariaValueNow >= {})"
    await tab.until(seen.format(2))
    await tab.reload()
    await tab.until("document.querySelectorAll('.call').length === 5 && " + seen.format(5))
    await tab.eval("document.querySelector('#cut').click()")
    await tab.until(seen.format(9))
    await tab.eval("document.querySelector('#restart').click()")
    finished = "document.querySelectorAll('.call[data-is=done]').length === 5"
    await tab.until(finished, seconds=PATIENCE)
    sums = await tab.eval(
        "['events', 'loads', 'gaps', 'lost', 'twice'].map((id) => document.getElementById(id).textContent)"
    )
    assert sums == ["105", "2", "0", "0", "0"]


async def test_other_sites_cannot_make_trouble(browser: Browser, page: str) -> None:
    """A plain POST goes out from any page; the header that ours sends does not."""
    other = await browser.visit(browser.origin + "/blank")
    answer = f"fetch('{page}demo/cut', {{method: 'POST', mode: 'no-cors'}}).then((response) => response.type)"
    assert await other.eval(answer) == "opaque"
    tab = await browser.visit(page)
    assert await tab.eval("fetch('/demo/cut', {method: 'POST'}).then((response) => response.status)") == 403
