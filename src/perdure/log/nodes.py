"""Knows the other nodes on the store, and makes the steps that send them mail."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from perdure._core import mail
from perdure._core.ids import NodeId
from perdure.errors import HeldElsewhere
from perdure.store.interface import Liveness
from perdure.store.records import Overview
from perdure.store.steps import SendMail, Step
from perdure.telemetry.prometheus import has_left

T = TypeVar("T")

_KNOWN_DEAD = 64
"""Dead nodes that are remembered: the clients of all their sessions return soon after the death."""


class OtherNodes:
    """Knows the other nodes on the store."""

    def __init__(self, *, node: NodeId, liveness: Liveness) -> None:
        self.others: Sequence[NodeId] = ()
        """The nodes that are alive, when the store was last read."""
        self.departed: frozenset[NodeId] = frozenset()
        """The nodes that left in good order, and left something to settle."""
        self.alone = False
        """No other node exists, not even a dead one whose calls are to be settled. False until it is known."""
        self._node = node
        self._liveness = liveness
        self._dead: deque[NodeId] = deque(maxlen=_KNOWN_DEAD)

    async def meet(self, *, mail_after: int = 0) -> Overview:
        seen = await self._liveness.overview(mail_after=mail_after)
        known = [record.id for record in seen.nodes if record.id != self._node]
        self.alone = not known
        self.others = tuple(node for node in known if node not in seen.dead)
        self.departed = frozenset(record.id for record in seen.nodes if has_left(record))
        self._dead = deque((node for node in self._dead if node not in self.others), maxlen=_KNOWN_DEAD)
        return seen

    async def is_dead(self, node: NodeId) -> bool:
        """Whether a node certainly writes nothing more. The store is asked once for all sessions of the node; `meet`
        finds a node that is back after all."""
        if node == self._node:
            return False
        if node not in self._dead:
            seen = await self._liveness.overview(mail_after=0)
            if node not in seen.dead and any(record.id == node for record in seen.nodes):
                return False
            self._dead.append(node)
        return True

    async def holders(self) -> Sequence[NodeId]:
        """The other nodes that are alive and show events which are not in the store."""
        return await self._liveness.holders()

    async def found(self, read: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return what `read` finds in the store. What is missing is read once more when no other node holds anything:
        it may have been written meanwhile. Raises `HeldElsewhere`."""
        if (found := await read()) is None:
            if holders := await self.holders():
                raise HeldElsewhere(f"{len(holders)} other nodes hold events that are not written yet")
            found = await read()
        return found


def mail_to(nodes: Iterable[NodeId], message: mail.Message) -> list[Step]:
    encoded = mail.encode(message)
    return [SendMail(node=node, message=encoded) for node in nodes]
