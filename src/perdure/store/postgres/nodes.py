"""Tells which nodes are alive, by leases and by locks, and which of them hold what is not written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from perdure._core.ids import NodeId
from perdure._core.leases import Claim, Leases
from perdure._core.states import ClaimState
from perdure.errors import StoreError, StoreUnavailable
from perdure.store import rows
from perdure.store.postgres.failures import BURIED, is_unknown
from perdure.store.postgres.listen_connection import ListenConnection
from perdure.store.records import Overview

T = TypeVar("T")
_log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
"""How long a node has to answer whether it holds anything. One that does not answer counts as a holder."""

SOON = 0.7
"""Seconds for which a look at the nodes waits for a lock to have been free for long enough. Nodes look somewhat more
often: the next look would find the dead process later."""

_LOOK = 0.01
"""Seconds between two looks whether a node has answered."""

QUESTION = "?"
"""What is said on a node's channel when it was asked something. That and the answer are written down: a notification
may come from any role that may connect."""


class Holding:
    """Knows which nodes of this process hold something, and asks the other processes.

    A node says that it holds when writing fails, so it cannot write that down; and it says it without waiting. So it is
    asked, and only a node that writes down that it holds nothing is not named (15).
    """

    def __init__(
        self, listener: ListenConnection, queries: Mapping[str, str], *, enter: Callable[[NodeId], Awaitable[object]]
    ) -> None:
        """`enter`: writes that a node is there."""
        self._listener = listener
        self._queries = queries
        self._enter = enter
        self.joined: set[NodeId] = set()
        """The nodes of this process. A commit is refused if one of them is not in the store any more."""
        self._claims: list[tuple[NodeId, Claim]] = []
        """Of the nodes of this process: each is buried when its node leaves, or is not in the store any more."""
        self._buried: set[NodeId] = set()
        self._holding: set[NodeId] = set()
        self._answering: set[asyncio.Task[None]] = set()

    def hold(self, node: NodeId, holding: bool) -> None:
        if holding and node in self.joined:
            self._holding.add(node)
        else:
            self._holding.discard(node)

    def join(self, node: NodeId) -> None:
        self._buried.discard(node)
        self.joined.add(node)

    def leave(self, node: NodeId) -> None:
        self.joined.discard(node)
        self._holding.discard(node)
        self._bury_claims(lambda other: other == node)

    def keep_claim(self, node: NodeId, claim: Claim) -> None:
        """Bury a claim with its node."""
        self._claims.append((node, claim))
        self._bury_claims(lambda other: other not in self.joined)

    def _bury_claims(self, is_gone: Callable[[NodeId], bool]) -> None:
        for node, claim in self._claims:
            if is_gone(node):
                claim.bury()
        self._claims = [(node, claim) for node, claim in self._claims if not is_gone(node)]

    def bury(self, nodes: Iterable[NodeId]) -> None:
        """These nodes are not in the store any more: other nodes may have settled their calls."""
        for node in self.joined.intersection(nodes):
            self._buried.add(node)
            self.leave(node)

    def members(self) -> list[NodeId]:
        """The nodes that must be in the store for this process to write. Raises `StoreUnavailable` where there were
        some, and all of them are buried."""
        if self._buried and not self.joined:
            raise StoreUnavailable("other nodes have buried this one")
        return list(self.joined)

    def refused(self, error: BaseException) -> None:
        """Note the nodes that are buried, if that is why the server refused something."""
        if getattr(error, "sqlstate", None) == BURIED:
            self.bury(NodeId(node) for node in str(getattr(error, "detail", "")).split(" "))

    async def as_members(self, work: Callable[[list[NodeId]], Awaitable[T]]) -> T:
        """Work that the server refuses if one of the nodes here is not in the store. If the server has lost them, they
        join again, and the work is done then."""
        try:
            return await work(self.members())
        except StoreUnavailable as failure:
            cause = failure.__cause__
            if cause is not None:
                self.refused(cause)
            if not is_unknown(cause):
                raise
        await self.join_again()
        return await work(self.members())

    async def join_again(self) -> None:
        """Enter the nodes here that the server does not know and that no other node has buried: it has lost its last
        moments, or was put back from a copy. Nothing of theirs is left there for other nodes to settle."""
        nodes = list(self.joined)
        there = {row[0] for row in await self._listener.fetch(self._queries["all_nodes"])}
        if missing := [node for node in nodes if node not in there]:
            self.bury(NodeId(row[0]) for row in await self._listener.fetch(self._queries["buried"], missing))
            for node in self.joined.intersection(missing):
                await self._enter(node)
                _log.warning(
                    "the database has lost that node %s had joined: it joins again",
                    node[:8],
                    extra={"action": "store.node_lost", "node": node},
                )

    async def show_life(self) -> None:
        """Raise the beats of the nodes here: other nodes see that their lock is free."""
        shown = list(self.joined)
        if shown:
            with contextlib.suppress(StoreError):
                there = {row[0] for row in await self._listener.fetch(self._queries["show_life"], shown)}
                if not self.joined <= there:
                    await self.join_again()

    async def aclose(self) -> None:
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        for known in (self.joined, self._buried, self._holding):
            known.clear()
        self._bury_claims(lambda _: True)

    async def show_lock(self, lock: int) -> None:
        """Write down another lock of the nodes here. Raises `StoreUnavailable` if that fails."""
        if not self.joined:
            return
        there = {row[0] for row in await self._listener.fetch(self._queries["show_lock"], list(self.joined), lock)}
        if not self.joined <= there:
            await self.join_again()

    # Asking

    async def holders(self, asker: NodeId, locked: Mapping[NodeId, bool | None]) -> list[NodeId]:
        """Those of the other nodes that hold something. `locked`: whether each one's lock is held; `None`: it has
        none, because it has no listener."""
        # A node whose lock is free answers nothing: it is dead, or about to connect again.
        silent = {node for node, has_lock in locked.items() if has_lock is False and node not in self.joined}
        unanswered = await self._ask(locked.keys() - self.joined - silent)
        holders = silent | unanswered | (self._holding - {asker})
        return [node for node in locked if node in holders]

    async def _ask(self, nodes: Iterable[NodeId]) -> set[NodeId]:
        """The nodes that did not answer that they hold nothing."""
        asked = list(nodes)
        if not asked:
            return set()
        wanted = {row[0]: row[1] for row in await self._listener.fetch(self._queries["ask"], asked)}
        await self._listener.notify((self._listener.channel(node), QUESTION) for node in asked)
        deadline = time.monotonic() + ANSWER_SECONDS
        while wanted and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)
            for node, answered in await self._listener.fetch(self._queries["answers"], asked):
                if answered >= wanted.get(node, answered + 1):
                    del wanted[node]
        return set(wanted)

    # Being asked

    def on_question(self) -> None:
        """A node of this process was asked something."""
        task = asyncio.get_running_loop().create_task(_quietly(self.answer()))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def answer(self) -> None:
        """Answer what was asked until now. A node that begins to hold meanwhile has not answered what is asked then."""
        asked = await self._listener.fetch(self._queries["questions"], list(self.joined))
        answers = [(node, number) for node, number in asked if node not in self._holding]
        if answers:
            nodes, numbers = zip(*answers, strict=True)
            await self._listener.fetch(self._queries["answer"], list(nodes), list(numbers))


async def _quietly(work: Awaitable[None]) -> None:
    """An answer that cannot be sent says that this node may hold something."""
    with contextlib.suppress(StoreError):
        await work


class PostgresLiveness:
    """One node's view: by leases, and sooner by the locks of the listen connections. A free lock says that its
    process has ended, or has lost its connection, which a look at the process tells on the same machine. A held one
    says nothing, because a machine that is cut off does not free it."""

    def __init__(
        self,
        node: NodeId,
        *,
        listener: ListenConnection,
        holding: Holding,
        queries: Mapping[str, str],
        process: str | None,
        clock: Callable[[], float],
        count: Callable[[int], None],
        lease: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._node = node
        self._listener = listener
        self._holding = holding
        self._queries = queries
        self._process = process
        self._clock = clock
        self._count = count
        self._monotonic = monotonic
        self._leases = Leases(node, lease=lease, now=monotonic())
        self.node_claim = self._leases.claim
        holding.keep_claim(node, self.node_claim)

    lapses = True

    @property
    def own_claim(self) -> ClaimState:
        return self.node_claim.at(self._monotonic())

    async def beat(self, facts: bytes) -> None:
        sent = self._monotonic()
        if self.own_claim is ClaimState.BURIED:
            return
        beat = (self._queries["beat"], self._node, facts, self._clock())
        if not await self._listener.fetch(*beat):
            await self._holding.join_again()
            if self._node not in self._holding.joined or not await self._listener.fetch(*beat):
                self._holding.bury([self._node])
                return
        self._leases.beaten(sent=sent, now=self._monotonic())

    async def overview(self, *, mail_after: int) -> Overview:
        seen = await self._look(mail_after)
        due = self._leases.due(now=self._monotonic())
        if not seen.dead and due is not None and due < SOON:
            await asyncio.sleep(due + 0.001)  # behind it, whatever the two clocks round
            seen = await self._look(mail_after)
        return seen

    async def _look(self, mail_after: int) -> Overview:
        """In one statement: the beat of a node is the one that it had when its lock was free."""
        asked = self._monotonic()
        seen = await self._listener.fetch(self._queries["overview"], self._node, mail_after)
        self._count(len(seen))
        beats = {row["id"]: row["beat"] for row in seen}
        # After an outage all locks are free, this node's own as well: every process gets its time to connect again.
        free = {row["id"] for row in seen if row["held"] is False}
        found = {row["id"]: is_running(row["process"], self._process) for row in seen if row["id"] != self._node}
        free -= {node for node, is_there in found.items() if is_there}
        ended = {node for node, is_there in found.items() if is_there is False}
        silent = self._leases.observe(beats, asked=asked, now=self._monotonic(), free=free, ended=ended)
        dead = {
            row["id"]: row["beat"] for row in seen if row["id"] != self._node and (row["gone"] or row["id"] in silent)
        }
        nodes = [rows.node_record(row[:4]) for row in seen]
        waiting = (seen[0]["has_mail"], seen[0]["has_forwarded"]) if seen else (True, True)
        return Overview(nodes, dead, *waiting)

    def hold(self, holding: bool) -> None:
        self._holding.hold(self._node, holding)

    async def holders(self) -> Sequence[NodeId]:
        seen = await self._listener.fetch(self._queries["watch_nodes"])
        locked = {row[0]: row[3] for row in seen if not row[2] and row[0] != self._node}
        return await self._holding.holders(self._node, locked)

    def ages(self) -> dict[NodeId, float]:
        return self._leases.ages(now=self._monotonic())


_PROC = Path("/proc")
_ENDED = ("Z", "X")
"""States of a process that has ended, and whose parent has not asked for its exit status."""


def process_name() -> str | None:
    """The name of this process."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        _, began = _state(os.getpid())
    except (OSError, ValueError, IndexError):
        return None
    return f"{boot} {namespace} {os.getpid()} {began}"


def is_running(name: str | None, seen_by: str | None) -> bool | None:
    """Whether the process of a name is there, seen by another process; `None`: it cannot be looked up from there."""
    if name is None or seen_by is None or name.split(" ")[:2] != seen_by.split(" ")[:2]:
        return None
    try:
        _, _, pid, began = name.split(" ")
        os.kill(int(pid), 0)  # nothing is sent; a process of another user is found as well
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    except (ValueError, OverflowError):
        return None
    try:
        state, since = _state(int(pid))
    except (OSError, ValueError, IndexError):
        return True  # its user hides it
    return state not in _ENDED and since == began


def _state(pid: int) -> tuple[str, str]:
    """The state of a process, and when it began, in ticks since the machine was started."""
    # Behind its own name, in which anything may stand.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
