"""Keeps this process alive as a node of the store, and has the calls of dead nodes settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from perdure._core.ids import NodeId
from perdure._core.leases import BEATS_IN_LEASE
from perdure.cluster.peers import Peers
from perdure.cluster.settler import Settler
from perdure.cluster.watcher import Watcher
from perdure.errors import StoreLost
from perdure.store.base import Liveness
from perdure.telemetry.events import log_event

ROUND = 0.5
"""Seconds between two looks at who lives: the calls of a dead process are settled within about a second."""

_LONGEST_PAUSE = 3.0
"""Seconds between two beats at the most: operators see the numbers of all nodes as of their last beat."""


class Node:
    """Beats and goes round. Beats go on while a dead node is settled, however long that takes."""

    def __init__(
        self,
        *,
        liveness: Liveness,
        peers: Peers,
        settler: Settler,
        watcher: Watcher,
        lease: float,
        facts: Callable[[], bytes],
        on_lapsed: Callable[[], None],
        on_lost: Callable[[StoreLost], None],
    ) -> None:
        self._liveness = liveness
        self._peers = peers
        self._settler = settler
        self._watcher = watcher
        self._every = min(lease / BEATS_IN_LEASE, _LONGEST_PAUSE)
        self._facts = facts
        self._on_lapsed = on_lapsed
        self._on_lost = on_lost
        self._failing: set[str] = set()
        self._settling: set[NodeId] = set()

    async def run(self) -> None:
        """Runs until the lease has lapsed."""
        pause = min(ROUND, self._every)
        tasks = [
            asyncio.create_task(self._repeat("this node could not show that it lives", self._beat, self._every)),
            asyncio.create_task(self._repeat("other nodes could not be looked after", self.go_round, pause)),
        ]
        try:
            while self._liveness.holds:  # noqa: ASYNC110 - it ends by a clock, without an event
                await asyncio.sleep(pause)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        log_event(logging.ERROR, "node.lapsed", "this node's lease has lapsed: it may write nothing more, and stops")
        self._on_lapsed()

    async def _repeat(self, what: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
        while True:
            await self._attempt(what, what, work())
            await asyncio.sleep(pause)

    async def _attempt(self, key: str, what: str, work: Awaitable[None]) -> None:
        """Do something that may fail and is tried again in the next round. `key` names it, so that it is logged
        once."""
        try:
            await work
            self._failing.discard(key)
        except StoreLost as failure:
            self._on_lost(failure)
        except Exception as failure:
            # The store fails, which the journal logs; or one node cannot be settled, which must not stop us.
            level = logging.DEBUG if key in self._failing else logging.WARNING
            log_event(level, "node.round", f"{what}: {failure!r}")
            self._failing.add(key)

    async def _beat(self) -> None:
        # One that hangs must not be the last: the store may be back long before the lease has lapsed.
        async with asyncio.timeout(2 * self._every):
            await self._liveness.beat(self._facts())

    async def go_round(self) -> None:
        await self._attempt("meet", "the other nodes could not be seen", self._settle_dead())
        await self._settler.go_round()  # which survives whatever fails in it
        self._watcher.go_round()

    async def _settle_dead(self) -> None:
        dead = await self._peers.meet()
        self._settling &= set(dead)
        for node in dead:
            await self._attempt(node, f"node {node[:8]} could not be settled", self._settle(node))

    async def _settle(self, dead: NodeId) -> None:
        if dead not in self._settling:
            self._settling.add(dead)
            if dead in self._peers.departed:
                log_event(
                    logging.INFO, "node.departed", f"node {dead[:8]} has left; its calls are taken over", node=dead
                )
            else:
                log_event(
                    logging.WARNING, "node.dead", f"node {dead[:8]} has died; its calls are being settled", node=dead
                )
        await self._settler.settle_node(dead)
        await self._peers.meet()
