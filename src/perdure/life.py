"""One life of the serving process: its parts put together, its chores, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mcp.server.lowlevel.server import Server

from perdure import metrics
from perdure._core.ids import NodeId, new_node_id
from perdure._core.retention import Limits
from perdure.chores import keep_going
from perdure.errors import StoreError, StoreLost
from perdure.handover import Handover
from perdure.house import House
from perdure.hub import Hub
from perdure.journal import Journal
from perdure.letters import Letters
from perdure.neighbours import Neighbours
from perdure.node import Node
from perdure.observe import Counters, PeerLog, note
from perdure.read_marks import ReadMarks
from perdure.sessions import Sessions
from perdure.settings import Settings
from perdure.settling import Settler
from perdure.store.base import Liveness, Store
from perdure.tending import Tending
from perdure.work import Work

_DRAIN_LOOK = 0.05
"""Seconds between two looks whether calls still run, while a stop waits for them."""


_LEARN_SECONDS = 1.0
"""How long a stop takes to find out which of the running calls the next process may run again."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """The parts of a process that serves."""

    house: House
    sessions: Sessions
    settler: Settler
    handover: Handover
    liveness: Liveness
    loop: asyncio.AbstractEventLoop

    async def drain(self) -> None:
        """Send idle clients elsewhere and wait for running calls, for `drain_timeout` at most."""
        self.house.hub.end_idle()
        await self._learn_tools()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.house.settings.drain_timeout):
                while self.sessions.running_calls():  # noqa: ASYNC110 - calls end at many places, and this once
                    await asyncio.sleep(_DRAIN_LOOK)

    async def stop(self) -> None:
        """End what runs, as soon as it is known which calls may run again."""
        await self._learn_tools()
        self.end()

    async def _learn_tools(self) -> None:
        try:
            async with asyncio.timeout(_LEARN_SECONDS):
                await self.handover.learn_tools()
        except Exception as failure:  # a stop goes on: calls of tools that are not known get their answer
            note(logging.WARNING, "stop.tools", f"it is not known which running calls may run again: {failure!r}")

    def end(self) -> None:
        """End what runs: calls that may run again are left to the next process, the others get their answer."""
        self.handover("the server is stopping")
        self.house.hub.end_all()


@asynccontextmanager
async def living(
    server: Server[Any],
    state: object,
    *,
    store: Store,
    settings: Settings,
    counters: Counters,
    lapsed: Callable[[], None],
    lost: Callable[[StoreLost], None],
) -> AsyncIterator[Life]:
    """Join the store as a node, and do the chores until the end. `lapsed` is called if the node's claims do not hold
    any more, `lost` (again and again) if the store cannot be used any more."""
    async with AsyncExitStack() as stack:
        house, neighbours, liveness = await _furnish(server, state, store, settings, counters)
        stack.push_async_callback(_leave, house, liveness)
        stack.push_async_callback(house.journal.aclose)
        stack.callback(house.hub.marks.close)
        sessions = Sessions(house)
        stack.push_async_callback(sessions.aclose)
        settler = Settler(house, sessions, monotonic=time.monotonic)
        stack.push_async_callback(neighbours.aclose)
        stack.callback(neighbours.begin(Letters(house, sessions, settler, neighbours)))
        life = Life(
            house=house,
            sessions=sessions,
            settler=settler,
            handover=Handover(sessions, outlived=store.shared),
            liveness=liveness,
            loop=asyncio.get_running_loop(),
        )
        node = Node(
            liveness=liveness,
            neighbours=neighbours,
            settler=settler,
            lease=settings.lease,
            facts=lambda: metrics.facts(sessions.numbers()),
            lapsed=lapsed,
            lost=lost,
            monotonic=time.monotonic,
        )
        tending = Tending(house, sessions)
        chores = (house.hub.watch, tending.tend, tending.sweep, node.run)
        stack.push_async_callback(_cancel, [asyncio.create_task(keep_going(chore)) for chore in chores])
        yield life


async def _furnish(
    server: Server[Any], state: object, store: Store, settings: Settings, counters: Counters
) -> tuple[House, Neighbours, Liveness]:
    """Everything that the sessions share."""
    random = secrets.token_bytes
    node: NodeId = new_node_id(random)
    fence = await store.join(node)
    liveness = store.liveness(node, lease=settings.lease, monotonic=time.monotonic)
    journal = Journal(store, settings, counters, holds=lambda: liveness.holds, on_holding=liveness.hold)
    peers, marks = PeerLog(), ReadMarks(journal)
    hub = Hub(settings, counters, peers, marks, clock=store.clock, monotonic=time.monotonic, random=random)
    lag = settings.max_stream_events
    neighbours = Neighbours(node=node, store=store, journal=journal, hub=hub, liveness=liveness, lag=lag)
    house = House(
        server=server,
        lifespan_state=state,
        store=store,
        journal=journal,
        hub=hub,
        settings=settings,
        counters=counters,
        node=node,
        fence=fence,
        neighbours=neighbours,
        clock=store.clock,
        random=random,
        ask_ids=itertools.count(1),
        context=contextvars.copy_context(),
        limits=Limits(
            streams=settings.max_streams,
            session_events=settings.max_session_events,
            answers=settings.max_answers,
            size=settings.max_session_bytes,
        ),
        work=Work(settings.max_work),
        peers=peers,
    )
    return house, neighbours, liveness


async def _leave(house: House, liveness: Liveness) -> None:
    """Leave the store. What is left behind is found with the word that this node has not died."""
    try:
        await house.journal.within_time(liveness.beat(metrics.LEFT))
        await house.journal.within_time(house.store.leave(house.node))
    except StoreError as failure:
        note(logging.WARNING, "node.left", f"this node could not take its leave; others will see it: {failure!r}")


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
