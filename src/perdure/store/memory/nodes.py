"""Nodes of a store in memory: joining, leaving, burying, mail, wake-ups, and which nodes are alive."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from perdure._core.ids import Fence, Generation, NodeId, StreamId, new_fence
from perdure._core.leases import Leases
from perdure._core.states import ClaimState
from perdure.store.codec import Codec, Payloads
from perdure.store.interface import HintListener
from perdure.store.records import (
    FORWARDED_AT_ONCE,
    MAIL_AT_ONCE,
    RECORD_VERSION,
    CallRecord,
    Event,
    Forwarded,
    Mail,
    NodeRecord,
    Overview,
    ReaderRecord,
    StreamRecord,
    next_key,
)


@dataclass(slots=True)
class StreamRow:
    """A stream with all that goes when it goes."""

    record: StreamRecord
    events: list[Event] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    calls: dict[tuple[int, int | str], CallRecord] = field(default_factory=dict)
    reader: ReaderRecord | None = None
    forwarded: list[Forwarded] = field(default_factory=list)
    senders: dict[NodeId, tuple[str, int]] = field(default_factory=dict)
    """The sender of each node, and the number of its last message."""


@dataclass(slots=True)
class NodeRow:
    record: NodeRecord
    left: bool = False
    holding: bool = False
    mail: list[Mail] = field(default_factory=list)


class MemoryNodes:
    """Has the tables of nodes and streams."""

    def __init__(self, codec: Codec, wall: Callable[[], float]) -> None:
        self._payloads = Payloads(codec)
        self._offset = wall() - time.monotonic()
        self._streams: dict[StreamId, StreamRow] = {}
        self._nodes: dict[NodeId, NodeRow] = {}
        self._views: list[MemoryLiveness] = []
        self._subscriptions: dict[object, tuple[NodeId, HintListener, asyncio.AbstractEventLoop]] = {}
        self._key = 0
        self._writes = 0

    def _new_fence(self, generation: int = 1) -> Fence:
        return new_fence(generation, secrets.token_bytes)

    # Nodes

    async def join(self, node: NodeId) -> Fence:
        self._writes += 1
        self._nodes[node] = NodeRow(NodeRecord(id=node, record=RECORD_VERSION, beat=0, facts=b"{}"))
        self._look_at_claims()
        return self._new_fence()

    async def leave(self, node: NodeId) -> None:
        if (row := self._nodes.get(node)) is not None:
            self._writes += 1
            row.left = True
            self._forget_sender(node)
            if not (row.mail or self._read_by(node) or await self.written_by(node)):
                del self._nodes[node]
            self._look_at_claims()

    async def nodes(self) -> Sequence[NodeRecord]:
        return [row.record for row in self._nodes.values()]

    async def written_by(self, node: NodeId) -> Sequence[StreamRecord]:
        return [row.record for row in self._streams.values() if row.record.node == node and not row.record.sealed]

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        row = self._nodes.get(node)
        if row is not None and beat not in (None, row.record.beat):
            return None
        self._writes += 1
        if (row := self._nodes.pop(node, None)) is not None:
            # Under new keys: a `MailReceived` of the heir may be on its way, and must not take what it has not seen.
            for mail in row.mail:
                self._put_mail(heir, mail.message)
            self._look_at_claims()
        self._forget_sender(node)
        read = self._read_by(node)
        for stream in read:
            stream.reader = None
        return [stream.record for stream in read]

    def _read_by(self, node: NodeId) -> list[StreamRow]:
        return [row for row in self._streams.values() if row.reader is not None and row.reader.node == node]

    # Mail

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        row = self._nodes.get(node)
        mail = [mail for mail in row.mail if mail.key > after] if row else []
        return self._payloads.decode_all(mail[:MAIL_AT_ONCE])

    def _put_mail(self, node: NodeId, message: bytes) -> None:
        if (row := self._nodes.get(node)) is not None:
            row.mail.append(Mail(self._next_key(), message))
            self.hint(node, ())

    def _next_key(self) -> int:
        self._key = next_key(self._key, now=time.time())
        return self._key

    # Forwarded messages

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        row = self._streams.get(stream)
        messages = [message for message in row.forwarded if message.key > after] if row else []
        return self._payloads.decode_all(messages[:FORWARDED_AT_ONCE])

    async def forwarded_to(self, node: NodeId) -> Sequence[StreamRecord]:
        waited_for = [row.record for row in self._streams.values() if row.forwarded]
        return [record for record in waited_for if record.node == node or record.node not in self._nodes]

    def _forget_sender(self, node: NodeId) -> None:
        for row in self._streams.values():
            row.senders.pop(node, None)

    # Wake-ups

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        key = object()
        self._subscriptions[key] = (node, listener, asyncio.get_running_loop())
        return lambda: self._subscriptions.pop(key, None) and None

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        for key, (whose, _, loop) in self._subscriptions.items():
            if whose == node and not loop.is_closed():
                loop.call_soon(self._tell, key, tuple(streams))

    def _tell(self, key: object, streams: Sequence[StreamId]) -> None:
        if (subscription := self._subscriptions.get(key)) is not None:
            subscription[1](streams)

    def stamp(self) -> object:
        return self._writes

    def clock(self) -> float:
        return time.monotonic() + self._offset

    # Liveness

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> MemoryLiveness:
        return MemoryLiveness(self, node, lease=lease, monotonic=monotonic)

    def _look_at_claims(self) -> None:
        for view in self._views:
            view.look_at_claim()

    def _living(self) -> dict[NodeId, NodeRow]:
        """Give the nodes that have not left by themselves."""
        return {node: row for node, row in self._nodes.items() if not row.left}

    def _hold(self, node: NodeId, holding: bool) -> None:
        self._nodes[node].holding = holding

    def _holders(self) -> list[NodeId]:
        return [node for node, row in self._living().items() if row.holding]

    def _beat(self, node: NodeId, facts: bytes) -> None:
        self._writes += 1
        row = self._nodes[node]
        row.record = replace(row.record, beat=row.record.beat + 1, facts=facts)


class MemoryLiveness:
    """Tells by leases which nodes are alive, because no operating system frees a lock for a dead one here."""

    def __init__(self, store: MemoryNodes, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._node = node
        self._monotonic = monotonic
        self._leases = Leases(node, lease=lease, now=monotonic())
        self.node_claim = self._leases.claim
        store._views.append(self)
        self.look_at_claim()
        if self.own_claim is not ClaimState.BURIED:
            store._beat(node, b"{}")

    lapses = False
    """Its nodes are in one process, and die together."""

    @property
    def own_claim(self) -> ClaimState:
        return self.node_claim.at(self._monotonic())

    def look_at_claim(self) -> None:
        """A node has joined, left or been buried."""
        now, row = self._monotonic(), self._store._nodes.get(self._node)
        if row is None or row.left:
            self.node_claim.bury()
        elif len(self._store._nodes) == 1:
            self._leases.alone(now=now)
        else:
            self._leases.joined(now=now)

    async def beat(self, facts: bytes) -> None:
        sent = self._monotonic()
        if self.own_claim is not ClaimState.BURIED:
            self._store._beat(self._node, facts)
            self._leases.beaten(sent=sent, now=self._monotonic())

    async def dead(self) -> Sequence[NodeId]:
        asked = self._monotonic()
        beats = {node: row.record.beat for node, row in self._store._nodes.items()}
        silent, living = self._leases.observe(beats, asked=asked, now=self._monotonic()), self._store._living()
        return [node for node in beats if (node in silent or node not in living) and node != self._node]

    async def overview(self, *, mail_after: int) -> Overview:
        dead, nodes = await self.dead(), [row.record for row in self._store._nodes.values()]
        return Overview(nodes, {record.id: record.beat for record in nodes if record.id in dead})

    def hold(self, holding: bool) -> None:
        if self._node in self._store._living():
            self._store._hold(self._node, holding)

    async def holders(self) -> Sequence[NodeId]:
        """A silent node is one of them until it is buried: it may still live."""
        return [node for node in self._store._holders() if node != self._node]

    def ages(self) -> dict[NodeId, float]:
        return self._leases.ages(now=self._monotonic())
