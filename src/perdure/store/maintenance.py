"""The interface of a store to the operator who makes it, brings it up to date, checks it and backs it up.

Servers do not use it: they make and migrate a store by themselves where they may.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perdure._core.ids import NodeId
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


class Maintenance(Protocol):
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

    async def put_back(self) -> None:
        """Note that the store was put back from a copy: no generation that was begun since is used again (6). No server
        uses it."""

    def back_up(self, target: str, *, checks: bool, on_copied: Callable[[int, int], None]) -> BackedUp:
        """Copy the store to a file that is not there yet, while servers use it; whole, or not at all. `on_copied` is
        called with the bytes that are copied and with all. Raises `Misuse` where the store's server does that."""

    async def holders(self) -> Sequence[NodeId] | None:
        """The nodes that live and hold what is not written (15); `None` if only another node can ask them."""
