"""This process as a node: shows that it lives, sees who has died, and has what they left behind settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from perdure._core.ids import NodeId
from perdure.neighbours import Neighbours
from perdure.observe import note
from perdure.settling import Settler
from perdure.store.base import Liveness

ROUND = 0.5
"""Seconds between two looks at who lives: the calls of a dead process are settled within about a second."""

_BEATS = 5
"""Heartbeats in a lease: some may be late or lost before anybody takes this node for dead."""


class Node:
    """The rounds of one node."""

    def __init__(
        self,
        *,
        liveness: Liveness,
        neighbours: Neighbours,
        settler: Settler,
        lease: float,
        facts: Callable[[], bytes],
        lapsed: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._liveness = liveness
        self._neighbours = neighbours
        self._settler = settler
        self._every = min(lease / _BEATS, 3.0)
        self._facts = facts
        self._lapsed = lapsed
        self._monotonic = monotonic
        self._beaten = -self._every
        self._failed = False

    async def run(self) -> None:
        """Runs for ever."""
        while self._liveness.holds:
            try:
                await self.go_round()
                self._failed = False
            except Exception as failure:
                # The store fails, which is told elsewhere; or one node cannot be settled, which must not stop us.
                level = logging.DEBUG if self._failed else logging.WARNING
                note(level, "node.round", f"other nodes could not be looked after: {failure}")
                self._failed = True
            await asyncio.sleep(min(ROUND, self._every))
        note(logging.ERROR, "node.lapsed", "this node's lease has lapsed: it may write nothing more, and stops")
        self._lapsed()

    async def go_round(self) -> None:
        if self._monotonic() - self._beaten >= self._every:
            await self._liveness.beat(self._facts())
            self._beaten = self._monotonic()
        await self._neighbours.meet()
        for dead in await self._liveness.dead():
            await self._settle(dead)
        await self._settler.give_up()
        self._neighbours.look()

    async def _settle(self, dead: NodeId) -> None:
        note(logging.WARNING, "node.dead", f"node {dead[:8]} has died; its calls are being settled", node=dead)
        await self._settler.settle(dead)
        await self._neighbours.meet()
