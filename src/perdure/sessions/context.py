"""Holds the parts of a running server that all its sessions share."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perdure._core import mail
from perdure._core.ids import Fence, Kind, NodeId, RandomBytes, SessionId, StreamId, new_stream_id
from perdure._core.limits import Quota
from perdure._core.retention import Limits
from perdure.errors import HeldElsewhere
from perdure.log.hub import Hub
from perdure.log.journal import Journal, Steps
from perdure.runtime.base import Runtimes
from perdure.settings import Settings
from perdure.store.interface import Liveness, Store
from perdure.store.records import Overview, StreamRecord
from perdure.store.steps import SendMail, Step
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import PeerLog
from perdure.telemetry.prometheus import has_left

_KNOWN_DEAD = 64
"""Dead nodes that are remembered: their sessions come in herds, soon after the death."""


class Peers:
    """Knows the other nodes on the store."""

    def __init__(self, *, node: NodeId, liveness: Liveness) -> None:
        self.others: Sequence[NodeId] = ()
        """The nodes that are alive, when the store was last read."""
        self.departed: frozenset[NodeId] = frozenset()
        """The nodes that left in good order, and left something to settle."""
        self.alone = False
        """No other node exists, not even a dead one whose calls are to be settled. False until it is known."""
        self._node = node
        self._liveness = liveness
        self._dead: deque[NodeId] = deque(maxlen=_KNOWN_DEAD)

    async def meet(self, *, mail_after: int = 0) -> Overview:
        seen = await self._liveness.overview(mail_after=mail_after)
        known = [record.id for record in seen.nodes if record.id != self._node]
        self.alone = not known
        self.others = tuple(node for node in known if node not in seen.dead)
        self.departed = frozenset(record.id for record in seen.nodes if has_left(record))
        self._dead = deque((node for node in self._dead if node not in self.others), maxlen=_KNOWN_DEAD)
        return seen

    async def is_dead(self, node: NodeId) -> bool:
        """Whether a node certainly writes nothing more. The store is asked once for all sessions of the node; `meet`
        finds a node that is back after all."""
        if node == self._node:
            return False
        if node not in self._dead:
            seen = await self._liveness.overview(mail_after=0)
            if node not in seen.dead and any(record.id == node for record in seen.nodes):
                return False
            self._dead.append(node)
        return True

    async def holders(self) -> Sequence[NodeId]:
        """The other nodes that are alive and show events which are not in the store."""
        return await self._liveness.holders()

    async def refuse_while_held(self) -> None:
        """Raises `HeldElsewhere` while another node holds anything. Otherwise the store has all that was shown."""
        if holders := await self.holders():
            raise HeldElsewhere(f"{len(holders)} other nodes hold what is not written yet")


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


def mail_to(nodes: Iterable[NodeId], message: mail.Message) -> list[Step]:
    encoded = mail.encode(message)
    return [SendMail(node=node, message=encoded) for node in nodes]
