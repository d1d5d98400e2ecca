"""Makes a store's SQLite file, checks and migrates it, connects to it, and names its failures."""

import contextlib
import errno
import itertools
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal
from urllib.parse import quote

from perdure._core.ids import generations_skipped
from perdure._core.text import see
from perdure.errors import StoreError, StoreReplaced, StoreTooNew, StoreUnavailable
from perdure.store.maintenance import CHECK_VALUES, INVARIANTS, MOST_SHOWN, CheckResult, check_result
from perdure.store.sqlite import sql_files as _sql

Sync = Literal["normal", "full"]

APPLICATION_ID = 0x50455244
"""Stands in the file's header ("PERD"), so that another program's database is not mistaken for ours."""

BACKUP_ID = 0x50455242
"""Stands there in a backup ("PERB"). A server that opens one makes it a store of its own first (`begin_again`)."""

OUR_IDS = (APPLICATION_ID, BACKUP_ID)

OLDEST_SQLITE = (3, 35, 0)
"""The first release with `RETURNING`."""

PAGE = 2_048
"""Bytes in a page of a new file. Most commits change a few rows in several places, and each place costs a page: half of
SQLite's default makes them a tenth cheaper (19.6 instead of 21.5 µs for an event), very large events a tenth dearer."""

RETRY = 0.0007
"""Seconds between two tries to become the writer. SQLite's own handler waits up to 100 ms: too long here."""

_LOOK = 64
"""Tries after which it is read whether the process in the way makes progress: about twenty times a second."""

OPERATOR_PATIENCE = 5.0
"""Seconds to wait for a server that holds the file: an operator has more time than a request."""

STUCK = 1.25
"""Times `busy_timeout`: when a thread counts as stuck in one operation. A thread that only waits for a locked file has
time to report that itself."""

_OF_THE_MOMENT = (sqlite3.OperationalError, sqlite3.InternalError)


def failure(error: BaseException, path: str, doing: str) -> StoreError:
    """Return the named failure for a driver's exception: `StoreUnavailable` where trying again may help."""
    reason = error.strerror if isinstance(error, OSError) else error
    sentence = f"the SQLite file {path} cannot be {doing}: {reason}{_advice(error, path)}"
    # DatabaseError itself (not its children) means: not a database, or a damaged one.
    if isinstance(error, (*_OF_THE_MOMENT, OSError)) or type(error) is sqlite3.DatabaseError:
        return StoreUnavailable(sentence)
    return StoreError(sentence)


def is_damage(error: BaseException | None) -> bool:
    """Whether an error means that the file is not a database, or a damaged one."""
    return type(error) is sqlite3.DatabaseError and _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _advice(error: BaseException, path: str) -> str:
    if is_damage(error):
        return f"; {see('operating', 'if-a-store-is-damaged')}"
    # SQLite has one sentence for all that keeps it from opening a file.
    is_kept_out = _code(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
    if is_kept_out and os.path.exists(path):
        for place, rights in ((path, os.R_OK | os.W_OK), (os.path.dirname(os.path.abspath(path)), os.W_OK | os.X_OK)):
            if not os.access(place, rights, effective_ids=os.access in os.supports_effective_ids):
                return f"; this user may not read and write {place}: run as the servers' user, or change its mode"
    return ""


def _code(error: BaseException | None) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


NAMED = (sqlite3.Error, sqlite3.Warning, OSError, OverflowError, UnicodeError)
"""The driver's exceptions; each leaves the store as a `StoreError`."""


@contextlib.contextmanager
def named(path: str, doing: str) -> Iterator[None]:
    """Raise the driver's exceptions as named failures, with their cause (promise 9)."""
    try:
        yield
    except NAMED as error:
        raise failure(error, path, doing) from error


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection is writing."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def patiently(work: Callable[[], object], *, patience: float, has_moved: Callable[[], bool] = lambda: False) -> None:
    """Try until no other connection is in the way, or for so many seconds; at least once.

    Tries are counted, not seconds: on a busy machine this thread makes fewer of them in the same time, as does the
    process in the way. If `has_moved` returns that the other process makes progress, the count begins again. A process
    that recovers the log after another one was killed reads all of it, so its tries count a tenth.
    """
    whole = left = max(1.0, patience / RETRY)
    for tried in itertools.count(1):
        try:
            work()
            return
        except sqlite3.OperationalError as error:
            left -= 0.1 if error.sqlite_errorcode == sqlite3.SQLITE_BUSY_RECOVERY else 1
            if not is_busy(error):
                raise
            if tried % _LOOK == 0 and has_moved():
                left = whole
            if left <= 0:
                raise
        time.sleep(RETRY)


def connect(path: str, *, timeout: float) -> sqlite3.Connection:
    return sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=timeout, cached_statements=len(_sql.queries()) + 16
    )


def connect_existing(path: str) -> sqlite3.Connection:
    """Connect an operator's command to a file that must exist."""
    # Not `mode=ro`: closing would not remove the log's files where no other program has the file open.
    return sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True, timeout=OPERATOR_PATIENCE, check_same_thread=False)


def open_writer(path: str, *, sync: Sync, busy_timeout: float) -> sqlite3.Connection:
    """Open the writing connection; the file is made if there is none, and migrated if it is of an older release."""
    with named(path, "opened"):
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            oldest = ".".join(map(str, OLDEST_SQLITE[:2]))
            raise StoreUnavailable(f"SQLite {sqlite3.sqlite_version} is too old; Perdure needs {oldest} or later")
        _make_file(path)
        refuse_other_log(path)
        connection = connect(path, timeout=0)
        try:
            patiently(partial(_prepare, connection, path, sync=sync), patience=busy_timeout)
        except BaseException:
            connection.close()
            raise
        return connection


def open_reader(path: str, *, busy_timeout: float, check: Callable[[], None] = lambda: None) -> sqlite3.Connection:
    connection = _connect_to_same(path, timeout=busy_timeout, check=check)
    connection.execute("PRAGMA query_only = 1")
    return connection


def open_checkpointer(path: str, *, check: Callable[[], None]) -> sqlite3.Connection:
    # It does not wait: a reader or writer in the way only puts the checkpoint off.
    connection = _connect_to_same(path, timeout=0, check=check)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _connect_to_same(path: str, *, timeout: float, check: Callable[[], None]) -> sqlite3.Connection:
    """Make a further connection. `check` raises if the path leads to another file than the one in use. It is called
    before and after: SQLite makes a file that does not exist, and one that was replaced meanwhile must not be read.
    Until its first statement a connection has opened nothing but the file, and may be closed."""
    check()
    connection = connect(path, timeout=timeout)
    try:
        check()
    except BaseException:
        connection.close()
        raise
    return connection


def _make_file(path: str) -> None:
    """Make a private file, because it holds what users' tools said. SQLite gives `-wal` and `-shm` the same mode."""
    # A file that exists is never opened here: closing it would free every lock that this process has on it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        # SQLite would open it for reading only, and fail at the first commit.
        raise PermissionError(errno.EACCES, "it may not be read and written")


def _prepare(connection: sqlite3.Connection, path: str, *, sync: Sync) -> None:
    _refuse_foreign(connection, path)
    connection.execute(f"PRAGMA page_size = {PAGE}")  # no effect on a file that has pages
    if pragma(connection, "application_id") == BACKUP_ID:
        _take_over(connection, path)  # before a log exists: see `refuse_other_log`
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreUnavailable(
            f"the SQLite file {path} is on a file system without shared memory (journal mode {mode})"
        )
    if pragma(connection, "user_version") < _sql.schema_version():
        _take_over(connection, path)
    connection.execute(f"PRAGMA synchronous = {sync.upper()}")
    connection.execute("PRAGMA wal_autocheckpoint = 0")


def _take_over(connection: sqlite3.Connection, path: str) -> None:
    """Make a store of this release of an empty file, an older one or a backup."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read again: another process may have been faster.
        _refuse_foreign(connection, path)
        is_backup = pragma(connection, "application_id") == BACKUP_ID
        bring_up_to_date(connection)
        if is_backup:
            begin_again(connection)
        connection.execute("COMMIT")
    except BaseException:
        rollback(connection)
        raise


def refuse_other_log(path: str) -> None:
    """Raise if a backup was put in the place of a file whose log is still beside it. SQLite would write that log into
    the backup. A backup has no log, and a server that opens one makes it a store before its log exists."""
    log = f"{os.path.realpath(path)}-wal"
    is_backup = False
    # A file that a server is just writing to may not be read in this way. Then it is not a backup.
    with contextlib.suppress(OSError, sqlite3.Error):
        if os.path.getsize(log):
            without_log = f"file:{quote(path)}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(without_log, uri=True)) as file:
                is_backup = pragma(file, "application_id") == BACKUP_ID
    if is_backup:
        raise StoreError(
            f"{path} is a backup, and {log} is the log of the file that was there before; move that away, and -shm;"
            f" {see('operating', 'restoring-a-store')}"
        )


def _refuse_foreign(connection: sqlite3.Connection, path: str) -> None:
    if not is_empty(connection) and pragma(connection, "application_id") not in OUR_IDS:
        raise StoreUnavailable(f"the SQLite file {path} belongs to another program; give Perdure a file of its own")
    refuse_newer(connection, path)


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether no program has made anything in the file yet."""
    tables = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    return pragma(connection, "user_version") == 0 and not tables


def refuse_newer(connection: sqlite3.Connection, path: str) -> None:
    """Raise if a newer release has migrated the file, perhaps while this one had it open."""
    version, ours = pragma(connection, "user_version"), _sql.schema_version()
    if version > ours:
        raise StoreTooNew(
            f"the SQLite file {path} has version {version}, written by a newer release; this one knows versions up to"
            f" {ours}; {see('operating', 'upgrading-and-rolling-back')}"
        )


def refuse_unfit(path: str) -> None:
    """Raise unless there is a store of this release at the path. Nothing is made or changed."""
    if not os.path.exists(path):
        raise StoreUnavailable(f"there is no SQLite file {path}")
    refuse_other_log(path)
    with named(path, "opened"), contextlib.closing(connect_existing(path)) as file:
        if pragma(file, "application_id") not in OUR_IDS:
            raise StoreError(
                f"the SQLite file {path} is not a Perdure store; give the file that a server was started with"
            )
        refuse_newer(file, path)
        version = pragma(file, "user_version")
    if version < (ours := _sql.schema_version()):
        raise StoreError(
            f"the SQLite file {path} has version {version}, written by an older release; a server of this one brings it"
            f" to version {ours} when it starts, and so does `perdure store migrate`"
        )


def bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Apply the migrations that a file lacks; an empty one lacks all. The caller holds a transaction."""
    version = pragma(connection, "user_version")
    for migration in _sql.migrations():
        for statement in migration.statements if migration.version > version else ():
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {_sql.schema_version()}")


def begin_again(connection: sqlite3.Connection) -> None:
    """End the generation of every stream that may still grow, in a file that was restored from a copy (promise 6). The
    original store may have begun generations since the copy was made. They are not used again, so no position of
    theirs names another event. The caller holds a transaction."""
    connection.execute(_sql.queries()["end_generations"])
    connection.execute(_sql.queries()["skip_generations"], {"skipped": generations_skipped(secrets.randbelow)})


def rollback(connection: sqlite3.Connection) -> None:
    """Undo the transaction, if SQLite has not done so by itself (as on a full disk)."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


_LOGS = ("-wal", "-shm")

_File = tuple[int, int]


class FileIdentity:
    """Checks whether a path still leads to the file that was opened. May be used in any thread.

    A file may be deleted under a running server, or another one moved into its place. SQLite does not notice: open
    connections keep the old file, later ones open the new one, and both use the log of one name beside it (`-wal`,
    `-shm`). So the path is checked now and then, and before each further connection. (A connection to a deleted file
    may be closed: then SQLite does check, and leaves the log of that name alone.)
    """

    def __init__(self, path: str) -> None:
        # As SQLite names the log: by what a link leads to.
        self._path = path
        self._real = os.path.realpath(path)
        self._file: _File | None = None
        self._logs: dict[str, _File] = {}
        self.lost = ""
        """What happened to the file, once it is lost."""

    def opened(self) -> None:
        """Remember the file that the path leads to now."""
        self._real = os.path.realpath(self._path)
        self._file, self._logs, self.lost = _file(self._path), {}, ""

    def check(self) -> None:
        """Raise `StoreReplaced` if the path leads elsewhere, now or ever before."""
        if self._file is None:
            return
        if not self.lost:
            found = _file(self._path)
            if found == self._file:
                for suffix in _LOGS:
                    if (log := _file(self._real + suffix)) is not None:
                        self._logs[suffix] = log
                return
            self.lost = "was deleted" if found is None else "was replaced by another one"
        raise StoreReplaced(
            f"the SQLite file {self._path} {self.lost} while it was open; start the server again;"
            f" {see('errors', '503-and-what-health-says')}"
        )

    def take_logs_away(self) -> None:
        """Remove the lost file's log, if it is still there: applied to another file it would damage that one."""
        while self._logs:
            suffix, log = self._logs.popitem()
            with contextlib.suppress(OSError):
                if _file(self._real + suffix) == log:
                    os.unlink(self._real + suffix)


def _file(path: str) -> _File | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


INTEGRITY = "integrity"
"""The name of the rule that SQLite itself checks."""


def check_file(connection: sqlite3.Connection) -> CheckResult:
    """Check everything, as of one moment. Writers do not wait for it; only the log beside the file grows meanwhile."""
    connection.execute("BEGIN")
    try:
        try:
            found = [says for (says,) in connection.execute(f"PRAGMA integrity_check({MOST_SHOWN + 1})")]
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # it is locked, or was interrupted
            found = [str(error)]
        if found != ["ok"]:
            # Queries over damaged pages would raise, or report nonsense.
            return check_result((), {INTEGRITY: [" ".join(says.split()) for says in found]})
        counts = connection.execute(_sql.checks()["counts"]).fetchone()
        broken: dict[str, list[str]] = {}
        for rule in [rule for rule in INVARIANTS if rule in _sql.checks()]:
            with contextlib.closing(connection.execute(_sql.checks()[rule], CHECK_VALUES.get(rule, ()))) as places:
                broken[rule] = [str(where) for (where,) in places.fetchmany(MOST_SHOWN + 1)]
        return check_result(counts, broken)
    finally:
        rollback(connection)
