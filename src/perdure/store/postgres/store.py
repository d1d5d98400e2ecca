"""The store in a PostgreSQL database, which processes on several machines share.

Durable (3) means here: what `commit` returned survives the death of this process and, with `synchronous_commit=on`
(PostgreSQL's default), a crash of the server. A standby that is promoted has it if replication is synchronous.

One commit is one statement, the function `commit_1`, so it is one round trip and one transaction. Reads have a few
connections of their own. The listen connection (`listen_connection.py`) shows that the process lives.

Dead (11) means: the node has not beaten for a lease; or the lock of its listen connection is free for a third of a
lease, without a beat meanwhile; or its process was looked up and has ended (`_core.leases`). Such a node may live, cut
off. So the server commits nothing for a process if one of its nodes is not in the store. If no other node has buried
that node, the server has lost it with its last moments, and the node joins again first. Wake-ups (8) are notifications,
or polling where there are none.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence

from perdure._core.ids import FENCE_BYTES, Fence, NodeId, SessionId, StreamId, new_fence
from perdure._core.retention import Cutoffs
from perdure.errors import StoreError
from perdure.store import records, rows
from perdure.store.interface import HintListener, Liveness
from perdure.store.postgres import layout
from perdure.store.postgres.address import for_writing, parse_address, without_password
from perdure.store.postgres.commits import Committer
from perdure.store.postgres.connections import Connections, Connector, named
from perdure.store.postgres.listen_connection import ListenConnection
from perdure.store.postgres.nodes import QUESTION, Holding, PostgresLiveness, process_name
from perdure.store.postgres.reads import PostgresReads, session_record
from perdure.store.postgres.sweep import SLOTS, Sweeper, is_slot
from perdure.store.postgres.wakeups import HINT, PostgresHints
from perdure.store.records import (
    MAX_COUNTED,
    OLDEST_STREAMS,
    Extent,
    Measures,
    SessionRecord,
    StreamRecord,
    Survey,
)
from perdure.store.steps import Refusals, SendMail, Step
from perdure.store.time_limit import TimeLimit

READERS = 4
"""Connections for reads and small changes: enough that a long replay keeps no other reader waiting, few enough that ten
processes leave room on a server with its hundred connections."""

SWEEP_SECONDS = 60.0
"""Seconds that one statement of a sweep may take. No other statement waits for it."""

SWEEP_MOST = 600.0
"""Seconds after which another process may begin a sweep whose process died. Two at once do no harm."""

SURVEY_SECONDS = 60.0
"""Seconds for which the sizes of tables are kept: they change slowly, and the server reads the size of each file."""


class PostgresStore(PostgresReads):
    """A store at an address such as `postgresql://user@host/database?schema=perdure`.

    `timeout`: seconds that one statement may take. Time in which earlier ones are answered does not count. `makes`: the
    schema is made or migrated if necessary. `writes`: without it the store is only read; the server may be a standby.
    `wall`: the time in seconds since 1970, for a node that finds no other one; by default the server's clock.
    `process`: the name by which processes on this machine find this one.
    """

    shared = True
    lapses = True

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 1.0,
        makes: bool = True,
        writes: bool = True,
        wall: Callable[[], float] | None = None,
        process: Callable[[], str | None] = process_name,
    ) -> None:
        self._address = address = for_writing(parse_address(url)) if writes else parse_address(url)
        self._makes = makes
        self._writes = writes
        self._wall = wall
        self._process = process()
        self._offset = (wall or time.time)() - time.monotonic()
        self._queries = queries = layout.queries(address.schema)
        self._connector = Connector(address.dsn, address.shown, timeout=address.patience, reads_only=not writes)
        self._direct = Connector(address.listen, address.shown, timeout=address.patience)
        self._readers = Connections(self._connector, TimeLimit(timeout), size=READERS)
        self._sweeping = Connections(self._connector, TimeLimit(SWEEP_SECONDS), size=1)
        self._sweeper = Sweeper(self._sweeping, queries)
        self._listener = ListenConnection(
            self._direct,
            self._readers,
            TimeLimit(timeout),
            schema=address.schema,
            on_notification=self._on_notification,
            show_life=lambda lock: self._holding.show_life(lock),
        )
        self._hints = PostgresHints(self._listener, poll=self._poll)
        self._holding = Holding(
            self._listener,
            queries,
            enter=lambda node: self._put_node(node, self.clock()),  # a node that the server has lost keeps its time
            process=self._process,
            clock=self.clock,
            count=self._hints.count,
        )
        self._writer = Committer(self._connector, TimeLimit(timeout), queries=queries, holding=self._holding)
        self._pools = (self._readers, self._sweeping, self._writer.connections)
        self._tables: list[tuple[str, int, int]] = []
        """The name, bytes and rows of each table."""
        self._tables_read = -math.inf
        """When, by the monotonic clock."""
        self._is_open = False
        self._turning = asyncio.Lock()

    async def open(self) -> None:
        async with self._turning:
            if self._is_open:
                return
            with named(self._address.shown, "opened"):
                await self._prepare()
            for connections in self._pools if self._writes else (self._readers,):
                connections.open()
            self._is_open = True

    async def _prepare(self) -> None:
        self._connector.is_pooled = self._direct.is_pooled = True  # nothing is prepared until it is known what answers
        has_direct = self._address.listen != self._address.dsn
        async with self._connector.connected() as connection:
            if self._writes and has_direct:
                # A wrong address is reported before anything is made.
                with named(f"{without_password(self._address.listen)}, which `listen` names,", "opened"):
                    async with self._direct.connected() as direct:
                        await self._direct.detect_pooler(direct)
            await layout.prepare(connection, self._address, makes=self._makes, writes=self._writes)
            await self._connector.detect_pooler(connection)
            if self._connector.is_pooled:
                await layout.check_settings(connection, self._address)
        if not has_direct:
            self._direct.is_pooled = self._connector.is_pooled

    async def aclose(self) -> None:
        """Write what is queued, then close. Nodes that have not left are dead then."""
        async with self._turning:
            if not self._is_open:
                return
            self._is_open = False
            await self._hints.aclose()
            await self._holding.aclose()
            await self._writer.connections.aclose()
            # The listen connection later: as long as anything is written, its node lives (11).
            await self._sweeping.aclose()
            await self._listener.aclose()
            await self._readers.aclose()

    # Writing

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        """Cancelling ends the wait; the steps may be written nevertheless (5)."""
        refusals = await self._writer.commit(steps)
        for place, step in enumerate(steps):
            if type(step) is SendMail and refusals[place] is None:
                self._hints.hint(step.node, ())
        return refusals

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        values = (stream, node, held, known, secrets.randbits(8 * FENCE_BYTES), records.KEPT_GENERATIONS)
        return await self._holding.as_members(lambda members: self._one("claim", rows.stream_record, *values, members))

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        return await self._one("next_incarnation", session_record, session)

    async def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str = "") -> bool:
        [(changed,)] = await self._readers.fetch(self._queries["change_note"], name, seen, value, session)
        return bool(changed)

    async def sweep(self, cutoffs: Cutoffs) -> int:
        """Of the processes that sweep at the same time one does the work."""
        if not await self._readers.fetch(self._queries["begin_sweep"], SWEEP_MOST):
            return 0
        try:
            return await self._sweeper.sweep(cutoffs, now=self.clock())
        finally:
            with contextlib.suppress(StoreError):
                await self._readers.fetch(self._queries["end_sweep"])

    # Figures

    def measures(self) -> Measures:
        figures: dict[str, float] = {
            "connections_busy": sum(pool.busy for pool in self._pools),
            "connections_idle": sum(pool.idle for pool in self._pools) + self._listener.has_connection,
            "waiting": sum(pool.waiting for pool in self._pools),
            "connections_lost": self._connector.lost + self._direct.lost,
            "polls": int(self._hints.polls),
            "hints_sent": self._hints.sent,
            "hints_heard": self._hints.received,
            "slots_emptied": self._sweeper.emptied,
            "slots_put_off": self._sweeper.put_off,
        }
        return Measures(figures=figures, seconds={"commit": self._writer.connections.took, "read": self._readers.took})

    async def survey(self) -> Survey:
        now = time.monotonic()
        if now - self._tables_read >= SURVEY_SECONDS:
            self._tables_read = now
            found = await self._readers.fetch(self._queries["table_sizes"], self._address.schema)
            self._tables = [(row[0], row[1], row[2]) for row in found]
        rotated = await self._readers.fetch(self._queries["rotated"])
        try:
            standbys = await self._readers.fetch(self._queries["standbys"])
        except StoreError:
            standbys = []  # some services do not show this view
        return Survey(
            sizes={name: size for name, size, _ in self._tables},
            rows={name: rows for name, _, rows in self._tables},
            rotated={row[0]: row[1] for row in rotated},
            lag_bytes={name: lag for name, lag, _ in standbys},
            lag_seconds={name: lag for name, _, lag in standbys},
            kept={part: sum(rows for name, _, rows in self._tables if is_slot(name, part)) for part in SLOTS},
            kept_bytes={part: sum(size for name, size, _ in self._tables if is_slot(name, part)) for part in SLOTS},
        )

    async def extent(self) -> Extent:
        """Trimmed events count until their slot is emptied."""
        [(events,)] = await self._readers.fetch(self._queries["count_events"], MAX_COUNTED)
        [(oldest,)] = await self._readers.fetch(self._queries["oldest_retained"], OLDEST_STREAMS)
        size = sum((await self.survey()).sizes.values())
        return Extent(size, min(events, MAX_COUNTED), False, oldest)

    # Wake-ups

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        return self._hints.subscribe(node, listener)

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        if self._is_open:
            self._hints.hint(node, streams)

    def _on_notification(self, channel: str, payload: str) -> None:
        kind, *streams = payload.split(" ")
        if kind in ("", HINT):
            self._hints.on_hint(channel, streams)
        elif kind == QUESTION:
            self._holding.on_question()

    async def _poll(self) -> object:
        [(written, asked)] = await self._readers.fetch(self._queries["poll"], list(self._holding.joined))
        if asked:
            await self._holding.answer()
        return written

    # Nodes

    async def join(self, node: NodeId) -> Fence:
        """Take the lock first, because a row whose lock is free is that of a dead node."""
        await self._listener.open()
        await self._listener.listen(node)
        wall = None if self._wall is None else self._wall()
        asked = time.monotonic()
        now = await self._put_node(node, wall)
        self._offset = now - (asked + time.monotonic()) / 2
        self._holding.join(node)
        self._hints.start_polling()
        return new_fence(1, secrets.token_bytes)

    async def _put_node(self, node: NodeId, wall: float | None) -> float:
        """Write the row of a node; returns the store's time."""
        lock = self._listener.lock if self._listener.has_notifications else None
        values = (node, lock, self._writer.name, b"{}", wall, self._process)
        [(now,)] = await self._readers.fetch(self._queries["join"], *values)
        return float(now)

    def clock(self) -> float:
        return time.monotonic() + self._offset

    async def leave(self, node: NodeId) -> None:
        await self._readers.fetch(self._queries["leave"], node)
        self._holding.leave(node)
        await self._listener.stop_listening(node)

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        return PostgresLiveness(node, self._holding, lease=lease, monotonic=monotonic)

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        [(mail, keys)] = await self._holding.as_members(
            lambda members: self._readers.fetch(self._queries["bury"], node, heir, beat, members)
        )
        if mail is None:
            return None
        self._holding.bury([node])
        if mail:
            self._hints.hint(heir, ())
        return await self._all("streams_by_key", rows.stream_record, keys) if keys else []
