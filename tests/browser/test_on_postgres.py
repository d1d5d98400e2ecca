"""A page is reloaded while one of two nodes on a PostgreSQL server is killed, in real Chromium (R11, R12)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.browser.test_reload import whole
from tests.support.clients.chromium import Browser
from tests.support.processes.cluster import cluster
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.stores.postgres import store_url

pytestmark = [pytest.mark.anyio, pytest.mark.long]

OUTCOME_UNKNOWN = -31001


async def test_a_reload_over_a_killed_node(browser: Browser, tmp_path: Path, gate: str) -> None:
    """R11, R12, promise 3: the same session, each report once, and one answer for each call: a result of the tool that
    may run again, an unknown outcome of the one that may not."""
    options = ("--cors-origin", browser.origin, "--retry", "100ms")
    notes = tmp_path / "diary"
    async with cluster(store_url(), *options, processes=2) as servers:
        doomed, living = servers.servers
        servers.proxy.upstreams = (doomed.port,)
        tab = await browser.open(servers.proxy.url)
        session = await tab.connected()
        for tool in ("count", "pay"):
            await tab.call(tool, key=tool, n=4, gate=gate, pauses=[2], log=str(notes))
            await tab.saw("progress", tool, 2)
        servers.proxy.upstreams = (living.port,)
        await asyncio.gather(tab.reload(), doomed.kill())
        open_gate(f"{gate}.2")
        await whole(tab, "count", 4)
        await tab.saw("error", "pay", OUTCOME_UNKNOWN)
        assert await tab.progress("pay") == [1, 2]
        assert await tab.connected() == session
        assert await tab.eval("lab.ask('where')") == f"{session} {living.pid}"
        assert servers.sessions() == [(session, 1)]
        assert diary(notes) == [("count", doomed.pid), ("pay", doomed.pid), ("count", living.pid)]
