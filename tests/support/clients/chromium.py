"""A real browser for tests: Chromium, driven through Playwright by a script under node."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.serving import ROOT

PACKAGE = ROOT / "clients" / "browser"
DRIVER = ROOT / "tests" / "browser" / "driver.mjs"
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: Takes less than half of the processor time for a test, and has no cache for the way back to a page.
SMALL = "chromium-headless-shell"


def chromium() -> str:
    for name in NAMES:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError("the browser tests need Chromium on the path; on Debian do: apt-get install chromium")


#: Lines of a page's record that a failure shows: what led to it, not the whole story.
SHOWN = 30


class Browser:
    """A browser, and the site of the test page. Its windows are the tests': see `window`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.ready = asyncio.get_running_loop().create_future()
        self.origin = ""

    async def do(self, name: str, /, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps({"n": number, "do": name, **arguments}).encode() + b"\n")
        await self._process.stdin.drain()
        return await answer

    async def listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "ready" in said:
                self.ready.set_result(True)
            elif "error" in said:
                self._waiting.pop(said["n"]).set_exception(RuntimeError(said["error"]))
            else:
                self._waiting.pop(said["n"]).set_result(said["value"])
        for waiting in [self.ready, *self._waiting.values()]:
            if not waiting.done():
                waiting.set_exception(RuntimeError("the browser's driver has ended"))

    @asynccontextmanager
    async def window(self, *, private: bool = True, caches: bool = False) -> AsyncIterator[Browser]:
        """Open tabs in here; the end closes them. A private window shares nothing with any other. A window that
        `caches` keeps a page for the way back."""
        await self.do("window", private=private, caches=caches)
        try:
            yield self
        finally:
            await self.do("clear")

    async def open(self, url: str, *, host: str = "127.0.0.1", init: str = "", **query: str) -> Tab:
        """A tab with the test page, which connects to an MCP server."""
        site = self.origin.replace("127.0.0.1", host)
        return await self.visit(f"{site}/?{urlencode({'url': url, **query})}", init=init)

    async def visit(self, url: str, *, init: str = "") -> Tab:
        return Tab(browser=self, number=await self.do("open", url=url, init=init))

    async def offline(self, on: bool) -> None:
        await self.do("offline", on=on)

    async def responses(self) -> list[list[str]]:
        """Of every response so far: method, the type that the network tab shows, the answer's type, and address."""
        found: list[list[str]] = await self.do("responses")
        return found


@dataclass(kw_only=True)
class Tab:
    """One page, and the pages that come after it in the same tab."""

    browser: Browser
    number: int

    async def eval(self, code: str) -> Any:
        return await self.browser.do("eval", tab=self.number, code=code)

    async def until(self, code: str, *, seconds: float = 60) -> None:
        """Wait until an expression is true in the page."""
        try:
            await self.browser.do("until", tab=self.number, code=code, timeout=seconds * 1000)
        except RuntimeError as error:
            shown = "\n".join(map(str, (await self.record())[-SHOWN:]))
            raise AssertionError(f"{error}\nthe page has shown at last:\n{shown}") from None

    async def reload(self) -> None:
        await self.browser.do("reload", tab=self.number)

    async def goto(self, url: str) -> None:
        await self.browser.do("goto", tab=self.number, url=url)

    async def back(self) -> None:
        await self.browser.do("back", tab=self.number)

    async def resize(self, width: int, height: int) -> None:
        await self.browser.do("resize", tab=self.number, width=width, height=height)

    async def press(self, key: str) -> None:
        await self.browser.do("press", tab=self.number, key=key)

    async def hover(self, selector: str) -> None:
        await self.browser.do("hover", tab=self.number, selector=selector)

    async def shoot(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Take a picture of the page in a window of this size, which it keeps."""
        await self.browser.do("shoot", tab=self.number, path=str(path), width=width, height=800, dark=dark)

    async def freeze(self, on: bool) -> None:
        """Freeze the page as a browser freezes a page in the background, or resume it."""
        await self.browser.do("freeze", tab=self.number, on=on)

    async def duplicate(self) -> Tab:
        return Tab(browser=self.browser, number=await self.browser.do("duplicate", tab=self.number))

    async def close(self) -> None:
        await self.browser.do("close", tab=self.number)

    # The test page

    async def record(self, *kinds: str) -> list[list[Any]]:
        """What the pages of this tab have shown, in order."""
        found: list[list[Any]] = await self.eval("globalThis.lab?.record() ?? null") or []
        return [line for line in found if not kinds or line[0] in kinds]

    async def connected(self) -> str:
        """Wait for the client; returns the session's id."""
        await self.until("globalThis.lab?.session() && lab.status() === 'connected'")
        session: str = await self.eval("lab.session()")
        return session

    async def call(self, tool: str, *, key: str, resume: str = "", **arguments: Any) -> None:
        """Call a tool, or resume a call from a position."""
        words = ", ".join(map(json.dumps, (tool, {"key": key, **arguments}, resume)))
        await self.eval(f"lab.call({words})")

    async def saw(self, *what: Any) -> None:
        """Wait until the page has shown a line that begins so."""
        shown = json.dumps(list(what))
        await self.until(f"globalThis.lab?.record().some((line) => {shown}.every((word, i) => word === line[i]))")

    async def progress(self, key: str) -> list[int]:
        return [line[2] for line in await self.record("progress") if line[1] == key]

    async def answers(self, key: str) -> list[list[Any]]:
        return [line for line in await self.record("result", "error") if line[1] == key]


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Chromium with a fresh profile; it ends with the block."""
    node_modules(PACKAGE)
    with tempfile.TemporaryDirectory(prefix="perdure-chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program("node"),
            DRIVER,
            shutil.which(SMALL) or chromium(),
            chromium(),
            Path(profile),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        browser = Browser(process)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(browser.listen())
            try:
                await browser.ready
                browser.origin = await browser.do("origin")
                yield browser
            finally:
                await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()
