"""Collects what a PostgreSQL store has to tell for the metrics.

What this process counts costs a few additions for each statement. What only the server knows is asked for by a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from perdure.errors import StoreError
from perdure.store.postgres.connections import Connections, Connector
from perdure.store.postgres.listen_connection import ListenConnection
from perdure.store.postgres.sweep import SLOTS, Sweeps, is_slot
from perdure.store.postgres.wakeups import Hints
from perdure.store.postgres.writer import Writer
from perdure.store.records import Measures, Survey

SURVEY_SECONDS = 60.0
"""Seconds for which the sizes of tables are not asked for again: they change slowly, and the server looks at each file
for them."""


class Metrics:
    """Reads the counts of a store's parts."""

    def __init__(
        self,
        queries: Mapping[str, str],
        schema: str,
        *,
        readers: Connections,
        sweeper: Connections,
        writer: Writer,
        listener: ListenConnection,
        hints: Hints,
        connectors: Sequence[Connector],
    ) -> None:
        self._queries = queries
        self._schema = schema
        self._readers = readers
        self._pools = (readers, sweeper, writer)
        self._writer = writer
        self._listener = listener
        self._hints = hints
        self._connectors = connectors
        self.sweeps = Sweeps()
        self._tables: list[tuple[str, int, int]] = []
        """The name, bytes and rows of each table, as of the last look."""
        self._looked: float | None = None

    def measures(self) -> Measures:
        figures: dict[str, float] = {
            "connections_busy": sum(pool.busy for pool in self._pools),
            "connections_idle": sum(pool.idle for pool in self._pools) + self._listener.has_connection,
            "waiting": sum(pool.waiting for pool in self._pools),
            "connections_lost": sum(connector.lost for connector in self._connectors),
            "polls": int(self._hints.polls),
            "hints_sent": self._hints.sent,
            "hints_heard": self._hints.heard,
            "slots_emptied": self.sweeps.emptied,
            "slots_put_off": self.sweeps.put_off,
        }
        return Measures(figures=figures, seconds={"commit": self._writer.took, "read": self._readers.took})

    async def survey(self) -> Survey:
        now = time.monotonic()
        if self._looked is None or now - self._looked >= SURVEY_SECONDS:
            self._looked = now
            found = await self._readers.fetch(self._queries["table_sizes"], self._schema)
            self._tables = [(row[0], row[1], row[2]) for row in found]
        rotated = await self._readers.fetch(self._queries["rotated"])
        standbys = await self._standbys()
        return Survey(
            sizes={name: size for name, size, _ in self._tables},
            rows={name: rows for name, _, rows in self._tables},
            rotated={row[0]: row[1] for row in rotated},
            lag_bytes={name: lag for name, lag, _ in standbys},
            lag_seconds={name: lag for name, _, lag in standbys},
            kept={part: sum(rows for name, _, rows in self._tables if is_slot(name, part)) for part in SLOTS},
            kept_bytes={part: sum(size for name, size, _ in self._tables if is_slot(name, part)) for part in SLOTS},
        )

    async def _standbys(self) -> list[tuple[str, int, float]]:
        """Those that the role may see: the server shows none of their figures to others."""
        try:
            found = await self._readers.fetch(self._queries["standbys"])
        except StoreError:
            return []  # some services keep this view to themselves
        return [(row[0], row[1], row[2]) for row in found]
