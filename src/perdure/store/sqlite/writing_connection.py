"""The one connection that writes a SQLite file: its transactions, its failures, what other processes have changed, and
the checkpoints of its log.

Used under the lock of `Writer`, in whichever thread holds it.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from perdure.errors import StoreError, StoreReplaced, StoreTooNew
from perdure.store.codec import Codec, Payloads
from perdure.store.sqlite.file import (
    NAMED,
    FileIdentity,
    Sync,
    failure,
    is_busy,
    open_checkpointer,
    open_writer,
    patiently,
    refuse_newer,
    rollback,
)
from perdure.store.sqlite.steps import StepWriter
from perdure.store.steps import Refusals, Step

STEP = 4 << 20
"""Bytes written between two checkpoints: SQLite's own default."""

MAX_LOG = 64 << 20
"""Bytes in the log before its start is reused by force: rare enough to stay out of the 99th percentile."""

COMMIT = 4 << 10
"""What a commit adds to the log beside its own bytes: it writes whole pages, two at least."""

_log = logging.getLogger(__name__)

Work = Callable[[StepWriter, sqlite3.Connection], Any]
"""Something to write within a transaction."""


class WritingConnection:
    """Applies steps in transactions. It is given to the writer closed, and may be opened again after a close."""

    def __init__(self, path: str, *, sync: Sync, busy_timeout: float, codec: Codec) -> None:
        self._path = path
        self._sync = sync
        self._busy_timeout = busy_timeout
        self._payloads = Payloads(codec)
        self.identity = FileIdentity(path)
        self.too_new: str | None = None
        """What to tell once a newer release has taken the file over."""
        self._seen = 0
        """The number of the file's last change by another process, as far as this one has looked."""
        self.moves = 0
        """Rises whenever something has got on: work is done, or the file was looked at while it is locked."""

    def open(self, *, log_full: Callable[[], None]) -> None:
        self._connection = open_writer(self._path, sync=self._sync, busy_timeout=self._busy_timeout)
        self.identity.opened()
        self._execute = self._connection.cursor().execute
        self.steps = StepWriter(self._connection, self._payloads)
        self.too_new = None
        self._seen = self._data_version()
        self._checkpoints = Checkpoints(self._path, self.identity, log_full=log_full)

    def close_checkpoints(self) -> None:
        """Wait for the thread that makes checkpoints. Called without the lock, which that thread may wait for."""
        self._checkpoints.close()

    def close(self) -> None:
        with contextlib.suppress(StoreReplaced, OSError):
            self.identity.check()  # it may have gone since it was last looked at
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except NAMED as error:
            # Nothing is lost: the next process that opens the file finds it in the log.
            _log.warning(
                "the log of %s could not be moved into the file at close: %s",
                self._path,
                error,
                extra={"action": "store.checkpoint"},
            )
        if self.identity.lost:
            self.identity.take_logs_away()
        self._connection.close()

    # What other processes have changed

    def observe(self) -> int:
        """Give a number that changes when another process has written; raise if that was a newer release."""
        version = self._data_version()
        if version != self._seen:
            self._refuse_newer()
            self._seen = version
        return version

    def _refuse_newer(self) -> None:
        try:
            refuse_newer(self._connection, self._path)
        except StoreTooNew as error:
            self.too_new = str(error)
            raise

    def _data_version(self) -> int:
        (version,) = self._execute("PRAGMA data_version").fetchone()
        return int(version)

    # Transactions

    def commit_now(self, steps: Sequence[Step], size: int) -> Refusals | None:
        """Commit without waiting for another process (`None`: one is writing)."""
        execute = self._execute
        try:
            execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if is_busy(error):
                return None
            self.undo()
            raise
        try:
            refusals = self.steps.apply(steps)
            execute("COMMIT")
        except BaseException:
            self.undo()
            raise
        self._checkpoints.note(size)
        return refusals

    def begin(self) -> None:
        """Become the writer, or raise once the file was locked for the whole time without a change in it.

        A file that other processes write is busy, and does not fail."""
        seen: int | None = self._seen

        def has_moved() -> bool:
            nonlocal seen
            self.moves += 1
            before, seen = seen, None
            with contextlib.suppress(*NAMED):  # another process may keep even readers out
                seen = self._data_version()
            return seen != before

        begin = partial(self._connection.execute, "BEGIN IMMEDIATE")
        patiently(begin, patience=self._busy_timeout, has_moved=has_moved)

    def transact(self, works: Sequence[Work], *, size: int) -> list[Any]:
        """Do all of that in the transaction that was begun, and commit it."""
        results: list[Any] = []
        try:
            self.observe()
            for work in works:
                results += [work(self.steps, self._connection)]
                self.moves += 1
            self._connection.execute("COMMIT")
        except BaseException:
            self.undo()
            raise
        self._checkpoints.note(size)
        return results

    def undo(self) -> None:
        self.steps.streams.forget()
        # Where even that fails the next transaction tries again; the failure that led here is the one to tell.
        with contextlib.suppress(*NAMED):
            rollback(self._connection)

    def name(self, error: BaseException) -> BaseException:
        """Give the named failure for what a transaction raised, once it was undone.

        If a newer release has changed the file, that is the failure, whatever it led to."""
        if not isinstance(error, NAMED):
            return error
        try:
            self._refuse_newer()
        except StoreTooNew as newer:
            return newer
        except NAMED:
            pass  # the first failure is the one to tell
        ours: StoreError = failure(error, self._path, "written")
        ours.__cause__ = error
        return ours

    # The log beside the file

    def move_log(self, mode: Literal["RESTART", "TRUNCATE"]) -> None:
        """Copy the rest, so that the next commit begins the log again. Readers in the way put that off, no more."""
        with contextlib.suppress(*NAMED):
            self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()


class Checkpoints:
    """Counts what is written, and moves it from the log beside the file (`-wal`) into the file, off the append path.

    SQLite would do that within some unlucky commit, which then takes milliseconds. Here another connection, in a thread
    of its own, copies while commits go on. That alone would let the log grow for ever under steady load, because its
    start is reused only when all of it has been copied at a moment without a write; so beyond `MAX_LOG` the writer
    copies the short rest itself between two commits. A log that is reused, not grown, also makes commits about a
    quarter cheaper. Called under the writer's lock, but for `close`.
    """

    def __init__(self, path: str, identity: FileIdentity, *, log_full: Callable[[], None]) -> None:
        self._path = path
        self._identity = identity
        self._log_full = log_full
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="perdure-sqlite-checkpoint")
        self._running = False
        self._written = 0

    def note(self, size: int) -> None:
        """A commit of about this many bytes was made."""
        self._written += size + COMMIT
        if self._written >= STEP and not self._running:
            self._written = 0
            self._running = True
            self._thread.submit(self._run)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        try:
            if self._connection is None:
                self._connection = open_checkpointer(self._path, check=self._identity.check)
            if _copy(self._connection) > MAX_LOG:
                # Once more what came in meanwhile, so that the rest is short.
                _copy(self._connection)
                self._log_full()
        except (*NAMED, StoreReplaced) as error:
            # Put off, not lost; the commits themselves tell if the file is in trouble.
            _log.warning("checkpoint of %s put off: %s", self._path, error, extra={"action": "store.checkpoint"})
        finally:
            self._running = False


def _copy(connection: sqlite3.Connection) -> int:
    """Copy what no reader needs in the log any more; gives the bytes in the log."""
    _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    return int(pages * page)
