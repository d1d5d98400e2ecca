"""A server that stays away: everything ends, under its own name, and nothing that may have run is sent again (H8)."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError

import perdure
from tests.client.conftest import Progress, numbers, text
from tests.support.clients.raw_http import Peer
from tests.support.processes.cluster import Cluster, cluster
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

BRIEF = perdure.Patience(max_time=1.0, max_tries=5, first_delay=0.05, max_delay=0.1)
LONG = perdure.Patience(max_time=60.0, max_tries=1_000, first_delay=0.05, max_delay=0.1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert isinstance(port, int)
        return port


async def test_a_running_call_whose_server_stays_away_ends_with_outcome_unknown(tmp_path: Path) -> None:
    """Promise 3 where no server is left to keep it; a call made later is unreachable: it certainly did not run."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    arguments = {"n": 4, "gate": str(gate), "pauses": [2], "log": str(log)}
    progress = Progress()
    async with cluster(tmp_path / "log.db", "--retry", "0.05") as site:
        async with perdure.connect(site.server.url, patience=BRIEF) as client:
            call = asyncio.create_task(client.call_tool("pay", arguments, None, progress))
            await until(lambda: progress.seen == numbers(2))
            await site.server.kill()
            with pytest.raises(
                perdure.OutcomeUnknown, check=lambda error: "the server did not come back" in error.reason
            ) as unknown:
                await call
            assert (unknown.value.tool, unknown.value.arguments) == ("pay", arguments)
            with pytest.raises(perdure.Unreachable):
                await client.call_tool("pay", arguments)
            with pytest.raises(MCPError, match="within the limits"):
                await client.list_tools()
        assert len(diary(log)) == 1


async def test_a_server_that_is_back_within_the_limits_is_gone_on_with(tmp_path: Path) -> None:
    """H7 for us: requests that were made while no server listened wait; the server settles what ran."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    progress = Progress()
    async with cluster(tmp_path / "log.db", "--retry", "0.05") as site:
        async with perdure.connect(site.server.url, patience=LONG) as client:
            session = client.session_id
            running = asyncio.create_task(
                client.call_tool("count", {"n": 4, "gate": str(gate), "pauses": [2], "log": str(log)}, None, progress)
            )
            await until(lambda: progress.seen == numbers(2))
            await site.server.kill()
            waiting = asyncio.create_task(client.call_tool("where"))
            open_gate(f"{gate}.2")
            await site.start(port=site.server.port)
            assert text(await running) == "counted to 4"
            assert text(await waiting) == f"{session} {site.server.pid}"
            assert client.session_id == session
        assert progress.seen == numbers(4)
        assert len(diary(log)) == 2


async def test_a_first_handshake_with_nobody_fails_at_once() -> None:
    """Patience is for servers that have answered: a wrong address is reported at once."""
    async with asyncio.timeout(10):
        with pytest.raises(perdure.Unreachable, match="cannot be reached"):
            async with perdure.connect(f"http://127.0.0.1:{free_port()}/mcp"):
                raise AssertionError("there is no server")


async def test_a_process_that_stops_is_asked_again_when_it_says_so(tmp_path: Path) -> None:
    """503 with `Retry-After`: it has not taken the call, so the next process gets it."""
    gate, log = tmp_path / "gate", tmp_path / "diary"
    progress = Progress()
    # The call ends when the gate opens, however long the next process takes to start.
    async with cluster(tmp_path / "log.db", "--retry", "0.05", "--drain-timeout", "100s") as site:
        async with perdure.connect(site.proxy.url, patience=LONG) as client:
            running = asyncio.create_task(
                client.call_tool("pay", {"n": 4, "gate": str(gate), "pauses": [2], "log": str(log)}, None, progress)
            )
            await until(lambda: progress.seen == numbers(2))
            old = site.server
            site.ask_to_stop(old)
            await _is_stopping(site)
            # The server closes what is idle. The client must not send over a connection that is being closed: it could
            # not know whether the call ran.
            connections = site.proxy.accepted
            site.proxy.cut()
            await until(lambda: site.proxy.accepted > connections)
            later = asyncio.create_task(client.call_tool("where"))
            new = await site.start()
            site.proxy.upstreams = (new.port,)
            open_gate(f"{gate}.2")
            assert text(await running) == "counted to 4"
            assert text(await later).endswith(f" {new.pid}")
        assert diary(log) == [("-", old.pid)]


async def _is_stopping(site: Cluster) -> None:
    while await Peer(port=site.server.port).health() != "stopping":
        pass
