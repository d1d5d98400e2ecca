"""Builds a serving process from its parts, runs its chores, and takes it apart."""

import asyncio
import contextlib
import contextvars
import itertools
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from perdure._core.durable_calls import parse_task_rules
from perdure._core.early_answers import parse_answer_rules
from perdure._core.ids import new_node_id
from perdure._core.limits import Quota, share_of
from perdure._core.retention import Limits
from perdure.cluster.node import Node, Watcher
from perdure.cluster.settler import Settler
from perdure.errors import StoreError, StoreLost
from perdure.log.chores import cancel_all, keep_going
from perdure.log.hub import Hub, ReadMarks
from perdure.log.journal import Journal
from perdure.log.nodes import OtherNodes
from perdure.log.remote_readers import RemoteReaders
from perdure.runtime.base import Runtimes, ServerChanges
from perdure.sessions.context import CallWaiters, ServerContext
from perdure.sessions.early_answers import EarlyAnswers
from perdure.sessions.housekeeping import Housekeeping
from perdure.sessions.keyed_calls import KeyedCalls
from perdure.sessions.listening import Listening
from perdure.sessions.registry import SessionRegistry, ToolHints, has_tasks, numbers
from perdure.sessions.session_tasks import SessionTasks
from perdure.settings import Settings
from perdure.store import notes
from perdure.store.interface import Liveness, Store
from perdure.telemetry import prometheus as metrics
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import PeerLog, log_event

CALL_KEYS = "call-keys"
CALL_KEY_BYTES = 32
"""The name and the length of the secret of which the ids of calls with a key are made."""

_DRAIN_POLL = 0.05
"""Seconds until a stop that waits for running calls checks them again."""

_LAST_READ_SECONDS = 0.25
"""Seconds that a client has to list the tool that it got an answer from (`http.endpoint.READ_AFTER_ANSWER`)."""

_LEARN_SECONDS = 1.0
"""How long a stop takes to find out which of the running calls the next process may run again."""


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """Holds the parts of a running server process, and ends it."""

    context: ServerContext
    sessions: SessionRegistry
    settler: Settler
    tools: ToolHints
    """Which tools may run again, as far as a stop has learnt."""
    liveness: Liveness
    loop: asyncio.AbstractEventLoop
    listening: Listening | None = None
    """`None` where no client of 2026-07-28 is served."""

    async def drain(self, is_busy: Callable[[], bool], end_others: Callable[[], None]) -> None:
        """Wait for running calls, for `drain_timeout` at most, and for tasks and calls with a key, if those have more
        time. In between `end_others` ends everything else."""
        settings = self.context.settings
        await self.learn_tools()
        self.leave_at_steps()
        if is_busy():
            await self._wait_while(is_busy, settings.drain_timeout)
            if not is_busy():
                await asyncio.sleep(_LAST_READ_SECONDS)
                await self._wait_while(is_busy, _LEARN_SECONDS)
        if settings.task_drain > settings.drain_timeout and has_tasks(self.sessions):
            await self.learn_tools()
            self.end(but_tasks=True)
            end_others()
            await self._wait_while(lambda: has_tasks(self.sessions), settings.task_drain - settings.drain_timeout)

    def leave_at_steps(self) -> None:
        """Let tools that go on after their finished steps stand still at the next one, and other nodes go on there.
        Called again and again, for calls that begin or stand still later."""
        if self._is_outlived:
            self.settler.is_leaving = True
            self.tools.leave_at_steps(self.sessions)

    async def _wait_while(self, is_busy: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while is_busy():
                    await asyncio.sleep(_DRAIN_POLL)
                    self.leave_at_steps()

    async def stop(self) -> None:
        """End what runs, as soon as it is known which calls may run again."""
        await self.learn_tools()
        self.end()

    async def learn_tools(self) -> None:
        if self.context.journal.is_lost:  # no next process knows of these calls
            return
        try:
            async with asyncio.timeout(_LEARN_SECONDS):
                await self.tools.learn_running(self.sessions)
        except Exception as failure:  # a stop goes on: calls of tools that are not known get their answer
            log_event(logging.WARNING, "stop.tools", f"it is not known which running calls may run again: {failure!r}")

    @property
    def _is_outlived(self) -> bool:
        """Whether there may be a next process that knows of this one's calls."""
        return self.context.store.shared and not self.context.journal.is_lost

    def end(self, *, but_tasks: bool = False) -> None:
        """End what runs: calls that may run again are left to the next process, the others get their answer.
        `but_tasks`: those that their clients can ask for again (`has_tasks`) run on."""
        outlived = self._is_outlived
        self.tools.end_calls(self.sessions, "the server is stopping", outlived=outlived, but_tasks=but_tasks)
        self.context.hub.end_all()


@asynccontextmanager
async def running(
    runtimes: Runtimes,
    *,
    store: Store,
    settings: Settings,
    counters: Counters,
    on_buried: Callable[[], None],
    on_lost: Callable[[StoreLost], None],
    server_changes: ServerChanges | None = None,
) -> AsyncIterator[ServerProcess]:
    """Join the store as a node, and do the chores until the end. `on_buried` and `on_lost` are those of `Node`."""
    async with AsyncExitStack() as stack:
        context, readers, liveness = await _build(runtimes, store, settings, counters)

        @stack.push_async_callback
        async def leave() -> None:
            # The last beat reports to the node that finds the rest of this one that it has not died.
            try:
                await liveness.beat(metrics.LEFT)
                await store.leave(context.node)
            except StoreError as failure:
                sentence = f"this node could not leave the store, others will take it for dead: {failure!r}"
                log_event(logging.WARNING, "node.left", sentence)

        stack.push_async_callback(context.journal.aclose)
        stack.callback(context.hub.marks.close)
        started = context.clock()

        def facts() -> bytes:
            number = 0 if listening is None else listening.number
            return metrics.facts(replace(numbers(context, sessions), started=started, listening=number))

        async def beat() -> None:
            await liveness.beat(facts())

        listening = None if server_changes is None else Listening(context, server_changes, beat=beat)
        if listening is not None:
            stack.push_async_callback(listening.aclose)  # after the sessions, whose tools may report changes to the end
        if context.early is not None:
            stack.push_async_callback(context.early.aclose)
        sessions = SessionRegistry(context)
        stack.push_async_callback(sessions.aclose)
        settler = Settler(context, sessions)
        watcher = Watcher(context, sessions, settler, readers, listening)
        stack.push_async_callback(readers.aclose)
        stack.push_async_callback(watcher.aclose)
        stack.callback(store.subscribe(context.node, watcher.on_hint))
        if listening is not None:
            await listening.start()
        node = Node(context, liveness, settler, watcher, facts=facts, on_buried=on_buried, on_lost=on_lost)
        housekeeping = Housekeeping(context, sessions)
        chores = (context.hub.watch, housekeeping.tend, housekeeping.sweep, node.run)
        await stack.enter_async_context(doing(*chores))
        yield ServerProcess(
            context=context,
            sessions=sessions,
            settler=settler,
            tools=ToolHints(context),
            liveness=liveness,
            loop=asyncio.get_running_loop(),
            listening=listening,
        )


@asynccontextmanager
async def doing(*chores: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do chores that run for ever, as long as the block runs."""
    tasks = [asyncio.create_task(keep_going(chore)) for chore in chores]
    try:
        yield
    finally:
        await cancel_all(tasks)


async def _build(
    runtimes: Runtimes, store: Store, settings: Settings, counters: Counters
) -> tuple[ServerContext, RemoteReaders, Liveness]:
    """Join the store, and build what the sessions share."""
    random = secrets.token_bytes
    node = new_node_id(random)
    fence = await store.join(node)
    secret = await notes.keep(store, CALL_KEYS, random(CALL_KEY_BYTES))
    liveness = store.liveness(node, lease=settings.lease, monotonic=time.monotonic)
    journal = Journal(
        store, settings, counters, claim=liveness.node_claim, lapses=store.lapses, on_holding=liveness.hold
    )
    nodes = OtherNodes(node=node, liveness=liveness)
    arrivals, lag = itertools.count(1), settings.max_stream_events
    readers = RemoteReaders(node=node, store=store, journal=journal, nodes=nodes, arrivals=arrivals, lag=lag)
    peer_log = PeerLog()
    hub = Hub(
        settings,
        counters,
        peer_log,
        ReadMarks(journal),
        readers,
        journal,
        arrivals=arrivals,
        clock=store.clock,
        monotonic=time.monotonic,
        random=random,
    )
    context = ServerContext(
        runtimes=runtimes,
        store=store,
        journal=journal,
        hub=hub,
        settings=settings,
        counters=counters,
        node=node,
        fence=fence,
        nodes=nodes,
        clock=store.clock,
        random=random,
        ask_ids=itertools.count(1),
        task_context=contextvars.copy_context(),
        limits=Limits(
            streams=settings.max_streams,
            session_events=settings.max_session_events,
            answers=settings.max_answers,
            size=settings.max_session_bytes,
        ),
        waiters=CallWaiters(store.hint, lambda: nodes.others),
        work=Quota(settings.max_work, each=share_of(settings.max_work, settings.max_share)),
        running=Quota(sys.maxsize, each=settings.max_principal_calls),  # in all, `max_work` bounds them
        early=EarlyAnswers(rules) if (rules := parse_answer_rules(settings.answer_within)) else None,
        tasks=SessionTasks(parse_task_rules(settings.tasks), kept=min(settings.task_ttl, settings.replay_window)),
        keyed=KeyedCalls(secret, store.clock),
        peer_log=peer_log,
    )
    return context, readers, liveness
