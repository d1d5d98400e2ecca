"""Nodes of a SQLite store: joining, leaving, burying, and which nodes are alive."""

import asyncio
import secrets
import sqlite3
from collections.abc import Callable, Sequence

from perdure._core.ids import Fence, NodeId, new_fence
from perdure.store import rows
from perdure.store.records import NodeRecord, Overview, StreamRecord
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.locks import Locks
from perdure.store.sqlite.reads import ReaderPool
from perdure.store.sqlite.steps import StepWriter, next_key
from perdure.store.sqlite.writer import Writer

_SQL = _sql.queries()


def join(
    steps: StepWriter, connection: sqlite3.Connection, *, node: NodeId, locks: Locks, offset: float
) -> tuple[Fence, float]:
    """Join: returns the fence and the clock offset. A node that finds others alive takes over their offset."""
    found = connection.execute(_SQL["read_clock"]).fetchone()
    if found is not None and any(locks.lives(other.id) for other in _joined(connection) if other.id != node):
        (offset,) = found
    else:
        connection.execute(_SQL["set_clock"], (offset,))
    connection.execute(_SQL["put_node"], (node, b"{}"))
    return new_fence(1, secrets.token_bytes), offset


def leave(_: StepWriter, connection: sqlite3.Connection, *, node: NodeId) -> None:
    connection.execute(_SQL["forget_sender"], (node,))
    connection.execute(_SQL["leave_node"], {"node": node})


def bury(
    _: StepWriter, connection: sqlite3.Connection, *, node: NodeId, heir: NodeId, beat: int | None
) -> tuple[list[StreamRecord], bool] | None:
    """Return the streams that it read, and whether it had mail; or `None` if it has beaten since `beat`."""
    found = connection.execute(_SQL["read_beat"], (node,)).fetchone()
    if beat is not None and found not in (None, (beat,)):
        return None
    read = [rows.stream_record(row) for row in connection.execute(_SQL["streams_read_from"], (node,))]
    connection.execute(_SQL["drop_readers"], (node,))
    (oldest,) = connection.execute(_SQL["oldest_mail"], (node,)).fetchone()
    if oldest is not None:
        shift = next_key(connection, "mail") - oldest
        connection.execute(_SQL["inherit_mail"], {"heir": heir, "node": node, "shift": shift})
        connection.execute(_SQL["empty_mail"], (node,))
    connection.execute(_SQL["forget_sender"], (node,))
    connection.execute(_SQL["drop_node"], (node,))
    return read, oldest is not None


class SqliteLiveness:
    """Decides by locks: free means dead. A process that stands still is not dead, and its own claim is never FROZEN,
    because it holds its lock until it leaves or closes."""

    def __init__(
        self, node: NodeId, *, locks: Locks, writer: Writer, readers: ReaderPool, monotonic: Callable[[], float]
    ) -> None:
        self._node = node
        self._locks = locks
        self._writer = writer
        self._readers = readers
        self._monotonic = monotonic
        self._facts: bytes | None = None
        self._alive: dict[NodeId, float] = {}
        self.node_claim = locks.claim(node)

    async def beat(self, facts: bytes) -> None:
        if facts == self._facts:
            return
        await self._writer.run(lambda _, connection: connection.execute(_SQL["beat"], (facts, self._node)).rowcount)
        self._facts = facts

    async def overview(self, *, mail_after: int) -> Overview:
        """Does not read whether mail waits: that is another small read of the same file."""
        joined, dead, alive = await self._readers.run(self._look)
        self._locks.lock_again()
        now = self._monotonic()
        self._alive = dict.fromkeys(alive, now) | {node: self._alive.get(node, now) for node in dead}
        return Overview(joined, {record.id: record.beat for record in joined if record.id in dead})

    def hold(self, holding: bool) -> None:
        self._locks.hold(self._node, holding)

    async def holders(self) -> Sequence[NodeId]:
        """Reads the locks, not the file, which may be what fails."""
        return [node for node in await asyncio.to_thread(self._locks.holders) if node != self._node]

    def ages(self) -> dict[NodeId, float]:
        now = self._monotonic()
        return {node: now - seen for node, seen in self._alive.items()} | {self._node: 0.0}

    def _look(self, connection: sqlite3.Connection) -> tuple[list[NodeRecord], list[NodeId], list[NodeId]]:
        """Return the nodes that have joined, and those of them that are dead and alive, without this one."""
        self._writer.look_at_file()
        joined = _joined(connection)
        others = [record.id for record in joined if record.id != self._node]
        left_behind = [node for node in self._locks.names() if node not in others and node != self._node]
        free, alive = self._locks.take([*others, *left_behind])
        if not free:
            return joined, [], alive
        # Read again under the lock: another process may have buried it meanwhile, or it never joined, or it has left.
        joined = _joined(connection)
        there = {record.id for record in joined}
        for node in free:
            if node not in there:
                self._locks.bury(node)
        return joined, [node for node in free if node in there], [node for node in alive if node in there]


def _joined(connection: sqlite3.Connection) -> list[NodeRecord]:
    return [rows.node_record(row) for row in connection.execute(_SQL["all_nodes"])]
