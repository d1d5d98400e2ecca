"""Forwards what this node says on a stream that another node writes: numbered, in the journal's order.

The store takes the numbers of one sender in their order only. So where a message is refused, those behind it are
refused as well: they all come back, still in order, and are forwarded again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure._core.ids import new_stream_id
from perdure.errors import PerdureError
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.store.base import Forward, Step

Message = tuple[bytes, Step | None]
"""A payload, and what is committed together with it."""


@dataclass(slots=True, eq=False)
class _Group:
    """Messages that the journal has taken together."""

    messages: list[Message]
    steps: Sequence[Step]
    accepted: bool = False
    """Also where they are held while the store fails."""


class Outbox:
    """A source of the journal: the messages of one node for one stream."""

    __slots__ = (
        "_back",
        "_context",
        "_on_room",
        "_pending",
        "_queued",
        "_sender",
        "_sent",
        "_settled",
        "_stream",
        "_taken",
        "refusal",
    )

    def __init__(self, context: ServerContext, stream: Stream, on_room: Callable[[], None]) -> None:
        self._context = context
        self._stream = stream
        self._on_room = on_room
        self._sender = ""
        self._sent = 0
        """The number of the last message that was handed to the journal."""
        self._pending: list[Message] = []
        self._queued = False
        self._taken: list[_Group] = []
        """What the journal has taken and has neither written nor refused, the oldest first."""
        self._back: list[Message] = []
        self._settled: asyncio.Event | None = None
        self.refusal: PerdureError | None = None
        """Why the oldest of those came back that are here."""

    @property
    def unaccepted(self) -> int:
        """Messages that the store has not accepted."""
        under_way = sum(len(group.messages) for group in self._taken if not group.accepted)
        return len(self._pending) + under_way + len(self._back)

    @property
    def has_returned(self) -> bool:
        """Messages were refused and are here again."""
        return bool(self._back)

    @property
    def is_settled(self) -> bool:
        """Nothing is under way: what was put in is in the store, or here again."""
        return not self._pending and not self._taken

    def put(self, payload: bytes, also: Step | None) -> None:
        self._pending.append((payload, also))
        if not self._queued:
            self._queued = True
            self._context.journal.put(self)

    def take_back(self) -> list[Message]:
        """The messages that were refused, once nothing is under way: their numbers are free again."""
        assert self.is_settled
        back, self._back, self.refusal = self._back, [], None
        self._sent -= len(back)
        return back

    async def settled(self) -> None:
        while not self.is_settled:
            self._settled = self._settled or asyncio.Event()
            self._settled.clear()
            await self._settled.wait()

    # A source of the journal

    def take(self) -> Sequence[Step]:
        self._queued = False
        messages, self._pending = self._pending, []
        self._sender = self._sender or new_stream_id(self._context.random)
        payloads = tuple(payload for payload, _ in messages)
        first, self._sent = self._sent + 1, self._sent + len(messages)
        forward = Forward(
            stream=self._stream.id, node=self._context.node, sender=self._sender, first=first, payloads=payloads
        )
        steps = [*(also for _, also in messages if also is not None), forward]
        self._taken.append(_Group(messages, steps))
        return steps

    def accepted(self, steps: Sequence[Step]) -> None:
        for group in self._taken:
            group.accepted = group.accepted or group.steps is steps
        self._on_room()

    def written(self, steps: Sequence[Step]) -> None:
        del self._taken[0]
        if self._stream.node:
            self._context.store.hint(self._stream.node, [self._stream.id])
        self._look_settled()

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        self._back += self._taken.pop(0).messages
        self.refusal = self.refusal or reason
        self._look_settled()
        self._on_room()

    def _look_settled(self) -> None:
        if self._settled is not None and self.is_settled:
            self._settled.set()
