"""The interface of a store to the operator who makes it, brings it up to date, checks it and copies it.

Servers do not use it: they make and migrate a store by themselves where they may.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from perdure._core.ids import NO_FENCE, NodeId, StreamId
from perdure.store.base import Append, Event, Generation, Store
from perdure.store.codec import Payloads
from perdure.store.invariants import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One thing that a check found."""

    name: str
    value: str | int | bool | None
    """For programs: its form stays."""
    says: str = ""
    """For people; empty: the value itself."""
    problem: str = ""
    """Why no server of this release can use the store as it is, and what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackedUp:
    """A backup that was made."""

    path: str
    bytes: int
    verdict: Verdict | None
    """What the check of it found; `None` if it was not checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vacuumed:
    """What became of a file that was to get smaller; sizes in bytes."""

    before: int
    after: int
    free: int
    """What no row used before."""
    waited: float
    """Seconds for which commits had to wait."""
    is_prepared: bool
    """The next time it gets smaller in short steps."""


class Upkeep(Protocol):
    """Makes, migrates and checks a store that need not be there."""

    shown: str
    """The address, without a password."""
    latest: int
    """The version of a store that this release makes."""

    async def version(self) -> int:
        """The version of the store that is there; 0 if there is none. Raises `StoreError` for what is not a store, and
        `StoreTooNew` for one that this release cannot use."""

    def script(self, version: int, *, grant: str | None) -> str:
        """The SQL that leads from a version (0: nothing is there) to the latest, for review and for other programs.

        `grant`: also the rights that this role needs to serve."""

    async def make(self, *, grant: str | None) -> None:
        """Do the same."""

    async def check(self) -> Sequence[Fact]:
        """Look at the store and change nothing. Raises `StoreError` if it cannot be looked at."""

    async def living(self, *, patiently: bool = True) -> Sequence[NodeId]:
        """The nodes that live, as far as can be told from outside. The store must be there. Without patience, a node
        that has just lost its connection to the store counts as dead."""

    async def verify(self) -> Verdict:
        """Check everything in a store of this release, as of one moment, while servers use it (`store.invariants`).
        Nothing is changed."""

    async def is_backup(self) -> bool:
        """Whether it is a copy of a store that went on, and no server has used it yet."""

    async def put_back(self) -> None:
        """Note that the store was put back from a copy: no generation that was begun since is used again (6). No server
        uses it."""

    def back_up(self, target: str, *, checks: bool, on_copied: Callable[[int, int], None]) -> BackedUp:
        """Copy the store to a file that is not there yet, while servers use it; whole, or not at all. `on_copied` is
        called with the bytes that are copied and with all. Raises `Misuse` where the store's server does that."""

    def vacuum(self, *, incremental: bool, may_wait: bool, on_step: Callable[[int], None]) -> Vacuumed:
        """Give the room of what was forgotten back to the file system. Raises `Misuse` where the store's server does
        that."""

    async def holders(self) -> Sequence[NodeId] | None:
        """The nodes that live and hold what is not written (15); `None` if only another node can ask them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What is put into a stream of a copy and no step can put there: events with gaps, whichever nodes wrote them, ends
    of generations, and messages that wait for the stream's next writer."""

    stream: StreamId
    events: Sequence[Event] = ()
    generations: Sequence[Generation] = ()
    forwarded: Sequence[bytes] = ()


class CopyTarget(Store, Protocol):
    """A store that is filled with what another one holds, while no server uses either."""

    async def restore(self, contents: Sequence[Restored]) -> None:
        """Fill streams that are there."""

    async def clear(self) -> None:
        """Forget everything in the store."""


def encoded(payloads: Payloads, restored: Restored) -> Restored:
    """Give what is put into a stream as it is stored."""
    events = (*restored.events, *(Event(0, 0.0, payload) for payload in restored.forwarded))
    [step] = payloads.encode_steps([Append(stream=restored.stream, fence=NO_FENCE, events=events)])
    assert isinstance(step, Append)
    count = len(restored.events)
    forwarded = [event.payload for event in step.events[count:]]
    return replace(restored, events=step.events[:count], forwarded=forwarded)
