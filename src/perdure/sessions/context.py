"""Holds the parts of a running server that all its sessions share."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure._core.ids import Fence, Kind, NodeId, RandomBytes, SessionId, StreamId, new_stream_id
from perdure._core.limits import Quota
from perdure._core.retention import Limits
from perdure._core.states import CallState
from perdure.log.hub import Hub
from perdure.log.journal import Journal, Steps
from perdure.log.nodes import OtherNodes
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
    from perdure.sessions.ledger import Call
    from perdure.sessions.session_tasks import SessionTasks


READ_AGAIN = 2.0
"""Seconds after which a request that waits for a call reads the store again: for its progress, and in case it missed a
hint."""


class CallWatch:
    """Waits for the changes of one call."""

    def __init__(self, until: float) -> None:
        self.changed = asyncio.Event()
        self._until = until

    async def again(self) -> bool:
        """Wait until the call is to be read again. Returns `False`, at once, if the time has passed."""
        left = self._until - asyncio.get_running_loop().time()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, READ_AGAIN)):
                    await self.changed.wait()
            self.changed.clear()
        return left > 0


class CallWaiters:
    """Wakes the requests of this process that wait for a change of a call, at any node."""

    def __init__(self, hint: Callable[[NodeId, Sequence[StreamId]], None], others: Callable[[], Iterable[NodeId]]):
        self._hint = hint
        self._others = others
        self._waiting: dict[StreamId, set[CallWatch]] = {}
        self.is_over = False
        """The process ends: requests no longer wait."""

    @contextlib.contextmanager
    def watch(self, stream: StreamId, *, until: float = math.inf) -> Iterator[CallWatch]:
        """Watch a call during the block. `until`: the time of the event loop at which the wait ends."""
        waiting, watch = self._waiting.setdefault(stream, set()), CallWatch(until)
        waiting.add(watch)
        try:
            yield watch
        finally:
            waiting.discard(watch)
            if not waiting:
                del self._waiting[stream]

    def wake(self, streams: Iterable[StreamId]) -> None:
        for stream in streams if self._waiting else ():
            for watch in self._waiting.get(stream, ()):
                watch.changed.set()

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


class OpenWaits:
    """The open request, for each call, of its session at this process for its end: the client of the call can be asked
    on the stream of that request. Of several it is the newest."""

    def __init__(self) -> None:
        self._by_stream: dict[StreamId, Call] = {}

    def put(self, stream: StreamRecord, wait: Call) -> None:
        """Keep a request, unless it came in another session, where an answer would find no question."""
        if wait.stream.session == stream.session:
            self._by_stream[stream.id] = wait

    def remove(self, stream: StreamId, wait: Call) -> None:
        if self._by_stream.get(stream) is wait:
            del self._by_stream[stream]

    def of(self, stream: StreamId) -> Call | None:
        wait = self._by_stream.get(stream)
        return wait if wait is not None and wait.state is CallState.RUNNING else None


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
    nodes: OtherNodes
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
    peer_log: PeerLog
    """Logs what peers cause, at a limited rate."""
    waits: OpenWaits = field(default_factory=OpenWaits)
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
