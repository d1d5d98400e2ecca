"""Holds steps while the store fails, in order and within bounds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from perdure.errors import PerdureError
from perdure.store.base import Append, Forward, OpenStream, PutSession, Step
from perdure.store.cost import weigh

GROUP_BYTES = 1 << 20
GROUP_STEPS = 2_048
"""How much is written in one commit, nearly: bytes, and steps and events together. More gains little, keeps the first
of them waiting for the last, and makes one operation of the store long. The source that reaches a bound is the last."""

MOST_HELD_BYTES = 256 << 20
"""Bytes held while the store fails, besides the number of events: they may be large, and so may requests."""


class Source(Protocol):
    """Has steps to write, and learns what became of them."""

    def take(self) -> Sequence[Step]:
        """All there is at the moment, in order. It is written in one commit, so it should be little: the writers of a
        stream wait in `wait_for_room`."""
        ...

    def accepted(self, steps: Sequence[Step]) -> None:
        """These are written, or held: they may be shown."""
        ...

    def written(self, steps: Sequence[Step]) -> None:
        """These are in the store."""
        ...

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        """These were refused for good."""
        ...


Part = tuple[Source, Sequence[Step]]
Group = list[Part]


class Backlog:
    """Parts that wait for the store, the oldest first."""

    __slots__ = ("_bytes", "_events", "_most_events", "_on_holding", "_room", "_shows", "has_room", "parts")

    def __init__(self, most_events: int, on_holding: Callable[[bool], None]) -> None:
        """`on_holding` is called before the first event is shown that is not written, and when everything held is."""
        self.has_room = True
        """No more is held than memory should carry."""
        self.parts: deque[Part] = deque()
        self._most_events = most_events
        self._on_holding = on_holding
        self._shows = False
        self._events = self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def set_shown(self, shown: bool) -> None:
        """What is held is shown from now on; or nothing is held any more."""
        if shown != self._shows:
            self._shows = shown
            self._on_holding(shown)

    def add(self, source: Source, steps: Sequence[Step]) -> int:
        """Hold steps; gives the number of events in them."""
        self.parts.append((source, steps))
        return self._count(steps, 1)

    def remove(self, parts: int) -> None:
        """So many are written, or refused."""
        for _ in range(parts):
            self._count(self.parts.popleft()[1], -1)

    def _count(self, steps: Sequence[Step], sign: int) -> int:
        events = sum(
            len(step.events) if isinstance(step, Append) else len(step.payloads)
            for step in steps
            if isinstance(step, Append | Forward)
        )
        self._events += sign * events
        self._bytes += sign * weigh(steps)[1]
        self.has_room = self._events < self._most_events and self._bytes < MOST_HELD_BYTES
        if self.has_room:
            self._room.set()
        else:
            self._room.clear()
        return events

    async def wait_for_room(self) -> None:
        await self._room.wait()


def front(parts: Iterable[Part]) -> Group:
    """As many of the parts as one commit should hold."""
    group: Group = []
    count = size = 0
    for part in parts:
        group.append(part)
        rows, its_size, _ = weigh(part[1])
        count, size = count + rows, size + its_size
        if count >= GROUP_STEPS or size >= GROUP_BYTES:
            break
    return group


def flat(group: Group) -> list[Step]:
    return [step for _, steps in group for step in steps]


def without_limits(steps: Sequence[Step]) -> Sequence[Step]:
    """Steps that are held count as accepted: they must not be refused for a limit when they are written."""
    return [
        replace(step, limits=None)
        if isinstance(step, PutSession)
        else replace(step, most_calls=None)
        if isinstance(step, OpenStream)
        else step
        for step in steps
    ]
