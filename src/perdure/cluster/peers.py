"""Peers of this node: which are alive, which hold what is not written yet, and which are dead."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from perdure._core.ids import NodeId
from perdure.errors import HeldElsewhere
from perdure.store.base import Liveness, Store
from perdure.telemetry.prometheus import has_left

_KNOWN_DEAD = 64
"""Dead nodes that are remembered: their sessions come in herds, soon after the death."""


class Peers:
    """The other nodes on the store, as this one knows them."""

    def __init__(self, *, node: NodeId, store: Store, liveness: Liveness) -> None:
        self.others: Sequence[NodeId] = ()
        """The nodes that live, as far as is known."""
        self.departed: frozenset[NodeId] = frozenset()
        """The nodes that left in good order, and left something behind."""
        self.alone = False
        """No other node is there, not even a dead one whose calls are to be settled. Not known at first."""
        self._node = node
        self._store = store
        self._liveness = liveness
        self._dead: deque[NodeId] = deque(maxlen=_KNOWN_DEAD)

    async def meet(self) -> Sequence[NodeId]:
        """Read which nodes are there; gives the dead ones."""
        dead = await self._liveness.dead()
        nodes = await self._store.nodes()
        known = [record.id for record in nodes if record.id != self._node]
        self.alone = not known
        self.others = tuple(node for node in known if node not in dead)
        self.departed = frozenset(record.id for record in nodes if has_left(record))
        return dead

    async def is_dead(self, node: NodeId) -> bool:
        """Whether a node certainly writes nothing more. A node that is dead stays dead, so the store is asked once,
        however many of its sessions come here."""
        if node == self._node:
            return False
        if node not in self._dead:
            known = {record.id for record in await self._store.nodes()}
            if node in known and node not in await self._liveness.dead():
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
