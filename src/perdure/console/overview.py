"""Shows a store as a whole: its nodes, its health, and how much happens in it."""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from perdure._core.ids import NodeId
from perdure._core.jsonrpc import JsonObject
from perdure.console.sessions import CachedRead, SessionList, StoreView
from perdure.store.records import Extent, NodeRecord
from perdure.telemetry.counters import BUCKETS, CALL_BUCKETS
from perdure.telemetry.prometheus import Snapshot, has_left, read_facts

NODES_PAUSE, NODES_REST = 1.0, 4.0
"""Seconds between two reads of the nodes, and times the last read's own time, at least: nodes write their numbers every
three seconds, a death is found within one, and with PostgreSQL a read makes a connection."""

HEALTH_PAUSE, HEALTH_REST = 15.0, 20.0
"""The same for the store's health: sizes change slowly, and with PostgreSQL a check makes connections of its own."""

GONE_SECONDS = 600.0
"""How long a node is shown after it has left the store: another node has taken over, and the operator wants to know."""

MAX_GONE = 64
"""Nodes that are shown so: what a few rolling restarts leave."""

TICK = 1.0
"""Seconds between two ticks."""

WINDOW = 60.0
"""Seconds of which latencies are shown: enough calls that the slowest hundredth means something."""

COUNTED: Mapping[str, Sequence[str]] = {
    "events": ("events_appended",),
    "calls_begun": ("calls_accepted",),
    "calls_ended": ("calls_answered", "calls_cancelled", "calls_settled"),
}
"""The counts of a tick, and the counters of a node that make up each."""

TIMED = {"call": CALL_BUCKETS, "append": BUCKETS}
"""The latency of a tick: of calls if nodes report it, else of writing to the store."""


# --- Nodes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """A node at the last read."""

    record: NodeRecord
    numbers: Snapshot
    alive: bool


class NodeWatch:
    """Reads the nodes while a page is open, and keeps those that are gone for a while."""

    def __init__(
        self, view: StoreView, sessions: SessionList, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._view = view
        self._sessions = sessions
        self._monotonic = monotonic
        self.nodes = CachedRead(self._read, pause=NODES_PAUSE, rest=NODES_REST, monotonic=monotonic).get
        self._before: dict[NodeId, NodeState] = {}
        self._gone: dict[NodeId, tuple[NodeState, float, float]] = {}
        """The nodes that are no longer in the store: their last state, and when that was found, by both clocks."""

    async def _read(self) -> Sequence[NodeState]:
        """Return the nodes that have joined and are not buried."""
        store = await self._view.current()
        living = set(await self._view.maintenance.living())
        found = {
            record.id: NodeState(
                record=record, numbers=read_facts(record), alive=record.id in living and not has_left(record)
            )
            for record in await store.nodes()
        }
        now = self._monotonic()
        self._gone |= {node: (state, time.time(), now) for node, state in self._before.items() if node not in found}
        recent = [gone for gone in self._gone.items() if now - gone[1][2] < GONE_SECONDS and gone[0] not in found]
        self._gone = dict(recent[-MAX_GONE:])
        self._before = found
        return list(found.values())

    async def objects(self) -> list[JsonObject]:
        """Return the nodes as the page shows them: living ones first, then dead ones, then those that are gone."""
        nodes = await self.nodes()
        calls = (await self._sessions.snapshot()).calls
        holders = await self._view.maintenance.holders() or ()  # a node whose store fails cannot write that into it
        shown = [_node_object(node, "alive" if node.alive else "dead") for node in nodes]
        for node in shown:
            node["calls"] = sum(call.node == node["id"] for call in calls)
            if node["id"] in holders:
                node["degraded"] = True
        shown.sort(key=lambda node: not node["alive"])
        return [*shown, *(_node_object(node, "gone", at) for node, at, _ in reversed(self._gone.values()))]

    async def is_degraded(self) -> bool | None:
        """Whether a node goes on from memory because the store fails, as far as nodes report it; `None` if no node
        does."""
        holders = await self._view.maintenance.holders()
        reported = [node.numbers.degraded for node in await self.nodes() if node.alive]
        if holders or any(reported):
            return True
        return False if reported and (holders is not None or False in reported) else None


def _node_object(node: NodeState, state: str, gone: float | None = None) -> JsonObject:
    """`state`: alive; dead (its calls are to be settled); gone (nothing of it is left: another node has settled its
    calls). A node that has left in good order is `left`, before and after its calls are taken over."""
    numbers = node.numbers
    return {
        "id": node.record.id,
        "alive": state == "alive",
        "state": "left" if has_left(node.record) else state,
        "since": numbers.started,
        "gone": gone,
        "version": numbers.version or None,
        "degraded": numbers.degraded,
        "sessions": sum(numbers.sessions.values()),
        "streams": sum(numbers.streams.values()),
        "readers": numbers.readers,
        "calls": 0,
    }


# --- The store --------------------------------------------------------------------------------------------------------


class StoreStatus:
    """Measures and checks the store while a page is open."""

    def __init__(self, view: StoreView, sessions: SessionList, nodes: NodeWatch, *, allow_end: bool) -> None:
        self._view = view
        self._sessions = sessions
        self._nodes = nodes
        self._allow_end = allow_end
        self._cached = CachedRead(self._read, pause=HEALTH_PAUSE, rest=HEALTH_REST)

    async def _read(self) -> tuple[Extent, list[str]]:
        store = await self._view.current()
        facts = await self._view.maintenance.check()
        return await store.extent(), [fact.problem for fact in facts if fact.problem]

    async def object(self) -> JsonObject:
        snapshot = await self._sessions.snapshot()
        extent, problems = await self._cached.get()
        return {
            "store": self._view.maintenance.shown,
            "version": version("perdure"),
            "allow_end": self._allow_end,
            "degraded": await self._nodes.is_degraded(),
            "size_bytes": extent.size,
            "events": extent.events,
            "events_exact": extent.is_exact,
            "oldest": extent.oldest,
            "counts": dict(snapshot.counts),
            "problems": problems,
        }


# --- Counts and latencies ---------------------------------------------------------------------------------------------


class Totals:
    """Adds up the counters that nodes write with their beats, every three seconds at the most. A node that is killed
    takes along what it has counted since its last beat. Pure: the time is an argument."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        """Since the first read of the nodes."""
        self._last: dict[NodeId, tuple[dict[str, int], dict[str, Sequence[int]]]] | None = None
        self._latencies: deque[tuple[float, str, Sequence[int]]] = deque()
        """The time of a beat, the name of a histogram, and what the beat has added to it."""

    def add(self, nodes: Sequence[NodeState], *, now: float) -> None:
        numbers = {}
        for node in nodes:
            counters, seconds = node.numbers.counters, node.numbers.seconds
            summed = {name: sum(counters.get(part, 0) for part in parts) for name, parts in COUNTED.items()}
            timed = {name: seconds.get(name, ((), 0.0))[0] for name in TIMED}
            # A node of another release may have other bounds.
            fitting = {name: within for name, within in timed.items() if len(within) == len(TIMED[name]) + 1}
            numbers[node.record.id] = summed, fitting
        # Counts from before the first read are left out; a node that comes later has begun at 0.
        last = numbers if self._last is None else self._last
        for id_, (counts, histograms) in numbers.items():
            counts_before, histograms_before = last.get(id_, ({}, {}))
            for name, count in counts.items():
                self.counts[name] += max(0, count - counts_before.get(name, 0))
            for name, within in histograms.items():
                before = histograms_before.get(name, [0] * len(within))
                if any(added := [max(0, b - a) for a, b in zip(before, within, strict=True)]):
                    self._latencies.append((now, name, added))
        self._last = numbers
        while self._latencies and self._latencies[0][0] < now - WINDOW:
            self._latencies.popleft()

    def latency(self) -> JsonObject | None:
        """Return the median and the slowest hundredth, in seconds; `None` if nothing was timed within the window."""
        for name, bounds in TIMED.items():
            beats = [added for _, of, added in self._latencies if of == name]
            counts = [sum(column) for column in zip(*beats, strict=True)]
            if any(counts):
                return {"of": name, "p50": quantile(counts, bounds, 0.5), "p99": quantile(counts, bounds, 0.99)}
        return None


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """Return the time within which a share of a histogram's entries was done, as far as its bounds tell."""
    wanted = math.ceil(share * sum(counts))
    within = list(itertools.accumulate(counts))
    place = next(place for place, count in enumerate(within) if count >= wanted)
    if place == len(bounds):
        return bounds[-1]
    low = bounds[place - 1] if place else 0.0
    before = within[place - 1] if place else 0
    return low + (bounds[place] - low) * (wanted - before) / counts[place]


class Ticker:
    """Makes the ticks of live views, and notices when their lists should be read again."""

    def __init__(self, sessions: SessionList, nodes: NodeWatch) -> None:
        self._sessions = sessions
        self._nodes = nodes
        self._totals = Totals()

    async def tick(self) -> JsonObject:
        nodes, snapshot = await self._nodes.nodes(), await self._sessions.snapshot()
        self._totals.add(nodes, now=time.monotonic())
        return {
            "what": "tick",
            "time": time.time(),
            **self._totals.counts,
            **{name: snapshot.counts[name] for name in ("running", "sessions", "calls")},
            "nodes": sum(node.alive for node in nodes),
            "degraded": await self._nodes.is_degraded(),
            "latency": self._totals.latency(),
        }

    async def follow(self) -> AsyncGenerator[JsonObject]:
        """Yield a tick each second, and `changed` when a list should be read again."""
        lists: object = None
        while True:
            yield await self.tick()
            nodes = await self._nodes.nodes()
            before, lists = lists, (self._sessions.version, {(node.record.id, node.alive) for node in nodes})
            if before not in (None, lists):
                yield {"what": "changed"}
            await asyncio.sleep(TICK)
