"""Tells how the store is: its size, its oldest event, what a check finds, whether nodes hold what is not written."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from perdure._core.jsonrpc import JsonObject
from perdure.console.kept import Kept
from perdure.console.node_watch import NodeWatch
from perdure.console.session_index import SessionIndex
from perdure.console.store_view import StoreView
from perdure.store.records import Extent

PAUSE = 15.0
"""Seconds between two looks: sizes change slowly, and with PostgreSQL a check makes connections of its own."""

REST = 20.0
"""A pause is at least so many times as long as the last look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    extent: Extent
    problems: tuple[str, ...]


class Health:
    """Looks at the store as a whole while a page is open."""

    def __init__(
        self,
        view: StoreView,
        index: SessionIndex,
        nodes: NodeWatch,
        *,
        allow_end: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._index = index
        self._nodes = nodes
        self._allow_end = allow_end
        self._kept = Kept(self._look, pause=PAUSE, rest=REST, monotonic=monotonic)

    async def aclose(self) -> None:
        await self._kept.aclose()

    async def _look(self) -> Found:
        store = await self._view.current()
        facts = await self._view.upkeep.check()
        return Found(extent=await store.extent(), problems=tuple(fact.problem for fact in facts if fact.problem))

    async def object(self) -> JsonObject:
        snapshot = await self._index.snapshot()
        found = await self._kept.get()
        extent = found.extent
        return {
            "store": self._view.upkeep.shown,
            "version": version("perdure"),
            "allow_end": self._allow_end,
            "degraded": await self.is_degraded(),
            "size_bytes": extent.size,
            "events": extent.events,
            "events_exact": extent.is_exact,
            "oldest": extent.oldest,
            "counts": dict(snapshot.counts),
            "problems": list(found.problems),
        }

    async def is_degraded(self) -> bool | None:
        """Whether a node goes on from memory because the store fails, as far as nodes have told. `None`: none has."""
        holders = await self._view.upkeep.holders()
        told = [one.numbers.degraded for one in await self._nodes.nodes() if one.alive]
        if holders or any(told):
            return True
        return False if told and (holders is not None or False in told) else None
