"""Connects to the server, lends its connections to one piece of work at a time, and names the failures of the server
and its driver (promise 9).

A statement that was given up may still run on the server. Its connection is closed, and the driver then asks the server
to cancel the statement. Whether it was applied is not known, and need not be, because steps are repeatable (promise 5).
"""

import asyncio
import contextlib
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias, TypeVar

import asyncpg

from perdure._core.histograms import Histogram
from perdure.errors import StoreError, StoreUnavailable
from perdure.store.postgres.address import each_host
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
"""Every statement reads a few rows by their keys, so one plan fits all values, and planning a read of all slots takes
longer than the read. A plan that was made while a table was small is kept while it grows, so no plan may read a whole
table that has a key. A sweep, which reads more, must not take more than its share of the server."""

ISOLATION = "read committed"
"""A statement of the store waits for locks and reads after that. At a stricter level it would see the state before the
wait: a commit would not notice that its node was buried meanwhile."""

SEARCH_PATH = "pg_catalog, pg_temp"
"""The schemas of names without a schema. A function of another role that fits a call better than the server's own would
run with the store's rights. The store's own names have their schema."""

_OWN = {"default_transaction_isolation": ISOLATION, "idle_session_timeout": "0", "search_path": SEARCH_PATH}
"""Settings that a role or a database may have changed. Connections are idle: the listen connection between two beats,
readers for long."""

_READ_ONLY = {"default_transaction_read_only": "on"}
"""For an operator's commands: the server refuses every write."""

HOST_SECONDS = 0.2
"""Seconds that each of several hosts has before the next one is tried too. A server on the same network answers sooner,
and a few hosts are all tried within `store_timeout`, which is a second."""

# The driver only warns of a password file that others can read, and continues without it: the server would then refuse
# an empty password, and the log would not name the reason.
warnings.filterwarnings("error", message="password file", category=UserWarning)

CLOSE_SECONDS = 2.0
"""Seconds that closing a connection waits for the server before the connection is cut."""


NAMED = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    ValueError,
    TypeError,
    UserWarning,
)
"""The driver's exceptions; each leaves the store as a `StoreError`. (`TimeoutError` is an `OSError`; values that cannot
be encoded are a `ValueError` or a `TypeError`; a password file that others can read is a `UserWarning`.)"""

AGAIN = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
"""Two transactions conflicted, and nothing was done: the statement is tried again."""

BURIED = "PD001"
"""The code that `refuse_buried_1` raises, with the names of buried nodes."""

UNKNOWN = "PD002"
"""The same for nodes that the server has lost with its last moments."""

_OF_THE_SERVER = ("08", "25", "40", "53", "55", "57", "58", BURIED, UNKNOWN)
"""Classes of conditions that may pass: connection, a transaction's state (the server only reads: another one has become
the primary), rollback, resources, lock, operator's intervention, system error, and nodes that were buried or lost."""

_OF_AN_OPERATOR = ("28", "3D", "3F", "42501", "42883", "42P01")
"""What an operator takes away and gives back while processes serve: the role's login or password, the database, the
schema, rights, functions and tables (a dump is restored, for example). The steps themselves are right."""

_OF_THE_MOMENT = (*_OF_THE_SERVER, *_OF_AN_OPERATOR)


def is_unknown(error: BaseException | None) -> bool:
    """Whether the server refused something because it has lost the node that asks."""
    return getattr(error, "sqlstate", None) == UNKNOWN


NOT_POSTGRES = "what answers there may not be PostgreSQL"

_ADVICE = {
    "rejected SSL upgrade": f"it takes no TLS, or {NOT_POSTGRES}",
    "unexpected connection_lost() call": NOT_POSTGRES,
    "unsupported startup parameter": "the pooler takes no such setting: leave it out of the address, and set it for"
    " the role with ALTER ROLE … SET",
    "statement pooling mode": "the pooler takes no transactions: make or migrate the schema with `perdure store init`"
    " or `migrate` at an address past it",
}
"""Advice for errors of the driver and of PgBouncer, by a part of their text."""


@contextlib.contextmanager
def named(shown: str, doing: str) -> Iterator[None]:
    """Raise the driver's exceptions as named failures, with their cause: `StoreUnavailable` where trying again may
    help, else `StoreError`."""
    try:
        yield
    except StoreError:
        raise
    except NAMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = "".join(f"; {advice}" for part, advice in _ADVICE.items() if part in reason)
        state = getattr(error, "sqlstate", None) or ""
        if isinstance(error, asyncpg.PostgresError) and state:
            may_pass = state.startswith(_OF_THE_MOMENT)
        else:
            may_pass = isinstance(error, asyncpg.ClientConfigurationError) or not isinstance(
                error, asyncpg.DataError | ValueError | TypeError
            )
        sentence = f"the database {shown} cannot be {doing}: {reason}{advice}"
        raise (StoreUnavailable if may_pass else StoreError)(sentence) from error


class Connector:
    """Makes connections. Behind a pooler that shares sessions between clients, nothing is prepared on them."""

    def __init__(self, dsn: str, shown: str, *, timeout: float, reads_only: bool = False) -> None:
        self.shown = shown
        self._dsn = dsn
        self._hosts = each_host(dsn)
        self._reads_only = reads_only
        self._timeout = timeout
        self.is_pooled = False
        """A pooler answers instead of the server: another backend works for the connection than the one that the driver
        knows."""
        self.lost = 0
        """Connections that were lost or given up."""
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self) -> Connection:
        """Connect to the first fit host, or raise the driver's exception.

        The driver alone would wait for each host in turn, and a machine that lost its power never answers. So the next
        host is tried soon, and the first connection is used.
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
        # The reason of a server helps more than that another one cannot be reached.
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

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """Lend a connection of its own, and close it."""
        connection = await self.connect()
        try:
            yield connection
        finally:
            await self.aclose([connection])

    async def detect_pooler(self, connection: Connection) -> None:
        """Find out what answers, on a connection that was made without prepared statements."""
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


@dataclass(eq=False)
class Connections:
    """A few connections that are made when they are needed. Work waits its turn, in its order."""

    _connector: Connector
    _limit: TimeLimit
    _: KW_ONLY
    size: int
    prepare: Callable[[Connection], Awaitable[object]] | None = None
    """Called with each new connection."""
    _room: asyncio.Semaphore = field(init=False)
    _idle: list[Connection] = field(default_factory=list)
    took: Histogram = field(default_factory=Histogram)
    """Seconds that work takes on a connection."""
    _is_open: bool = False
    _asked: int = 0
    """Pieces of work that run or wait."""

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.size)

    @property
    def busy(self) -> int:
        return min(self._asked, self.size)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def waiting(self) -> int:
        return self._asked - self.busy

    def open(self) -> None:
        self._is_open = True

    async def aclose(self) -> None:
        """Finish the work that waits, then close."""
        self._is_open = False
        for _ in range(self.size):
            await self._room.acquire()
        idle, self._idle = self._idle, []
        self._room = asyncio.Semaphore(self.size)
        await self._connector.aclose(idle)

    async def run(self, doing: str, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do `work` on a connection that has no other work. `doing` is the verb in a failure's sentence."""
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
            with named(self._connector.shown, doing):
                while self._idle and self._idle[-1].is_closed():
                    self._connector.give_up(self._idle.pop())
                if self._idle:
                    connection = self._idle.pop()
                else:
                    connection = await self._connector.connect()
                    try:
                        if self.prepare is not None:
                            await self.prepare(connection)
                    except BaseException:
                        self._connector.give_up(connection)
                        raise
                began = time.perf_counter()
                is_usable = False
                try:
                    result = await work(connection)
                    self.took.observe(time.perf_counter() - began)
                    is_usable = True
                    return result
                except (asyncpg.PostgresError, StoreError):
                    is_usable = not connection.is_closed()  # the server answered, or was not asked
                    raise
                finally:
                    # After anything else, as a cancellation, the state of the connection is not known.
                    if is_usable:
                        self._idle.append(connection)
                    else:
                        self._connector.give_up(connection)
