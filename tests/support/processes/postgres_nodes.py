"""Nodes on one PostgreSQL store, a client that keeps them busy, and the judgement on what the client got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from perdure.store.postgres.store import PostgresStore
from tests.support.clients.outage_clients import Ledger, Survivor, Told
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.lost_tail import LOST
from tests.support.stores.shared_store import BUSY_SECONDS


@dataclass(frozen=True, kw_only=True)
class Node:
    site: Site
    shop: ToolServer


class PostgresNodes:
    """Nodes that come one by one."""

    def __init__(self, url: str, stack: AsyncExitStack, **settings: Any) -> None:
        self.nodes: list[Node] = []
        self._url = url
        self._stack = stack
        self._settings: dict[str, Any] = {"complaint": LOST, **settings}
        self._survivors: list[Survivor] = []

    async def start(self, **settings: Any) -> Node:
        """One node more. What the others do is seen by it, and the other way round."""
        shop, store = ToolServer(subscribes=True), PostgresStore(self._url, timeout=BUSY_SECONDS)
        site = await self._stack.enter_async_context(serve(shop.server, store=store, **(self._settings | settings)))
        self.nodes.append(Node(site=site, shop=shop))
        await until(lambda: all(len(node.site.app.other_nodes()) >= len(self.nodes) - 1 for node in self.nodes))
        return self.nodes[-1]

    async def join(self, at: int = 0) -> Survivor:
        """A client whose session is opened at a node."""
        survivor = Survivor(await self.nodes[at].site.join(), [node.site for node in self.nodes])
        self._survivors.append(survivor)
        self._stack.push_async_callback(survivor.aclose)
        return survivor

    def adopt(self, survivor: Survivor) -> None:
        """Let a client of earlier nodes, which has been away, come back to these."""
        survivor.peers = [survivor.peers[0].through(node.site) for node in self.nodes]
        self._survivors.append(survivor)
        self._stack.push_async_callback(survivor.aclose)
        survivor.come_back()

    def meet(self, survivor: Survivor) -> None:
        """Let a client reach the nodes that came after it."""
        survivor.peers += [survivor.peers[0].through(node.site) for node in self.nodes[len(survivor.peers) :]]

    def open(self, gate: str) -> None:
        for node in self.nodes:
            node.shop.open(gate)

    async def has_health(self, status: str) -> bool:
        """Whether each node says this of itself."""
        return all([await self.health(number) == status for number in range(len(self.nodes))])

    async def health(self, number: int) -> str:
        """The health that a node reports."""
        site = self.nodes[number].site
        answer = await site.http.get(f"http://127.0.0.1:{site.port}/healthz")
        return str(answer.json()["status"])

    async def is_well(self) -> None:
        await until(lambda: self.has_health("ok"))

    async def judge(self, ledger: Ledger, *, whole: bool) -> None:
        """Wait until no call is open, then judge clients and store."""
        for survivor in self._survivors:
            await survivor.ended()
        await until(lambda: asyncio.to_thread(lambda: ledger.open_calls() == 0))
        for survivor in self._survivors:
            survivor.judge()
        await asyncio.to_thread(lambda: ledger.judge(*self._survivors, whole=whole))


@asynccontextmanager
async def fleet(url: str, **settings: Any) -> AsyncIterator[PostgresNodes]:
    """Two nodes."""
    async with AsyncExitStack() as stack:
        it = PostgresNodes(url, stack, **settings)
        for _ in range(2):
            await it.start()
        yield it


@dataclass(frozen=True, kw_only=True)
class Busy:
    """A client in the middle of things: it has seen five numbers of each count, two notices and a question."""

    client: Survivor
    counts: list[Told]
    """Calls that report as far as 20: one at each node. They wait after 5, 10 and 15."""
    asking: Told
    """A call that waits for an answer to "Why?"."""
    alone: Told
    """The standalone stream, read at the second node."""

    @classmethod
    async def begin(cls, nodes: PostgresNodes, name: str = "g") -> Busy:
        client = await nodes.join()
        alone = await client.listen(at=1)
        counts = [
            await client.call("count", id=number, at=number - 1, n=20, gate=name, pauses=[5, 10, 15])
            for number in (1, 2)
        ]
        asking = await client.call("ask", id=3, at=1, question="Why?")
        assert await client.result("announce", n=2) == "announced 2"
        busy = cls(client=client, counts=counts, asking=asking, alone=alone)
        await busy.saw(5, 2)
        await until(lambda: asking.asks)
        return busy

    async def saw(self, number: int, notice: int) -> None:
        """Wait until the client has seen this far."""
        await until(lambda: all(told.progress[-1:] == [number] for told in self.counts))
        await until(lambda: self.alone.notices[-1:] == [notice])

    async def stored(self, has: Callable[[Told], int]) -> None:
        """Wait until the server has everything that the client has seen."""
        streams = [*self.counts, self.asking, self.alone]
        await until(lambda: asyncio.to_thread(lambda: all(has(t) >= t.events[-1][0].seq for t in streams)))

    async def finish(self, nodes: PostgresNodes, name: str = "g") -> None:
        """Let everything come to its end."""
        for number in (5, 10, 15):
            nodes.open(f"{name}/{number}")
        await self.client.answer_all(**{"Why?": "Because"})
        await self.client.ended()
        for told in self.counts:
            assert told.text == "counted to 20"
        assert self.asking.text == "Because"
