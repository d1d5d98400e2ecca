"""Commits steps on a connection of its own, one commit at a time, each in one statement."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import asyncpg

from perdure._core.histograms import Histogram
from perdure._core.ids import SessionId
from perdure.errors import StoreUnavailable
from perdure.store.codec import Payloads
from perdure.store.postgres.connections import Connection, Connector
from perdure.store.postgres.failures import AGAIN, NAMED, failure, is_unknown
from perdure.store.postgres.nodes import Holding
from perdure.store.postgres.steps import CommitArguments, lock_order
from perdure.store.steps import ChangeSession, Refusals, Step, StepRejected, Why, refusal
from perdure.store.time_limit import TimeLimit

TRIES = 20
"""Times that a commit is tried which other commits undo: each time another one has got through."""


class Writer:
    """Has the writing connection. Commits are made in the order in which they are asked for."""

    def __init__(
        self,
        connector: Connector,
        limit: TimeLimit,
        *,
        payloads: Payloads,
        queries: Mapping[str, str],
        holding: Holding,
    ) -> None:
        self._connector = connector
        self._limit = limit
        self._payloads = payloads
        self._queries = queries
        self._holding = holding
        self.name = secrets.randbits(63)
        """Its own among all writers: a commit waits on the server for an earlier one of the same name that was given up
        and still runs, so that commits happen in their order. The burial of a node of this process waits, too."""
        self._turn = asyncio.Lock()
        self._asked = 0
        """Commits that are made or wait."""
        self.took = Histogram()
        """How long the server takes for one."""
        self._connection: Connection | None = None
        self._call: Callable[..., Awaitable[Any]]
        """Calls the function on the connection."""
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    async def aclose(self) -> None:
        """Write what waits, then close."""
        self._is_open = False
        async with self._turn:
            connection, self._connection = self._connection, None
        await self._connector.aclose([] if connection is None else [connection])

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        if not self._is_open:
            raise StoreUnavailable(f"the database {self._connector.shown} is closed")
        self._asked += 1
        try:
            return await self._limit.wait(self._commit(steps))
        finally:
            self._asked -= 1

    @property
    def busy(self) -> int:
        return min(self._asked, 1)

    @property
    def idle(self) -> int:
        return int(self._connection is not None and not self._asked)

    @property
    def waiting(self) -> int:
        return self._asked - self.busy

    async def _commit(self, steps: Sequence[Step]) -> Refusals:
        async with self._turn:
            try:
                if self._connection is not None and self._connection.is_closed():
                    self._connector.give_up(self._connection)
                    self._connection = None
                if self._connection is None:
                    self._connection = await self._connect()
                return await self._attempts(self._connection, steps)
            except BaseException as error:
                # After an answer, even a bad one, the connection goes on; after anything else its state is not known.
                if self._connection is not None and not isinstance(error, asyncpg.PostgresError):
                    self._connector.give_up(self._connection)
                    self._connection = None
                self._holding.refused(error)
                if isinstance(error, NAMED):
                    raise failure(error, self._connector.shown, "written") from error
                raise

    async def _connect(self) -> Connection:
        """Connect, and prepare the statement of every commit: the driver need not look for it each time."""
        connection, query = await self._connector.connect(), self._queries["commit"]
        if self._connector.is_pooled:
            self._call = partial(connection.fetchval, query)
            return connection
        try:
            self._call = (await connection.prepare(query)).fetchval
        except BaseException:
            self._connector.give_up(connection)
            raise
        return connection

    async def _attempts(self, connection: Connection, steps: Sequence[Step]) -> Refusals:
        encoded = self._payloads.encode_steps(steps)
        order = lock_order(encoded)
        sticks = {step.session for step in encoded if type(step) is ChangeSession and step.stick is not None}
        for attempt in range(1, TRIES + 1):
            members = self._holding.members()
            arguments = CommitArguments(self._payloads, await self._sticky(connection, sticks) if sticks else {})
            for place in order:
                arguments.add(encoded[place])
            began = time.perf_counter()
            try:
                found = await self._call(*arguments.values(self.name, members))
                self.took.observe(time.perf_counter() - began)
            except asyncpg.PostgresError as error:
                if attempt == TRIES or not (isinstance(error, AGAIN) or is_unknown(error)):
                    raise
                if is_unknown(error):
                    await self._holding.join_again()
                continue
            return _refusals(steps, order, found)
        raise AssertionError("unreachable")

    async def _sticky(self, connection: Connection, sessions: set[SessionId]) -> Mapping[SessionId, tuple[bytes, ...]]:
        """What sessions repeat. Only this process can tell what a sticky request replaces, because payloads are encoded
        here; the server takes the result if the requests are still those that were read."""
        found = await connection.fetch(self._queries["sticky_of_sessions"], list(sessions))
        return {session: tuple(requests) for session, requests in found}


def _refusals(steps: Sequence[Step], order: Sequence[int], found: Sequence[Any]) -> Refusals:
    refusals: list[StepRejected | None] = [None] * len(steps)
    for start in range(0, len(found), 3):
        place = order[int(found[start])]
        refusals[place] = refusal(steps[place], Why(found[start + 1]), found[start + 2])
    return refusals
