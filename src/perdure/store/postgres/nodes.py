"""Decides which nodes are alive, by leases, locks and processes, and which of them hold steps that are not written."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TypeVar

from perdure._core.ids import NodeId
from perdure._core.leases import Claim, Leases
from perdure._core.states import ClaimState
from perdure.errors import StoreError, StoreUnavailable
from perdure.store import rows
from perdure.store.postgres.connections import BURIED, is_unknown
from perdure.store.postgres.listen_connection import ListenConnection
from perdure.store.records import Overview

T = TypeVar("T")
_log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
"""Seconds in which a node must answer whether it holds anything. A node that does not answer counts as a holder."""

SOON = 0.7
"""Seconds that an overview waits at most until a lock has been free for long enough. Nodes read it somewhat more often,
and the next overview would find the dead process later."""

POLL_SECONDS = 0.01
"""Seconds between two reads of the answers of other nodes."""

QUESTION = "?"
"""The notification that makes a node answer. Question and answer themselves are written to the store, because any role
that may connect can send a notification."""


@dataclass(eq=False)
class Holding:
    """Keeps the nodes of this process: which have joined, which hold steps; and asks the other processes.

    A node declares that it holds steps when writing fails, so it cannot write that down, and it must not wait. So other
    nodes ask it, and only a node that writes down that it holds nothing counts as no holder (15).
    """

    listener: ListenConnection
    queries: Mapping[str, str]
    _: KW_ONLY
    enter: Callable[[NodeId], Awaitable[object]]
    """Writes the row of a node."""
    process: str | None
    """The name of this process."""
    clock: Callable[[], float]
    count: Callable[[int], None]
    """Gets the number of nodes."""
    joined: set[NodeId] = field(default_factory=set)
    """The nodes of this process. A commit is refused if one of them is no longer in the store."""
    _claims: list[tuple[NodeId, Claim]] = field(default_factory=list)
    """Claims of the nodes of this process. Each is buried when its node leaves, or is no longer in the store."""
    _has_buried: bool = False
    """Other nodes have buried a node of this process."""
    _holding: set[NodeId] = field(default_factory=set)
    _answering: set[asyncio.Task[None]] = field(default_factory=set)

    def hold(self, node: NodeId, holding: bool) -> None:
        if holding and node in self.joined:
            self._holding.add(node)
        else:
            self._holding.discard(node)

    def join(self, node: NodeId) -> None:
        self._has_buried = False
        self.joined.add(node)

    def leave(self, node: NodeId) -> None:
        self.joined.discard(node)
        self._holding.discard(node)
        self._bury_claims()

    def keep_claim(self, node: NodeId, claim: Claim) -> None:
        """Bury a claim with its node."""
        self._claims.append((node, claim))
        self._bury_claims()

    def _bury_claims(self) -> None:
        for node, claim in self._claims:
            if node not in self.joined:
                claim.bury()
        self._claims = [(node, claim) for node, claim in self._claims if node in self.joined]

    def bury(self, nodes: Iterable[NodeId]) -> None:
        """Note that nodes are no longer in the store: other nodes may have settled their calls."""
        for node in self.joined.intersection(nodes):
            self._has_buried = True
            self.leave(node)

    def members(self) -> list[NodeId]:
        """Return the nodes that must be in the store for this process to write. Raises `StoreUnavailable` if other
        nodes have buried all of them."""
        if self._has_buried and not self.joined:
            raise StoreUnavailable("other nodes have buried this one")
        return list(self.joined)

    def refused(self, error: BaseException) -> None:
        """Note the buried nodes, if the server refused something because of them."""
        if getattr(error, "sqlstate", None) == BURIED:
            self.bury(NodeId(node) for node in str(getattr(error, "detail", "")).split(" "))

    async def as_members(self, work: Callable[[list[NodeId]], Awaitable[T]]) -> T:
        """Do work that the server refuses if a node of this process is not in the store. If the server has lost them,
        they join again first."""
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
        """Enter the nodes here that the server does not know and that no other node has buried: the server has lost its
        last moments, or was restored from a copy. It has none of their calls, so other nodes have nothing to settle."""
        for node, is_buried in await self.listener.fetch(self.queries["missing_nodes"], list(self.joined)):
            if is_buried:
                self.bury([node])
            elif node in self.joined:
                await self.enter(node)
                _log.warning(
                    "the database has lost that node %s had joined: it joins again",
                    node[:8],
                    extra={"action": "store.node_lost", "node": node},
                )

    async def show_life(self, lock: int | None) -> None:
        """Raise the beats of the nodes here, because other nodes see that their lock is free; and write down another
        lock, if they have one. Raises `StoreError` if that fails."""
        if shown := list(self.joined):
            there = {row[0] for row in await self.listener.fetch(self.queries["show_life"], shown, lock)}
            if not self.joined <= there:
                await self.join_again()

    async def aclose(self) -> None:
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        self.joined.clear()
        self._holding.clear()
        self._has_buried = False
        self._bury_claims()

    async def holders(self, asker: NodeId) -> list[NodeId]:
        """Return the other nodes that hold something, or may."""
        seen = await self.listener.fetch(self.queries["node_locks"], 0.0)
        locked = {node: is_held for node, gone, is_held, _ in seen if not gone and node != asker}
        # A node whose lock is free does not answer: it is dead, or about to connect again.
        silent = {node for node, is_held in locked.items() if is_held is False and node not in self.joined}
        asked = list(locked.keys() - self.joined - silent)
        wanted: dict[NodeId, int] = {}
        if asked:
            wanted = {row[0]: row[1] for row in await self.listener.fetch(self.queries["ask"], asked)}
            await self.listener.notify((self.listener.channel(node), QUESTION) for node in asked)
        deadline = time.monotonic() + ANSWER_SECONDS
        while wanted and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            for node, _, answered in await self.listener.fetch(self.queries["questions"], asked):
                if answered >= wanted.get(node, answered + 1):
                    del wanted[node]
        holders = silent | wanted.keys() | self._holding
        return [node for node in locked if node in holders]

    def on_question(self) -> None:
        """Answer a question to a node of this process. If that fails, this node may hold something."""

        async def answer() -> None:
            with contextlib.suppress(StoreError):
                await self.answer()

        task = asyncio.get_running_loop().create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def answer(self) -> None:
        """Answer the questions until now. A node that begins to hold meanwhile has not answered those that follow."""
        seen = await self.listener.fetch(self.queries["questions"], list(self.joined))
        answers = {node: asked for node, asked, answered in seen if answered < asked and node not in self._holding}
        if answers:
            await self.listener.fetch(self.queries["answer"], list(answers), list(answers.values()))


class PostgresLiveness:
    """One node's view: by leases, and sooner by the locks of the listen connections.

    A free lock means that its process has ended or has lost its connection; on the same machine the process is looked
    up. A held lock means nothing, because a machine that is cut off does not free it.
    """

    def __init__(self, node: NodeId, holding: Holding, *, lease: float, monotonic: Callable[[], float]) -> None:
        self._node = node
        self._holding = holding
        self._fetch = holding.listener.fetch
        self._queries = holding.queries
        self._monotonic = monotonic
        self._leases = Leases(node, lease=lease, now=monotonic())
        self.node_claim = self._leases.claim
        holding.keep_claim(node, self.node_claim)

    async def beat(self, facts: bytes) -> None:
        sent = self._monotonic()
        if self.node_claim.at(sent) is ClaimState.BURIED:
            return
        beat = (self._queries["beat"], self._node, facts, self._holding.clock())
        if not await self._fetch(*beat):
            await self._holding.join_again()
            if self._node not in self._holding.joined or not await self._fetch(*beat):
                self._holding.bury([self._node])
                return
        self._leases.beaten(sent=sent, now=self._monotonic())

    async def overview(self, *, mail_after: int) -> Overview:
        seen = await self._look(mail_after)
        due = self._leases.due(now=self._monotonic())
        if not seen.dead and due is not None and due < SOON:
            await asyncio.sleep(due + 0.001)  # after it, however the two clocks round
            seen = await self._look(mail_after)
        return seen

    async def _look(self, mail_after: int) -> Overview:
        """Read everything in one statement: the beat of a node is the one that it had when its lock was free."""
        asked = self._monotonic()
        seen = await self._fetch(self._queries["overview"], self._node, mail_after)
        self._holding.count(len(seen))
        beats = {row["id"]: row["beat"] for row in seen}
        # After an outage all locks are free, this node's own as well: every process gets its time to connect again.
        free = {row["id"] for row in seen if row["held"] is False}
        others = [row for row in seen if row["id"] != self._node]
        processes = {row["id"]: is_running(row["process"], self._holding.process) for row in others}
        free -= {node for node, runs in processes.items() if runs}
        ended = {node for node, runs in processes.items() if runs is False}
        silent = self._leases.observe(beats, asked=asked, now=self._monotonic(), free=free, ended=ended)
        dead = {row["id"]: row["beat"] for row in others if row["gone"] or row["id"] in silent}
        nodes = [rows.node_record(row[:3]) for row in seen]
        waiting = (seen[0]["has_mail"], seen[0]["has_forwarded"]) if seen else (True, True)
        return Overview(nodes, dead, *waiting)

    def hold(self, holding: bool) -> None:
        self._holding.hold(self._node, holding)

    async def holders(self) -> Sequence[NodeId]:
        return await self._holding.holders(self._node)

    def ages(self) -> dict[NodeId, float]:
        return self._leases.ages(now=self._monotonic())


_PROC = Path("/proc")
_ENDED = ("Z", "X")
"""States of a process that has ended, and whose parent has not read its exit status."""


def process_name() -> str | None:
    """Return a name by which processes on this machine find this one."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        _, began = _state(os.getpid())
    except (OSError, ValueError, IndexError):
        return None
    return f"{boot} {namespace} {os.getpid()} {began}"


def is_running(name: str | None, seen_by: str | None) -> bool | None:
    """Whether the process of a name runs, as another process sees it; `None`: that process cannot look it up."""
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
    """Return the state of a process, and its start in ticks since the machine started."""
    # After the process's own name, which may contain anything.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
