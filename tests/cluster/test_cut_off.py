"""A node that is cut off from the PostgreSQL server, which another one reaches, and what its clients are shown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure import Settings
from perdure._core.leases import FREE_SHARE
from tests.support.clients.raw_http import Exchange, Peer, SessionPeer, progress
from tests.support.clients.survey_client import OUTCOME_UNKNOWN
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.nodes_behind_proxies import Node, town
from tests.support.processes.serving import serving
from tests.support.proxies.postgres_proxy import postgres_proxy
from tests.support.servers import gate_file_tools
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

LEASE, TIMEOUT = 3.0, 0.4
"""`lease`, and `store_timeout` of the node that is cut off, scaled down."""


@dataclass(frozen=True, kw_only=True)
class CutOff:
    """A call whose first two numbers are in the log, and whose next two were shown from memory."""

    cut: Node
    other: Node
    session: SessionPeer
    call: Exchange

    async def is_settled(self) -> bool:
        return self.other.site.app.counters.nodes_settled == 1

    async def end(self) -> None:
        """Reach the server again: the node learns that it was buried, and sends its readers away."""
        self.cut.proxy.heal()
        await until(self.cut.has_ended)

    async def resume(self, position: str) -> Exchange:
        """At the other node, as soon as that has settled the call."""
        await until(self.is_settled)
        elsewhere = SessionPeer(port=self.other.site.port, headers=self.session.headers, id=self.session.id)
        return await elsewhere.resume(position)


@asynccontextmanager
async def cut_off(folder: Path, tool: str, *, n: int, pauses: list[int]) -> AsyncIterator[CutOff]:
    async with town(folder) as around:
        cut = await around.add(lease=LEASE, timeout=TIMEOUT, server=gate_file_tools.new_server())
        other = await around.add(lease=LEASE, server=gate_file_tools.new_server())
        session = await Peer(port=cut.site.port).session()
        async with await session.begin_call(tool, n=n, gate=str(folder / "gate"), pauses=pauses) as call:
            await call.until_messages(2)
            cut.proxy.swallow()
            gate_file_tools.open_gate(folder / "gate.2")
            assert progress(await call.until_messages(4)) == [1, 2, 3, 4]
            it = CutOff(cut=cut, other=other, session=session, call=call)
            yield it
            await it.end()


async def test_a_final_answer_is_shown_only_when_it_is_in_the_store(tmp_path: Path) -> None:
    """Promise 3: another node settles the call. The tool's own answer, which came while its node was cut off, is not
    shown beside that."""
    async with cut_off(tmp_path, "pay", n=4, pauses=[2]) as it:
        async with await it.resume(it.call.position) as rest:
            gap, answer = (await rest.answer()).messages
            assert gap["method"] == "notifications/perdure/gap"
            assert answer["error"]["code"] == OUTCOME_UNKNOWN
        await it.end()
        assert len((await it.call.answer()).messages) == 4


async def test_progress_of_a_second_run_does_not_fall_below_what_was_shown(tmp_path: Path) -> None:
    """Promise 4: what was shown from memory is told as a gap, and the position remembers how far the progress was."""
    async with cut_off(tmp_path, "count", n=6, pauses=[2, 4]) as it:
        async with await it.resume(it.call.position) as first:
            [gap] = await first.until_messages(1)
            assert gap["params"]["reason"] == "lost"
            first.cut()
        gate_file_tools.open_gate(tmp_path / "gate.4")
        async with await it.resume(first.position) as second:
            seen = (await second.answer()).messages
        assert progress(seen[:-1]) == [5, 6]
        assert seen[-1]["result"]["content"][0]["text"] == "counted to 6"


async def test_a_server_stops_while_an_answer_waits_for_the_store(tmp_path: Path) -> None:
    """Its client is sent away without the answer, and asks the next process."""
    async with town(tmp_path) as around:
        node = await around.add(
            lease=LEASE, timeout=TIMEOUT, store_timeout=TIMEOUT, server=gate_file_tools.new_server()
        )
        session = await Peer(port=node.site.port).session()
        call = await session.begin_call("pay", n=4, gate=str(tmp_path / "gate"), pauses=[2])
        await call.until_messages(2)
        node.proxy.swallow()
        gate_file_tools.open_gate(tmp_path / "gate.2")
        await call.until_messages(4)
    assert len((await call.answer()).messages) == 4
    await call.aclose()


async def test_a_server_that_stops_waits_until_an_answer_is_written(tmp_path: Path) -> None:
    """For as long as it would wait for the call itself."""
    url = store_url()
    async with postgres_proxy(url) as proxy, serving(GATE_FILE_TOOLS, "--store", proxy.url(url)) as served:
        session = await Peer(port=served.port).session()
        async with await session.begin_call("pay", n=4, gate=str(tmp_path / "gate"), pauses=[2]) as call:
            await call.until_messages(2)
            proxy.refuse()
            gate_file_tools.open_gate(tmp_path / "gate.2")
            await call.until_messages(4)
            served.process.send_signal(signal.SIGTERM)
            await until(lambda: any("its answer is not written" in line for line in served.output))
            proxy.heal()
            answer = (await call.answer()).messages[-1]
        assert answer["result"]["content"][0]["text"] == "counted to 4"
        assert await served.process.wait() == 0


# --- Refused connections


REFUSED_SECONDS = 2.8
"""Longer than a lock may be free that proves a death, where a lease is short; shorter than a third of the default."""


async def test_a_living_node_whose_connections_are_refused_for_a_while_goes_on(tmp_path: Path) -> None:
    """Promises 3 and 11: its lock is free and no beat gets through, and other nodes cannot look up its process."""
    lease = Settings().lease
    assert FREE_SHARE * lease > REFUSED_SECONDS + 1
    async with town(tmp_path) as around:
        refused = await around.add(lease=lease, server=gate_file_tools.new_server(), process=lambda: None)
        other = await around.add(lease=lease, server=gate_file_tools.new_server())
        session = await Peer(port=refused.site.port).session()
        async with await session.begin_call("pay", n=4, gate=str(tmp_path / "gate"), pauses=[2]) as call:
            await call.until_messages(2)
            refused.proxy.refuse()
            await asyncio.sleep(REFUSED_SECONDS)
            refused.proxy.heal()
            gate_file_tools.open_gate(tmp_path / "gate.2")
            messages = (await call.answer()).messages
        assert progress(messages[:-1]) == [1, 2, 3, 4]
        assert messages[-1]["result"]["content"][0]["text"] == "counted to 4"
        assert other.site.app.counters.nodes_settled == 0


async def test_a_killed_process_is_known_to_be_dead_long_before_a_third_of_its_lease(tmp_path: Path) -> None:
    """Promise 11: on the same machine a process is looked up."""
    options = ("--store", store_url(), "--lease", "10m")
    async with serving(GATE_FILE_TOOLS, *options) as doomed, serving(GATE_FILE_TOOLS, *options) as living:
        session = await Peer(port=doomed.port).session()
        async with await session.begin_call("pay", n=2, gate=str(tmp_path / "gate"), pauses=[1]) as call:
            await call.until_messages(1)
            await doomed.kill()
        there = SessionPeer(port=living.port, headers=session.headers, id=session.id)
        async with await there.resume(call.position) as rest:
            [answer] = await rest.until_messages(1)
        assert answer["error"]["code"] == OUTCOME_UNKNOWN
