"""Holds the parts of a running server that all its sessions share."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure._core.ids import Fence, Kind, NodeId, RandomBytes, SessionId, StreamId, new_stream_id
from perdure._core.limits import Quota
from perdure._core.retention import Limits
from perdure.log.hub import Hub
from perdure.log.journal import Journal, Steps
from perdure.log.peers import Peers
from perdure.runtime.base import Runtimes
from perdure.settings import Settings
from perdure.store.interface import Store
from perdure.store.records import StreamRecord
from perdure.store.steps import Step
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import PeerLog

if TYPE_CHECKING:
    from perdure.sessions.early_answers import EarlyAnswers
    from perdure.sessions.keyed_calls import KeyedCalls
    from perdure.sessions.session_tasks import SessionTasks


class CallWaiters:
    """Wakes the requests of this process that wait for a change of a durable call, at any node."""

    def __init__(self, hint: Callable[[NodeId, Sequence[StreamId]], None], others: Callable[[], Iterable[NodeId]]):
        self._hint = hint
        self._others = others
        self._waiting: dict[StreamId, set[asyncio.Event]] = {}
        self.is_over = False
        """The process ends: requests no longer wait."""

    @contextlib.contextmanager
    def watch(self, stream: StreamId) -> Iterator[asyncio.Event]:
        """Return an event that every change sets, during the block."""
        waiting, changed = self._waiting.setdefault(stream, set()), asyncio.Event()
        waiting.add(changed)
        try:
            yield changed
        finally:
            waiting.discard(changed)
            if not waiting:
                del self._waiting[stream]

    def wake(self, streams: Iterable[StreamId]) -> None:
        for stream in streams if self._waiting else ():
            for changed in self._waiting.get(stream, ()):
                changed.set()

    def wake_all(self) -> None:
        self.wake(list(self._waiting))

    def end(self) -> None:
        self.is_over = True
        self.wake_all()

    def tell(self, stream: StreamId) -> None:
        """Wake the requests that wait for a call that runs here, at all nodes."""
        self.wake((stream,))
        for node in self._others():
            self._hint(node, (stream,))


class Stamp(NamedTuple):
    """The moment at which a record was read: the record is current while the stamp stays equal."""

    store: object
    doubts: int
    """The journal's: a store that has lost something may count revisions twice."""


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    runtimes: Runtimes
    store: Store
    journal: Journal
    hub: Hub
    settings: Settings
    counters: Counters
    node: NodeId
    fence: Fence
    nodes: Peers
    clock: Callable[[], float]
    """The store's clock: the same for all nodes, and it does not jump."""
    random: RandomBytes
    ask_ids: itertools.count[int]
    task_context: contextvars.Context
    """The context of the start. Sticky requests are repeated in it, not in that of the request that loads a runtime."""
    limits: Limits
    waiters: CallWaiters
    work: Quota
    """The memory of messages that are being handled, in bytes."""
    running: Quota
    """The requests of sessions and tasks that run here."""
    early: EarlyAnswers | None
    """The rules for clients that are answered before their calls end, if there are any."""
    tasks: SessionTasks
    keyed: KeyedCalls
    """The calls of sessions that have a key."""
    peers: PeerLog
    """Logs what peers cause, at a limited rate."""
    change_listeners: list[Callable[[str, Mapping[str, Any] | None], None]] = field(default_factory=list)
    """Get the changes that tools report: they concern every listener, in any session."""

    def report_change(self, method: str, params: Mapping[str, Any] | None) -> None:
        for listener in self.change_listeners:
            listener(method, params)

    def stamp(self) -> Stamp:
        return Stamp(self.store.stamp(), self.journal.doubts)

    def put(self, *steps: Step) -> None:
        """Write steps, if there are any, for which no caller waits."""
        if steps:
            self.journal.put(Steps(steps))

    def new_stream(self, session: SessionId, kind: Kind) -> StreamRecord:
        """The record of a stream that this node is about to open."""
        stream, now = new_stream_id(self.random), self.clock()
        return StreamRecord(id=stream, session=session, kind=kind, node=self.node, fence=self.fence, opened=now)
