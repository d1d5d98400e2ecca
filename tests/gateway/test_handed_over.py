"""The requests of a session run at its home, where its child is, whichever node its client speaks to."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import Program, Upstream
from perdure.settings import Settings
from perdure.store.interface import Store
from tests.support.clients.wire_client import LATEST, Message, Peer, text_of
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import Site, serve, until
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio


@dataclass(kw_only=True)
class Nodes:
    """Two nodes of one stdio server on one store. A session begins at the first."""

    folder: Path
    stack: AsyncExitStack
    new_store: Callable[[], Store]
    sites: list[Site] = field(default_factory=list)
    stacks: list[AsyncExitStack] = field(default_factory=list)

    @property
    def starts(self) -> list[str]:
        """The pids of the children that were started."""
        file = self.folder / "starts"
        return file.read_text().split() if file.exists() else []

    async def start(self) -> Site:
        command = (sys.executable, scripted_stdio.__file__, f"starts={self.folder / 'starts'}")
        upstream = Upstream(name="scripted", program=Program(argv=command, cwd=self.folder))
        hosted = host_upstream(upstream, Settings())
        self.stacks.append(await self.stack.enter_async_context(AsyncExitStack()))
        self.sites.append(await self.stacks[-1].enter_async_context(serve(hosted, store=self.new_store())))
        return self.sites[-1]


@pytest.fixture
def new_store(tmp_path: Path) -> Callable[[], Store]:
    return lambda: SharedStore(tmp_path / "log.db")


@pytest.fixture
async def nodes(tmp_path: Path, new_store: Callable[[], Store]) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        nodes = Nodes(folder=tmp_path, stack=stack, new_store=new_store)
        await nodes.start()
        await nodes.start()
        yield nodes


def call(number: int, *steps: Message, tool: str = "plain", token: str | None = None) -> Message:
    params: dict[str, Any] = {"name": tool, "arguments": {"do": list(steps)}}
    if token is not None:
        params["_meta"] = {"progressToken": token}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


async def test_a_call_at_another_node_runs_in_the_one_child(nodes: Nodes) -> None:
    """G51."""
    here, there = nodes.sites
    peer = await Peer(here, LATEST).initialize()
    pid = text_of((await (await peer.post(call(1, {"pid": True}))).rest())[-1])
    wire = await peer.through(there).post(call(2, {"progress": 3}, {"pid": True}, token="t"))
    *progress, answer = await wire.rest()
    assert [message["params"]["progress"] for message in progress] == [1, 2, 3]
    assert text_of(answer) == pid
    assert nodes.starts == [pid]


async def test_a_question_is_answered_and_a_call_cancelled_through_either_node(nodes: Nodes) -> None:
    """G51."""
    here, there = nodes.sites
    peer = await Peer(here, LATEST).initialize()
    elsewhere = peer.through(there)
    wire = await elsewhere.post(call(1, {"ask": "roots/list", "params": {}}))
    ask = await wire.message()
    result = {"roots": [{"uri": "file:///work"}]}
    await elsewhere.send({"jsonrpc": "2.0", "id": ask["id"], "result": result})
    assert "file:///work" in text_of((await wire.rest())[-1])
    wire = await elsewhere.post(call(2, {"progress": 1}, {"hang": True}, token="t"))
    assert (await wire.message())["params"]["progress"] == 1
    await elsewhere.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}})
    assert (await wire.rest())[-1]["error"]["code"] == -32800
    assert len(nodes.starts) == 1


async def test_a_notification_at_another_node_reaches_the_child(nodes: Nodes) -> None:
    here, there = nodes.sites
    peer = await Peer(here, LATEST).initialize()
    notified = {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}
    assert (await peer.through(there).send(notified)).status_code == 202
    wanted = '"notifications/roots/list_changed"'

    async def heard() -> bool:
        return wanted in text_of((await (await peer.post(call(1, {"heard": True}))).rest())[-1])

    await until(heard)
    assert len(nodes.starts) == 1


async def test_a_node_becomes_the_home_when_the_first_has_left(nodes: Nodes) -> None:
    here, there = nodes.sites
    peer = await Peer(here, LATEST).initialize()
    first = text_of((await (await peer.post(call(1, {"pid": True}))).rest())[-1])
    await nodes.stacks[0].aclose()
    wire = await peer.through(there).post(call(2, {"pid": True}))
    second = text_of((await wire.rest())[-1])
    assert [first, second] == nodes.starts
