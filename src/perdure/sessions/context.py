"""Holds the parts of a running server that all its sessions share."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from perdure._core import mail
from perdure._core.ids import Fence, Kind, NodeId, RandomBytes, SessionId, new_stream_id
from perdure._core.limits import Quota
from perdure._core.retention import Limits
from perdure.log.hub import Hub
from perdure.log.journal import Journal, Steps
from perdure.runtime.base import Runtimes
from perdure.sessions.call_waiters import CallWaiters
from perdure.settings import Settings
from perdure.store.interface import Store
from perdure.store.records import StreamRecord
from perdure.store.steps import SendMail, Step
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import PeerLog


class OtherNodes(Protocol):
    """The other nodes of the store, as sessions see them."""

    @property
    def others(self) -> Sequence[NodeId]:
        """The nodes that are alive, as far as is known."""

    @property
    def alone(self) -> bool:
        """No other node exists, not even a dead one whose calls are to be settled."""

    async def is_dead(self, node: NodeId) -> bool:
        """Whether a node certainly writes nothing more."""

    async def holders(self) -> Sequence[NodeId]:
        """The other nodes that are alive and show what is not in the store."""

    async def refuse_while_held(self) -> None:
        """Raises `HeldElsewhere` while another node holds anything. After that the store has all that it has shown."""


class ChangeSignal:
    """Passes on what tools say of changes: a notification that concerns every listener, whichever session it was sent
    to."""

    __slots__ = ("_listener",)

    def __init__(self) -> None:
        self._listener: Callable[[str, Mapping[str, Any] | None], None] | None = None

    def connect(self, listener: Callable[[str, Mapping[str, Any] | None], None]) -> None:
        self._listener = listener

    def tell(self, method: str, params: Mapping[str, Any] | None) -> None:
        if self._listener is not None:
            self._listener(method, params)


class Stamp(NamedTuple):
    """A moment at which a record is read: the record is current as long as no field changes."""

    store: object
    doubts: int
    """The journal's: a store that has lost something may count revisions twice."""


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """The parts of a running server."""

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
    """The store's: the same for all nodes, and it does not jump."""
    random: RandomBytes
    ask_ids: itertools.count[int]
    task_context: contextvars.Context
    """The context of the start, in which sticky requests are repeated: not that of the request that loads a runtime."""
    limits: Limits
    waiters: CallWaiters
    """Wakes requests that wait for single calls."""
    work: Quota
    """The memory of messages that are being handled, in bytes."""
    running: Quota
    """The requests of sessions and tasks that run here."""
    peers: PeerLog
    """Logs what peers cause, at a limited rate."""
    changed: ChangeSignal = field(default_factory=ChangeSignal)

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
