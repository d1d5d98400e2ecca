"""Watches which nodes of a store live, what each one has, and which of them are gone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure._core.ids import NodeId
from perdure._core.jsonrpc import JsonObject
from perdure.console.kept import Kept
from perdure.console.session_index import SessionIndex
from perdure.console.store_view import StoreView
from perdure.store.records import NodeRecord
from perdure.telemetry.prometheus import Snapshot, has_left, read_facts

PAUSE = 1.0
"""Seconds between two looks: nodes write their numbers every three seconds, and a death is found within one."""

REST = 4.0
"""A pause is at least so many times as long as the last look: with PostgreSQL a look makes a connection."""

GONE_SECONDS = 600.0
"""How long a node is shown after it has left the store: another node has taken over, and the operator wants to know."""

MAX_GONE = 64
"""Nodes that are shown so: what a few rolling restarts leave behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A node at the last look."""

    record: NodeRecord
    numbers: Snapshot
    alive: bool


class NodeWatch:
    """Looks at the nodes while a page is open."""

    def __init__(
        self,
        view: StoreView,
        index: SessionIndex,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._index = index
        self._clock = clock
        self._monotonic = monotonic
        self._kept = Kept(self._look, pause=PAUSE, rest=REST, monotonic=monotonic)
        self._before: dict[NodeId, Seen] = {}
        self._gone: dict[NodeId, tuple[Seen, float, float]] = {}
        """The nodes that were seen and are not in the store any more: how they were, when that was found, by both
        clocks."""

    async def nodes(self) -> Sequence[Seen]:
        """The nodes that have joined and are not buried."""
        return await self._kept.get()

    async def aclose(self) -> None:
        await self._kept.aclose()

    async def _look(self) -> Sequence[Seen]:
        store = await self._view.current()
        living = set(await self._view.upkeep.living())
        found = {
            record.id: Seen(
                record=record,
                numbers=read_facts(record),
                alive=record.id in living and not has_left(record),
            )
            for record in await store.nodes()
        }
        now = self._monotonic()
        self._gone |= {node: (seen, self._clock(), now) for node, seen in self._before.items() if node not in found}
        recent = [gone for gone in self._gone.items() if now - gone[1][2] < GONE_SECONDS and gone[0] not in found]
        self._gone = dict(recent[-MAX_GONE:])
        self._before = found
        return list(found.values())

    async def objects(self) -> list[JsonObject]:
        """The nodes as the page shows them: those that live first, then the dead ones, then those that are gone."""
        seen = await self.nodes()
        calls = (await self._index.snapshot()).calls
        holders = await self._view.upkeep.holders() or ()  # a node whose store fails cannot write that into it
        shown = [_node(one, "alive" if one.alive else _end(one)) for one in seen]
        for node in shown:
            node["calls"] = sum(call.node == node["id"] for call in calls)
            if node["id"] in holders:
                node["degraded"] = True
        shown.sort(key=lambda node: not node["alive"])
        gone = [
            _node(one, "left" if has_left(one.record) else "gone", at) for one, at, _ in reversed(self._gone.values())
        ]
        return [*shown, *gone]


def _end(one: Seen) -> str:
    return "left" if has_left(one.record) else "dead"


def _node(one: Seen, state: str, gone: float | None = None) -> JsonObject:
    """`state`: alive; dead (its calls are to be settled); left (in good order, and its calls are to be taken over);
    gone (nothing of it is left: it has left, or another node has settled its calls)."""
    numbers = one.numbers
    return {
        "id": one.record.id,
        "alive": state == "alive",
        "state": state,
        "since": numbers.started,
        "gone": gone,
        "version": numbers.version or None,
        "degraded": numbers.degraded,
        "sessions": _total(numbers.sessions),
        "streams": _total(numbers.streams),
        "readers": numbers.readers,
        "calls": 0,
    }


def _total(numbers: object) -> int | None:
    """Another release may tell anything."""
    if not isinstance(numbers, dict):
        return None
    return sum(number for number in numbers.values() if isinstance(number, int))
