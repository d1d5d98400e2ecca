"""The console's page for tests: opened in a tab, and asked what it shows."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.clients.chromium import PACKAGE, Browser, Tab
from tests.support.processes.console_process import Console
from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.serving import ROOT

SOURCE = ROOT / "clients" / "console"
BUILT = ROOT / "src" / "perdure" / "console" / "page"

#: Kept by the page itself: what the browser has refused, because it is not of the console's own files.
WATCH = "addEventListener('securitypolicyviolation', (event) => (globalThis.refused ??= []).push(event.blockedURI));"


def build(folder: Path) -> str:
    """Build the page into a folder; gives what the build said."""
    node_modules(PACKAGE)
    command = [program("node"), SOURCE / "build.mjs", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _seen(selector: str) -> str:
    """The elements that a person can see, as an expression."""
    shown = "one.checkVisibility({ visibilityProperty: true })"
    return f"[...document.querySelectorAll({json.dumps(selector)})].filter((one) => {shown})"


@dataclass(kw_only=True)
class Page:
    """A tab that shows the console."""

    tab: Tab

    async def until(self, code: str, *, seconds: float = 60) -> None:
        """Wait until an expression is true in the page."""
        await self.tab.browser.do("poll", tab=self.tab.number, code=code, timeout=seconds * 1000)

    async def shows(self, selector: str, text: str, *, seconds: float = 60) -> None:
        """Wait until an element says this."""
        said = "one.innerText.replace(/\\s+/g, ' ')"
        await self.until(f"{_seen(selector)}.some((one) => {said}.includes({json.dumps(text)}))", seconds=seconds)

    async def texts(self, selector: str) -> list[str]:
        said = "one.innerText.replace(/\\s+/g, ' ').trim()"
        found: list[str] = await self.tab.eval(f"{_seen(selector)}.map((one) => {said})")
        return found

    async def click(self, selector: str, text: str = "") -> None:
        """Click the first of these elements that says this, as soon as it is there."""
        wanted = f"{_seen(selector)}.find((one) => one.textContent.includes({json.dumps(text)}))"
        await self.until(f"!!{wanted}")
        await self.tab.eval(f"{wanted}.click()")

    async def fill(self, name: str, value: str) -> None:
        """Type into a field of the filters, or choose there."""
        await self.tab.eval(
            f"(() => {{ const field = document.forms[0].elements.namedItem({json.dumps(name)});"
            f" field.value = {json.dumps(value)};"
            " for (const type of ['input', 'change']) field.dispatchEvent(new Event(type, { bubbles: true })); })()"
        )

    async def goto(self, hash_: str) -> None:
        await self.tab.eval(f"void (location.hash = {json.dumps(hash_)})")


async def open_page(browser: Browser, console: Console, hash_: str = "#/") -> Page:
    """The page as its operator opens it: by the address that the console has printed."""
    address = f"http://127.0.0.1:{console.port}/?token={console.token}{hash_}"
    page = Page(tab=await browser.visit(address, init=WATCH))
    await page.shows("#status", "live")
    return page


#: What axe finds wrong in a page into which its source was put.
VIOLATIONS = "axe.run().then(({ violations }) => violations.map((one) => [one.id, one.nodes[0].html]))"


def axe() -> str:
    """The source of axe-core, which checks a page for accessibility."""
    return Path(node_modules(PACKAGE) / "axe-core" / "axe.min.js").read_text()
