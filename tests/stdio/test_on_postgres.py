"""The bridge of a desktop host and one of two nodes on a PostgreSQL server are killed (T10, promise 3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stdio.served_hosts import RESUMED, sentences
from tests.stdio.stdio_bridges import a_host
from tests.support.processes.cluster import cluster
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.stores.postgres import store_url

pytestmark = [pytest.mark.anyio, pytest.mark.long]


async def test_the_next_bridge_goes_on_at_the_node_that_lives(folder: Path) -> None:
    """T10, promise 3: the same session; the tool that may run again has its result, the other an unknown outcome, and
    both are reported to the host once."""
    gate, notes = str(folder / "gate"), folder / "diary"
    async with cluster(store_url(), "--retry", "100ms", processes=2) as servers:
        doomed, living = servers.servers
        servers.proxy.upstreams = (doomed.port,)
        async with a_host(folder, servers.proxy.url) as host:
            first = await host.session()
            [(session, _)] = servers.sessions()
            for tool in ("count", "pay"):
                first.begin_call(tool, token=tool, n=4, gate=gate, pauses=[2], log=str(notes), key=tool)
            await first.until(lambda: {("count", 2), ("pay", 2)} <= set(first.progress()), "the progress of both")
            servers.proxy.upstreams = (living.port,)
            await first.kill()
            await doomed.kill()
            open_gate(f"{gate}.2")
            after = await host.session()
            assert (await sentences(after))[0] == RESUMED
            await after.until(lambda: len(after.reports()) >= 2, "two reports")
            found = {
                report["tool"]: report["error"]["data"]["outcome"]
                if "error" in report
                else report["result"]["content"][0]["text"]
                for report in after.reports()
            }
            assert (len(after.reports()), found) == (2, {"count": "counted to 4", "pay": "unknown"})
            assert await after.call("where") == f"{session} {living.pid}"
            assert servers.sessions() == [(session, 2)]
    assert sorted(diary(notes)) == sorted([("count", doomed.pid), ("count", living.pid), ("pay", doomed.pid)])
