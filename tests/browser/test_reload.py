"""A page is reloaded in the middle of its calls, in real Chromium (R11, R12)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.chromium import Browser, browsing
from tests.support.cluster import Cluster, cluster
from tests.support.crashbox import open_gate

pytestmark = pytest.mark.anyio


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as it:
        yield it


@pytest.fixture
async def servers(browser: Browser, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path / "log.db", "--retry", "100ms", "--cors-origin", browser.origin) as it:
        yield it


@pytest.mark.parametrize("sdk", ["1", "2"])
async def test_a_reload_in_the_middle_of_a_call(browser: Browser, servers: Cluster, tmp_path: Path, sdk: str) -> None:
    """R11, R12: the same session, each report once, and the result."""
    tab = await browser.open(servers.proxy.url, sdk=sdk)
    session = await tab.connected()
    await tab.call("count", key="a", n=6, gate=str(tmp_path / "gate"), pauses=[2, 4])
    await tab.saw("progress", "a", 2)
    await tab.reload()
    open_gate(tmp_path / "gate.2")
    await tab.saw("recovered", "a")
    await tab.saw("progress", "a", 4)
    assert await tab.connected() == session
    assert await tab.eval("lab.server()") == "crashbox"
    open_gate(tmp_path / "gate.4")
    await tab.saw("result", "a")
    assert await tab.progress("a") == [1, 2, 3, 4, 5, 6]
    assert await tab.answers("a") == [["result", "a", "counted to 6"]]
    assert len(servers.sessions()) == 1
