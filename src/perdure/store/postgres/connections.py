"""Connects to the server, and gives its connections to one statement at a time.

A statement that was given up may still run on the server. Its connection is closed, which has the driver ask the server
to cancel it; whether it was done is not known, and need not be, because steps are repeatable (promise 5).
"""

import asyncio
import time
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import asyncpg

from perdure._core.histograms import Histogram
from perdure.errors import StoreUnavailable
from perdure.store.postgres.address import each_host
from perdure.store.postgres.failures import NAMED, NOT_POSTGRES, failure
from perdure.store.time_limit import TimeLimit

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

STATEMENTS = 200
"""Prepared statements that a connection keeps: more than there are."""

_SETTINGS = {
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "enable_seqscan": "off",
    "max_parallel_workers_per_gather": "0",
}
"""Every statement looks up a few rows by their keys, so one plan fits all values. To plan a read of all slots each time
takes longer than the read. A plan that was made while a table was small is kept while it grows, so no plan may read a
whole table where there is a key. A sweep, which reads more, must not take more than its share of the server."""

ISOLATION = "read committed"
"""A statement of the store waits for locks, and looks then what is so. At a stricter level it would see what was so
before it waited: a commit would not notice that its node has been buried meanwhile."""

SEARCH_PATH = "pg_catalog, pg_temp"
"""Where names without a schema are looked for: a function of another role that fits a call better than the server's own
would run with the store's rights. The store's own names have their schema."""

_OWN = {"default_transaction_isolation": ISOLATION, "idle_session_timeout": "0", "search_path": SEARCH_PATH}
"""What a role or a database may have set otherwise. Connections rest: the listen connection between two beats, readers
for long."""

_READ_ONLY = {"default_transaction_read_only": "on"}
"""For an operator's commands: the server itself refuses what would write."""

HOST_SECONDS = 0.2
"""How long a host has, of several, before the next one is asked too. A server on the same network answers sooner; all
of a few are asked within `store_timeout`, which is a second."""
# The driver only warns of a password file that others can read, and goes on without it: the server would then refuse an
# empty password, and the reason would stand in another line.
warnings.filterwarnings("error", message="password file", category=UserWarning)

CLOSE_SECONDS = 2.0
"""How long a connection that is closed waits for the server; then it is cut."""


class Connector:
    """Makes connections. Behind a pooler that shares sessions between clients, nothing is prepared on them."""

    def __init__(self, dsn: str, shown: str, *, timeout: float, reads_only: bool = False) -> None:
        self.shown = shown
        self._dsn = dsn
        self._hosts = each_host(dsn)
        self._reads_only = reads_only
        self._timeout = timeout
        self.is_pooled = False
        """A pooler answers, and not the server itself: the number of the process that was told when the connection was
        made is not the one that works for it."""
        self.lost = 0
        """Connections that were lost or given up."""
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self) -> Connection:
        """Make a connection to the first host that is fit, or raise what the driver raises.

        The driver by itself would wait for each host in turn, and a machine that lost its power never answers: another
        host gets its turn soon, and the first connection that comes is used.
        """
        if len(self._hosts) == 1:
            return await self._connect(self._hosts[0])
        waiting = deque(self._hosts)
        trying: set[asyncio.Task[Connection]] = set()
        failures: list[BaseException] = []
        try:
            while waiting or trying:
                if waiting:
                    trying.add(asyncio.create_task(self._connect(waiting.popleft())))
                pause = HOST_SECONDS if waiting else None
                done, trying = await asyncio.wait(trying, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                connections = [task.result() for task in done if task.exception() is None]
                for connection in connections[1:]:
                    self.discard(connection)
                if connections:
                    return connections[0]
                failures += [failure for task in done if (failure := task.exception()) is not None]
        finally:
            for task in trying:
                task.cancel()
            for late in await asyncio.gather(*trying, return_exceptions=True):
                if not isinstance(late, BaseException):
                    self.discard(late)
        # What a server says tells more than that another one cannot be reached.
        raise next((failure for failure in failures if not isinstance(failure, OSError)), failures[-1])

    async def _connect(self, dsn: str) -> Connection:
        settings = {} if "application_name=" in self._dsn else {"application_name": "perdure"}
        if not self.is_pooled:  # a pooler refuses settings that it does not know
            settings |= _SETTINGS | _OWN | (_READ_ONLY if self._reads_only else {})
        try:
            return await asyncpg.connect(
                dsn,
                timeout=self._timeout,
                statement_cache_size=0 if self.is_pooled else STATEMENTS,
                max_cached_statement_lifetime=0,
                server_settings=settings,
            )
        except TimeoutError as error:
            raise TimeoutError(f"no PostgreSQL server answered within {self._timeout:g} s") from error
        except asyncpg.ConnectionDoesNotExistError as error:
            raise ConnectionError(f"the connection was closed before it was made; {NOT_POSTGRES}") from error

    async def try_out(self) -> None:
        """Find out whether a server answers, and what."""
        connection = await self.connect()
        try:
            await self.look_for_pooler(connection)
        finally:
            await self.aclose([connection])

    async def look_for_pooler(self, connection: Connection) -> None:
        """Find out, on a connection that was made without prepared statements, what answers."""
        self.is_pooled = await connection.fetchval("SELECT pg_backend_pid()") != connection.get_server_pid()

    def give_up(self, connection: Connection) -> None:
        """Close a connection that was lost, or whose state is not known."""
        self.lost += 1
        self.discard(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection without waiting for it."""
        task = asyncio.get_running_loop().create_task(self._close(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, connection: Connection) -> None:
        try:
            await connection.close(timeout=CLOSE_SECONDS)
        except (*NAMED, asyncio.CancelledError):
            connection.terminate()

    async def aclose(self, connections: Sequence[Connection]) -> None:
        """Close connections, and wait for those that were discarded."""
        for connection in connections:
            self.discard(connection)
        while self._closing:
            await asyncio.wait(self._closing)


class Connections:
    """A few connections that are made when they are needed. Work waits its turn, in its order."""

    def __init__(self, connector: Connector, limit: TimeLimit, *, size: int) -> None:
        self._connector = connector
        self._limit = limit
        self._room = asyncio.Semaphore(size)
        self._size = size
        self._idle: list[Connection] = []
        self.took = Histogram()
        """How long work takes on a connection."""
        self._is_open = False
        self._asked = 0
        """Work that is done or waits."""

    @property
    def busy(self) -> int:
        return min(self._asked, self._size)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def waiting(self) -> int:
        return self._asked - self.busy

    def open(self) -> None:
        self._is_open = True

    async def aclose(self) -> None:
        """Do what waits, then close."""
        self._is_open = False
        for _ in range(self._size):
            await self._room.acquire()
        idle, self._idle = self._idle, []
        self._room = asyncio.Semaphore(self._size)
        await self._connector.aclose(idle)

    async def run(self, doing: str, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Work on a connection that has no other work. `doing` says what, for the failure's sentence."""
        if not self._is_open:
            raise StoreUnavailable(f"the database {self._connector.shown} is closed")
        self._asked += 1
        try:
            return await self._limit.wait(self._run(doing, work))
        finally:
            self._asked -= 1

    async def fetch(self, query: str, *values: Any) -> list[asyncpg.Record]:
        return await self.run("read", lambda connection: connection.fetch(query, *values))

    async def _run(self, doing: str, work: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._room:
            connection: Connection | None = None
            try:
                connection = await self._connection()
                began = time.perf_counter()
                result = await work(connection)
                self.took.observe(time.perf_counter() - began)
            except BaseException as error:
                # After an answer, even a bad one, a connection goes on; after anything else its state is not known.
                if connection is not None:
                    if isinstance(error, asyncpg.PostgresError) and not connection.is_closed():
                        self._idle.append(connection)
                    else:
                        self._connector.give_up(connection)
                if isinstance(error, NAMED):
                    raise failure(error, self._connector.shown, doing) from error
                raise
            self._idle.append(connection)
            return result

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
            self._connector.give_up(connection)
        return await self._connector.connect()
