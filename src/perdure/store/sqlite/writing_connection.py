"""The one connection that writes a SQLite file: its transactions, its failures, and what other processes have changed.

Used under the lock of `Writer`, in whichever thread holds it.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from perdure.errors import StoreError, StoreReplaced, StoreTooNew
from perdure.store.base import Refusals, Step
from perdure.store.codec import Codec, Payloads
from perdure.store.sqlite.checkpoints import Checkpoints
from perdure.store.sqlite.file import (
    NAMED,
    FileIdentity,
    Sync,
    failure,
    is_busy,
    open_writer,
    patiently,
    refuse_newer,
    rollback,
)
from perdure.store.sqlite.steps import StepWriter

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
