"""Nodes on one PostgreSQL server, each with a proxy of its own between, and clients whose stories are judged."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer

from perdure.store.postgres import nodes
from perdure.store.postgres.store import PostgresStore
from tests.support.clients.raw_http import Peer
from tests.support.clients.survey_client import Client, assert_sound, new_server
from tests.support.proxies.postgres_proxy import PostgresProxy, Role, postgres_proxy
from tests.support.servers.in_process import Site, serve, until
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import BUSY_SECONDS

FAULTS = "the store fails|lease has lapsed|took this node for dead|buried|steps are lost"
"""The errors that nodes log in these stories; any other one fails the test."""


@dataclass(frozen=True, kw_only=True)
class Node:
    site: Site
    proxy: PostgresProxy

    async def health(self) -> str:
        return await Peer(port=self.site.port).health()

    async def is_well(self) -> bool:
        """It says so, and has all that it had: the listener is back."""
        return await self.health() == "ok" and bool(self.proxy.links(Role.LISTENER))

    async def has_ended(self) -> bool:
        """It has learnt that other nodes have buried it."""
        return await self.health() == "stopping"

    async def is_degraded(self) -> bool:
        return await self.health() == "degraded"


class ProxiedNodes:
    """`look` reads the store over a connection of its own."""

    def __init__(self, url: str, folder: Path, look: PostgresStore, stack: AsyncExitStack) -> None:
        self.url = url
        self.folder = folder
        self.look = look
        self.nodes: list[Node] = []
        self._numbers = itertools.count(1)
        self._stack = stack

    async def add(
        self,
        *,
        timeout: float = BUSY_SECONDS,
        server: MCPServer | None = None,
        process: Callable[[], str | None] = nodes.process_name,
        **settings: Any,
    ) -> Node:
        """One node more. `timeout`: how long a statement may take; a busy machine is not a failing server. `process`:
        the name of its process, none for one that other nodes cannot look up."""
        proxy = await self._stack.enter_async_context(postgres_proxy(self.url))
        store = PostgresStore(proxy.url(self.url), timeout=timeout, process=process)
        site = await self._stack.enter_async_context(
            serve(server or new_server(), store=store, complaint=FAULTS, **settings)
        )
        node = Node(site=site, proxy=proxy)
        self.nodes.append(node)
        await until(lambda: all(len(it.site.app.other_nodes()) == len(self.nodes) - 1 for it in self.nodes))
        return node

    def client(self, near: Node, far: Node | None = None) -> Client:
        key = f"survey-{next(self._numbers)}"
        return Client(near=near.site.port, far=(far or near).site.port, key=key, folder=self.folder)

    async def judge(self, *clients: Client, is_known: bool = True) -> None:
        for client in clients:
            await assert_sound(self.look, client, is_known=is_known)

    async def tell(self, near: Node, far: Node | None = None) -> Client:
        """One whole story, judged."""
        client = self.client(near, far)
        await client.tell()
        await self.judge(client)
        return client


@asynccontextmanager
async def town(folder: Path, url: str | None = None) -> AsyncIterator[ProxiedNodes]:
    """A town without nodes. `folder` has what its tools write down."""
    url = url or store_url()
    async with AsyncExitStack() as stack:
        look = await stack.enter_async_context(PostgresStore(url, timeout=BUSY_SECONDS))
        yield ProxiedNodes(url, folder, look, stack)
