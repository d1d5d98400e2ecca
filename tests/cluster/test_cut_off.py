"""A node that is cut off from the PostgreSQL server, which another one reaches, and what its clients are shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import crashbox
from tests.support.faulty_town import Node, town
from tests.support.raw import Exchange, Peer, SessionPeer, progress
from tests.support.site import until
from tests.support.survey import OUTCOME_UNKNOWN

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
        cut = await around.add(lease=LEASE, timeout=TIMEOUT, server=crashbox.new_server())
        other = await around.add(lease=LEASE, server=crashbox.new_server())
        session = await Peer(port=cut.site.port).session()
        async with await session.begin_call(tool, n=n, gate=str(folder / "gate"), pauses=pauses) as call:
            await call.until_messages(2)
            cut.proxy.swallow()
            crashbox.open_gate(folder / "gate.2")
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
        crashbox.open_gate(tmp_path / "gate.4")
        async with await it.resume(first.position) as second:
            seen = (await second.answer()).messages
        assert progress(seen[:-1]) == [5, 6]
        assert seen[-1]["result"]["content"][0]["text"] == "counted to 6"


async def test_a_server_stops_while_an_answer_waits_for_the_store(tmp_path: Path) -> None:
    """Its client is sent away without the answer, and asks the next process."""
    async with town(tmp_path) as around:
        node = await around.add(lease=LEASE, timeout=TIMEOUT, server=crashbox.new_server())
        session = await Peer(port=node.site.port).session()
        call = await session.begin_call("pay", n=4, gate=str(tmp_path / "gate"), pauses=[2])
        await call.until_messages(2)
        node.proxy.swallow()
        crashbox.open_gate(tmp_path / "gate.2")
        await call.until_messages(4)
    assert len((await call.answer()).messages) == 4
    await call.aclose()
