"""What all sessions of one process share."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perdure._core import mail
from perdure._core.ids import Fence, NodeId, RandomBytes, StreamId
from perdure._core.memory_budget import Work
from perdure._core.retention import Limits
from perdure.log.hub import Hub
from perdure.log.journal import Journal
from perdure.log.stream import Stream
from perdure.runtime.base import Runtimes
from perdure.settings import Settings
from perdure.store.base import Store, StreamRecord
from perdure.telemetry.events import Counters, PeerLog


class Neighbours(Protocol):
    """The other nodes, as sessions see them."""

    @property
    def others(self) -> Sequence[NodeId]:
        """Those that live, as far as is known."""
        ...

    @property
    def alone(self) -> bool: ...

    async def is_dead(self, node: NodeId) -> bool: ...

    async def holders(self) -> Sequence[NodeId]:
        """The others that live and show what is not in the store."""
        ...

    async def refuse_while_held(self) -> None:
        """Raises `HeldElsewhere` while another node holds anything. After that the store has all that it has shown."""
        ...

    async def ends(self, streams: Sequence[StreamId]) -> Sequence[StreamRecord]:
        """How far streams have grown; those that are there."""
        ...

    def grown(self, stream: Stream) -> None:
        """A stream of this node's has grown, and its reader sits elsewhere."""
        ...

    def now_written_here(self, stream: Stream) -> None:
        """This node has claimed a stream that another one wrote."""
        ...

    async def cancel_waiting(self, cancelled: mail.Cancelled) -> None:
        """The client cancels a call that waits here to be run again or settled."""
        ...


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
    neighbours: Neighbours
    clock: Callable[[], float]
    """The store's: the same for all nodes, and it does not jump."""
    random: RandomBytes
    ask_ids: itertools.count[int]
    task_context: contextvars.Context
    """The context of the start, in which sticky requests are repeated: not that of the request that loads a runtime."""
    limits: Limits
    work: Work
    peers: PeerLog
    """Where what peers cause is logged."""

    def stream(self, record: StreamRecord, *, writes: bool, owed: int = 0) -> Stream:
        limit = self.settings.max_stream_events
        stream = Stream(record, self.journal, clock=self.clock, limit=limit, writes=writes, owed=owed)
        stream.on_grown = self.neighbours.grown
        return stream
