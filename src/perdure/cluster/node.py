"""This process as a node: shows that it lives, sees who has died, and has what they left behind settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from perdure._core.ids import NodeId
from perdure.cluster.peers import Neighbours
from perdure.cluster.settler import Settler
from perdure.errors import StoreLost
from perdure.store.base import Liveness
from perdure.telemetry.events import log_event

ROUND = 0.5
"""Seconds between two looks at who lives: the calls of a dead process are settled within about a second."""

_BEATS = 5
"""Heartbeats in a lease: some may be late or lost before anybody takes this node for dead."""


class Node:
    """The rounds of one node. Beats go on while somebody is settled, however long that takes."""

    def __init__(
        self,
        *,
        liveness: Liveness,
        neighbours: Neighbours,
        settler: Settler,
        lease: float,
        facts: Callable[[], bytes],
        lapsed: Callable[[], None],
        lost: Callable[[StoreLost], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._liveness = liveness
        self._neighbours = neighbours
        self._settler = settler
        self._every = min(lease / _BEATS, 3.0)
        self._facts = facts
        self._lapsed = lapsed
        self._lost = lost
        self._failing: set[str] = set()
        self._settling: set[NodeId] = set()

    async def run(self) -> None:
        """Runs for ever."""
        pause = min(ROUND, self._every)
        tasks = [
            asyncio.create_task(self._repeat("this node could not show that it lives", self._beat, self._every)),
            asyncio.create_task(self._repeat("other nodes could not be looked after", self.go_round, pause)),
        ]
        try:
            while self._liveness.holds:  # noqa: ASYNC110 - it ends by a clock, nobody tells
                await asyncio.sleep(pause)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        log_event(logging.ERROR, "node.lapsed", "this node's lease has lapsed: it may write nothing more, and stops")
        self._lapsed()

    async def _repeat(self, what: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
        while True:
            await self._attempt(what, what, work())
            await asyncio.sleep(pause)

    async def _attempt(self, key: str, what: str, work: Awaitable[None]) -> None:
        """Do something that may fail and is tried again in the next round; `key` names it, so that it is told once."""
        try:
            await work
            self._failing.discard(key)
        except StoreLost as failure:
            self._lost(failure)
        except Exception as failure:
            # The store fails, which is told elsewhere; or one node cannot be settled, which must not stop us.
            level = logging.DEBUG if key in self._failing else logging.WARNING
            log_event(level, "node.round", f"{what}: {failure!r}")
            self._failing.add(key)

    async def _beat(self) -> None:
        # One that hangs must not be the last: the store may be back long before anybody notices.
        async with asyncio.timeout(2 * self._every):
            await self._liveness.beat(self._facts())

    async def go_round(self) -> None:
        await self._attempt("meet", "the other nodes could not be seen", self._settle_dead())
        await self._settler.go_round()  # which survives whatever fails in it
        self._neighbours.look()

    async def _settle_dead(self) -> None:
        dead = await self._neighbours.meet()
        self._settling &= set(dead)
        for node in dead:
            await self._attempt(node, f"node {node[:8]} could not be settled", self._settle(node))

    async def _settle(self, dead: NodeId) -> None:
        if dead not in self._settling:
            self._settling.add(dead)
            if dead in self._neighbours.departed:
                log_event(
                    logging.INFO, "node.departed", f"node {dead[:8]} has left; its calls are taken over", node=dead
                )
            else:
                log_event(
                    logging.WARNING, "node.dead", f"node {dead[:8]} has died; its calls are being settled", node=dead
                )
        await self._settler.settle(dead)
        await self._neighbours.meet()
