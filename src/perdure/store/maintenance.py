"""The interface of a store to the operator who makes it, migrates it, checks it and backs it up.

Servers do not use it: they make and migrate a store by themselves where they may.

`INVARIANTS` are the rules that hold in every store at every moment. Each rule is a query under the same name, in
`sql/checks.sql` of all databases or of one. The query returns a sentence for each place where the rule is broken. All
queries of one check read the store as of one moment, also while servers write it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from perdure._core.ids import NodeId

MOST_SHOWN = 20
"""Faults of one rule that are named. A damaged store may have millions, and the first ones show where to search."""

CHECK_VALUES = {"unanswered": (60.0,)}
"""The values of the checks that have any: seconds by which the clocks of nodes may differ (promise 18) before a time
proves anything."""

COUNTED = ("sessions", "streams", "calls", "events", "answers")
"""The columns of the query `counts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Invariant:
    """A rule, and the number of its promise in `store.interface` (0: the layout of the tables)."""

    says: str
    promise: int = 0


INVARIANTS: Mapping[str, Invariant] = {
    "orphaned": Invariant(says="every event, call, ask, reader and message belongs to a stream", promise=1),
    "ownerless": Invariant(says="every stream belongs to a session that has not ended", promise=12),
    "standalone": Invariant(says="every session has its standalone stream, and no other one"),
    "beyond": Invariant(says="no event comes after the end of its stream", promise=4),
    "gaps": Invariant(says="the retained part of a stream has no gaps", promise=4),
    "doubled": Invariant(says="a number names one event", promise=4),
    "sealed": Invariant(says="no call runs on a sealed stream, and no standalone stream is sealed", promise=2),
    "tail": Invariant(says="the last event of a sealed stream is an answer", promise=2),
    "unanswered": Invariant(says="every call that has ended has its answer, until that expires", promise=7),
    "answers": Invariant(says="a stream has no more answers than calls that have ended", promise=5),
    "ledger": Invariant(says="every row of the ledger fits its stream and its session", promise=12),
    "abandoned": Invariant(
        says="every running call has a node that runs it, or whose death is to be settled", promise=11
    ),
    "generations": Invariant(says="the generations of a stream end in their order, before its end", promise=6),
    "delivered": Invariant(says="no reader has got further than the end of its stream", promise=19),
    "mail": Invariant(says="mail waits only for nodes that have joined", promise=10),
    "notes": Invariant(says="every note of a session belongs to one that has not ended", promise=13),
    "tally": Invariant(says="the counted sessions are those that exist", promise=14),
    "ended": Invariant(says="of a session that has ended only its record is left, with the reason", promise=14),
    "durable_calls": Invariant(
        says="a durable call has one stream, and leaves no record when it has ended", promise=22
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A place where a rule is broken."""

    rule: str
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of a check of a whole store."""

    counts: Mapping[str, int]
    """How many records were checked, by kind."""
    faults: Sequence[Violation]
    unnamed: Sequence[str] = ()
    """Rules that are broken in more places than are named."""


def check_result(counts: Sequence[int], found: Mapping[str, Sequence[str]]) -> CheckResult:
    """Return the result of a check: how much the store holds (`COUNTED`; nothing if that could not be read), and the
    sentences that each rule's query found, up to one more than are named."""
    faults = [Violation(rule=rule, where=where) for rule, places in found.items() for where in places[:MOST_SHOWN]]
    unnamed = [rule for rule, places in found.items() if len(places) > MOST_SHOWN]
    return CheckResult(counts=dict(zip(COUNTED, counts, strict=False)), faults=faults, unnamed=unnamed)


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
    verdict: CheckResult | None
    """What the check of it found; `None` if it was not checked."""


class Maintenance(Protocol):
    """Makes, migrates and checks a store that need not exist."""

    shown: str
    """The address, without a password."""
    latest: int
    """The version of a store that this release makes."""

    async def version(self) -> int:
        """Return the version of the store; 0 without one. Raises `StoreError` for what is not a store, and
        `StoreTooNew` for one that this release cannot use."""

    def script(self, version: int, *, grant: str | None) -> str:
        """Return the SQL that leads from a version (0: no store) to the latest, for review and for other programs.
        `grant`: also the rights that this role needs to serve."""

    async def make(self, *, grant: str | None) -> None:
        """Make or migrate the store by that SQL."""

    async def check(self) -> Sequence[Fact]:
        """Read the store and change nothing. Raises `StoreError` if it cannot be read."""

    async def living(self, *, patiently: bool = True) -> Sequence[NodeId]:
        """Return the living nodes, as far as can be seen from outside. The store must exist. Without patience, a node
        that has just lost its connection to the store counts as dead."""

    async def verify(self) -> CheckResult:
        """Check everything in a store of this release, as of one moment, while servers use it (`INVARIANTS`).
        Nothing is changed."""

    async def put_back(self) -> None:
        """Note that the store was restored from a copy: no generation that was begun since is used again (6). No server
        may use the store meanwhile."""

    def back_up(self, target: str, *, checks: bool, on_copied: Callable[[int, int], None]) -> BackedUp:
        """Copy the store to a new file, while servers use it; whole, or not at all. `on_copied` is called with the
        bytes copied and with all bytes. Raises `Misuse` where the store's server does that."""

    async def holders(self) -> Sequence[NodeId] | None:
        """Return the living nodes that hold steps (15); `None` if only another node can ask them."""
