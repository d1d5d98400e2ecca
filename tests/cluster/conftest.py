"""Two nodes on one SQLite file: two applications, each with a store object, a port and a server of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.store.interface import Store
from tests.support.clients.wire_client import Peer
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.postgres_roles import operator
from tests.support.stores.shared_store import SharedStore, shared_address

__all__ = ["operator"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of the two: where it answers, and what its tools saw."""

    site: Site
    shop: ToolServer


@dataclass(frozen=True, kw_only=True)
class Pair:
    a: Node
    b: Node

    async def join(self) -> tuple[Peer, Peer]:
        """A client whose session was opened at `a`, as it reaches either node."""
        peer = await self.a.site.join()
        return peer, peer.through(self.b.site)


class Start:
    """Starts pairs, with settings of the test's choice."""

    def __init__(self, stack: AsyncExitStack, path: Path, kind: Callable[[str], Store] = SharedStore) -> None:
        self._stack = stack
        self._path = path
        self._kind = kind

    async def __call__(self, shop: Callable[[], ToolServer] = ToolServer, **options: Any) -> Pair:
        nodes = [await self._node(shop(), **options) for _ in range(2)]
        await until(lambda: all(len(node.site.app.other_nodes()) == 1 for node in nodes))
        return Pair(a=nodes[0], b=nodes[1])

    async def _node(self, shop: ToolServer, **options: Any) -> Node:
        store = self._kind(str(self._path / "log.db"))
        site = await self._stack.enter_async_context(serve(shop.server, store=store, **options))
        return Node(site=site, shop=shop)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:
        yield Start(stack, tmp_path)


@pytest.fixture
async def pair(start: Start) -> Pair:
    return await start()


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Where processes of a test keep their store."""
    return shared_address(tmp_path / "log.db")
