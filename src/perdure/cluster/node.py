"""Keeps this process alive as a node of the store, knows the other nodes, and has the calls of dead ones settled."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from perdure._core.ids import NodeId
from perdure._core.leases import BEATS_IN_LEASE
from perdure._core.states import ClaimState
from perdure.cluster.settler import Settler
from perdure.cluster.watcher import Watcher
from perdure.errors import HeldElsewhere, StoreLost
from perdure.log.chores import cancel_all
from perdure.sessions.listening import Listening
from perdure.store.interface import Liveness
from perdure.store.records import Overview
from perdure.telemetry.log_records import log_event
from perdure.telemetry.prometheus import has_left

ROUND = 0.65
"""Seconds between two looks at who lives: the calls of a dead process are settled within about a second. With the beats
(`LONGEST_PAUSE`) that makes two statements a second, which is all that a node asks of a server when nothing
happens."""

LONGEST_PAUSE = 3.0
"""Seconds between two beats at the most: operators see the numbers of all nodes as of their last beat."""

_KNOWN_DEAD = 64
"""Dead nodes that are remembered: their sessions come in herds, soon after the death."""


class Peers:
    """The other nodes on the store, as this one knows them."""

    def __init__(self, *, node: NodeId, liveness: Liveness) -> None:
        self.others: Sequence[NodeId] = ()
        """The nodes that live, as far as is known."""
        self.departed: frozenset[NodeId] = frozenset()
        """The nodes that left in good order, and left something behind."""
        self.alone = False
        """No other node is there, not even a dead one whose calls are to be settled. Not known at first."""
        self._node = node
        self._liveness = liveness
        self._dead: deque[NodeId] = deque(maxlen=_KNOWN_DEAD)

    async def meet(self, *, mail_after: int = 0) -> Overview:
        """Read which nodes are there."""
        seen = await self._liveness.overview(mail_after=mail_after)
        known = [record.id for record in seen.nodes if record.id != self._node]
        self.alone = not known
        self.others = tuple(node for node in known if node not in seen.dead)
        self.departed = frozenset(record.id for record in seen.nodes if has_left(record))
        self._dead = deque((node for node in self._dead if node not in self.others), maxlen=_KNOWN_DEAD)
        return seen

    async def is_dead(self, node: NodeId) -> bool:
        """Whether a node is dead. The store is asked once, however many of its sessions come here; one that is back
        after all is found by the next round."""
        if node == self._node:
            return False
        if node not in self._dead:
            seen = await self._liveness.overview(mail_after=0)
            if node not in seen.dead and any(record.id == node for record in seen.nodes):
                return False
            self._dead.append(node)
        return True

    async def holders(self) -> Sequence[NodeId]:
        """The other nodes that live and show what is not in the store."""
        return await self._liveness.holders()

    async def refuse_while_held(self) -> None:
        """Raises `HeldElsewhere` while another node holds anything. After that the store has all that it has shown."""
        if holders := await self.holders():
            raise HeldElsewhere(f"{len(holders)} other nodes hold what is not written yet")


@dataclass(kw_only=True)
class Node:
    """Beats and goes round. Beats go on while a dead node is settled, however long that takes."""

    liveness: Liveness
    peers: Peers
    settler: Settler
    watcher: Watcher
    listening: Listening | None
    lease: float
    facts: Callable[[], bytes]
    resume: Callable[[], None]
    """Called in each round while this node holds its claim: what rests because it did not may go on."""
    on_buried: Callable[[], None]
    on_lost: Callable[[StoreLost], None]
    _claim: ClaimState = field(default=ClaimState.HOLDING, init=False)
    """The one that the log tells of."""
    _seen: Overview | None = field(default=None, init=False)
    """What this round has seen."""
    _failing: set[str] = field(default_factory=set, init=False)
    _settling: set[NodeId] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._every = min(self.lease / BEATS_IN_LEASE, LONGEST_PAUSE)
        self._round = min(ROUND, self._every)

    async def run(self) -> None:
        """Runs until another node has buried this one."""
        tasks = [
            asyncio.create_task(self._repeat("this node could not show that it lives", self._beat, self._every)),
            asyncio.create_task(self._repeat("other nodes could not be looked after", self.go_round, self._round)),
        ]
        try:
            while (claim := self.liveness.own_claim) is not ClaimState.BURIED:
                self._look_at_claim(claim)
                await asyncio.sleep(self._round)
        finally:
            await cancel_all(tasks)
        log_event(
            logging.ERROR,
            "node.buried",
            "other nodes took this node for dead and have settled its calls: it writes nothing more, and ends",
        )
        self.on_buried()

    def _look_at_claim(self, claim: ClaimState) -> None:
        """Tell what has become of this node's claim, which runs out by a clock, without an event."""
        if claim is not self._claim:
            self._claim = claim
            if claim is ClaimState.FROZEN:
                log_event(
                    logging.ERROR,
                    "node.lapsed",
                    "this node's lease has lapsed: it shows and accepts nothing until the store answers",
                )
            else:
                log_event(logging.WARNING, "node.resumed", "the store answers and knows this node: it goes on")
        if claim is ClaimState.HOLDING:
            self.resume()

    async def _repeat(self, what: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
        while True:
            await self._attempt(what, what, work())
            holds = self.liveness.own_claim is ClaimState.HOLDING
            await asyncio.sleep(pause if holds else self._round)  # so that it goes on soon

    async def _attempt(self, key: str, what: str, work: Awaitable[None]) -> None:
        """Do something that may fail and is tried again in the next round. `key` names it, so that it is logged
        once."""
        try:
            await work
            self._failing.discard(key)
        except StoreLost as failure:
            self.on_lost(failure)
        except Exception as failure:
            # The store fails, which the journal logs; or one node cannot be settled, which must not stop us.
            level = logging.DEBUG if key in self._failing else logging.WARNING
            log_event(level, "node.round", f"{what}: {failure!r}")
            self._failing.add(key)

    async def _beat(self) -> None:
        # One that hangs must not be the last: the store may be back long before the lease has lapsed.
        async with asyncio.timeout(2 * self._every):
            await self.liveness.beat(self.facts())

    async def go_round(self) -> None:
        if self.liveness.own_claim is not ClaimState.HOLDING:
            return  # other nodes may act in its place; it must not act in theirs
        self._seen = None
        await self._attempt("meet", "the other nodes could not be seen", self._settle_dead())
        await self.settler.go_round()  # which survives whatever fails in it
        self.watcher.go_round(self._seen)

    async def _settle_dead(self) -> None:
        self._seen = seen = await self.peers.meet(mail_after=self.watcher.handled)
        self._settling &= set(seen.dead)
        for node, beat in seen.dead.items():
            await self._attempt(node, f"node {node[:8]} could not be settled", self._settle(node, beat))

    async def _settle(self, dead: NodeId, beat: int) -> None:
        has_left = dead in self.peers.departed
        if dead not in self._settling:
            self._settling.add(dead)
            name = dead[:8]
            if has_left:
                log_event(logging.INFO, "node.departed", f"node {name} has left; its calls are taken over", node=dead)
            else:
                log_event(logging.WARNING, "node.dead", f"node {name} has died; its calls are being settled", node=dead)
                if self.listening is not None:
                    self.listening.on_death()
        is_buried = await self.settler.settle_node(dead, beat, has_left=has_left)
        if is_buried and not has_left and self.listening is not None:
            self.listening.on_burial()
        await self.peers.meet()
