"""Writes a SQLite file: inline if that is possible at once, else in a thread that groups the jobs that wait.

Both use one connection, under one lock. The thread takes jobs off the queue only while it holds the lock, and nothing
is written inline while the queue has a job; so jobs are done in the order in which they came.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from perdure.errors import StoreError, StoreReplaced, StoreTooNew, StoreUnavailable
from perdure.store.sqlite.file import (
    NAMED,
    STUCK,
    FileIdentity,
    Sync,
    failure,
    is_busy,
    open_checkpointer,
    open_writer,
    patiently,
    pragma,
    refuse_newer,
    rollback,
)
from perdure.store.sqlite.steps import MAX_INLINE_BYTES, MAX_INLINE_EVENTS, StepWriter
from perdure.store.steps import Refusals, Step, weigh
from perdure.store.time_limit import TimeLimit

T = TypeVar("T")

WRITER_FAILED = 70
"""The exit status of a process whose writer failed: an internal error (`EX_SOFTWARE`)."""

MAX_GROUP = 256
MAX_GROUP_BYTES = 4 << 20
"""Jobs and bytes in one transaction. More would gain little and make the first of them wait for the last."""


STEP = 4 << 20
"""Bytes written between two checkpoints: SQLite's own default."""

MAX_LOG = 64 << 20
"""Bytes in the log before its start is reused by force: rare enough to stay out of the 99th percentile."""

COMMIT = 4 << 10
"""What a commit adds to the log beside its own bytes: it writes whole pages, two at least."""

_log = logging.getLogger(__name__)

Work = Callable[[StepWriter, sqlite3.Connection], Any]
"""Something to write within a transaction."""


@dataclass(slots=True, eq=False)
class WriteJob:
    """Something to write, and the future of the caller that waits for it."""

    work: Work
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    asked: float
    """When, on the monotonic clock."""
    size: int
    result: Any = None
    error: BaseException | None = None


class Writer:
    """Queues jobs and writes them. The event loop calls the first part, the thread runs the second."""

    def __init__(self, path: str, *, sync: Sync, busy_timeout: float) -> None:
        self._path = path
        self._sync = sync
        self._lock = threading.Lock()
        self._jobs: deque[WriteJob] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._closed = True
        self._log_full = False
        self._file = WritingConnection(path, sync=sync, busy_timeout=busy_timeout)
        self.identity = self._file.identity
        self._processor: int | None = None
        """The clock of the processor's time that the thread has had; systems without such clocks have none."""
        self._limit = TimeLimit(busy_timeout * STUCK, moves=self._progress)
        self.life = 0
        """Rises with each opening: `look` counts from the beginning then."""

    def open(self) -> None:
        self._file.open(log_full=self._note_log_full)
        self.life += 1
        self._thread = threading.Thread(target=self._serve, name="perdure-sqlite-writer", daemon=True)
        self._closed = False
        self._thread.start()

    def stop(self) -> None:
        """Accept no more jobs. (Called in the thread that calls `run`, so no job can come after the end.)"""
        self._closed = True
        self._wake.put(False)

    def join(self) -> None:
        """Wait until the queue is written and the file is closed."""
        self._thread.join()

    # In the event loop

    def check(self) -> None:
        """Raise if a newer release has taken the file over, or the file is not the one at its path any more."""
        if self._file.too_new is not None:
            raise StoreTooNew(self._file.too_new)
        if self.identity.lost:
            self.identity.check()

    def look_at_file(self) -> None:
        """Raise if the path leads to another file. Called in a reader's thread."""
        try:
            self.identity.check()
        except StoreReplaced:
            # The lost file is completed, wherever it is now, and its log does not meet the next file of that name.
            with self._lock:
                self._file.move_log("TRUNCATE")
            self.identity.take_logs_away()
            raise

    def look(self) -> int | None:
        """Return a number that changes when another process has written; `None` if that is not known at once."""
        if self._closed or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._file.observe()
        except (*NAMED, StoreTooNew):
            return None
        finally:
            self._lock.release()

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        # A commit with full sync waits for the disk: not in the event loop.
        if self._jobs or self._closed or self._log_full or self._sync == "full":
            return None
        self.check()
        count, size, forget = weigh(steps)
        if count > MAX_INLINE_EVENTS or size > MAX_INLINE_BYTES or not self._lock.acquire(blocking=False):
            return None
        try:
            if forget and not self._file.steps.streams.forgets_little(steps):
                return None
            return self._file.commit_now(steps, size)
        except NAMED as error:
            raise self._file.name(error) from error
        finally:
            self._lock.release()

    async def run(self, work: Callable[[StepWriter, sqlite3.Connection], T], *, size: int = 0) -> T:
        """Have something written by the thread, in a transaction."""
        if self._closed:
            raise StoreUnavailable(f"the SQLite file {self._path} is closed")
        self.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.append(WriteJob(work=work, loop=loop, future=future, asked=time.monotonic(), size=size))
        self._wake.put(True)
        return await self._limit.wait(future)

    def _progress(self) -> tuple[int, float]:
        """Return a value that changes while the thread makes progress, also within one long commit on a busy machine: a
        thread that is stuck, in the disk or in a lock, uses no processor time."""
        try:
            return self._file.moves, 0.0 if self._processor is None else time.clock_gettime(self._processor)
        except OSError:  # it has ended
            return self._file.moves, 0.0

    # In the thread

    def _serve(self) -> None:
        """Write until the end. An error that no job caused ends the process: as after a kill, the next process settles
        its calls. Without this thread nothing would be written, and all callers would wait."""
        try:
            if hasattr(time, "pthread_getcpuclockid"):
                self._processor = time.pthread_getcpuclockid(threading.get_ident())
            while self._wake.get():
                self._work_off()
            self._work_off()
            self._file.close_checkpoints()
            with self._lock:
                self._file.close()
        except BaseException as error:
            lines = "".join(traceback.format_exception(error))
            with contextlib.suppress(OSError):
                os.write(2, f"{lines}perdure: the writer of {self._path} failed, and the process ends\n".encode())
            os._exit(WRITER_FAILED)

    def _work_off(self) -> None:
        while self._jobs or self._log_full:
            with self._lock:
                if self._log_full:
                    self._log_full = False
                    self._file.move_log("RESTART")
                done = self._work_off_some() if self._jobs else []
            # One call into each event loop answers all the callers that wait there.
            waiting: dict[asyncio.AbstractEventLoop, list[WriteJob]] = {}
            for job in done:
                waiting.setdefault(job.loop, []).append(job)
            for loop, theirs in waiting.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_settle, theirs)

    def _note_log_full(self) -> None:
        """Called by the checkpoints' thread. Nothing is written inline until the log is restarted."""
        self._log_full = True
        self._wake.put(True)

    def _work_off_some(self) -> list[WriteJob]:
        """Write a group of jobs in one transaction; if that fails, each in its own, so that only the cause fails."""
        since = time.monotonic()
        try:
            self._file.begin()
        except BaseException as error:
            self._file.undo()
            # The jobs that have waited for all of this try fail; the others get another one.
            late = [self._jobs.popleft()]
            while self._jobs and self._jobs[0].asked <= since:
                late.append(self._jobs.popleft())
            for job in late:
                job.error = self._file.name(error)
            return late
        group = [self._jobs.popleft()]
        size = group[0].size
        while self._jobs and len(group) < MAX_GROUP and size + self._jobs[0].size <= MAX_GROUP_BYTES:
            group.append(self._jobs.popleft())
            size += group[-1].size
        try:
            self._do(group)
        except BaseException as error:
            if len(group) == 1:
                group[0].error = self._file.name(error)
            else:
                for job in group:
                    try:
                        self._file.begin()
                        self._do([job])
                    except BaseException as its_own:
                        job.error = self._file.name(its_own)
        return group

    def _do(self, group: Sequence[WriteJob]) -> None:
        results = self._file.transact([job.work for job in group], size=sum(job.size for job in group))
        for job, result in zip(group, results, strict=True):
            job.result = result


def _settle(jobs: Sequence[WriteJob]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is None:
            job.future.set_result(job.result)
        else:
            job.future.set_exception(job.error)


class WritingConnection:
    """Applies steps in transactions. It is given to the writer closed, and may be opened again after a close.

    Used under the lock of `Writer`, in whichever thread holds it.
    """

    def __init__(self, path: str, *, sync: Sync, busy_timeout: float) -> None:
        self._path = path
        self._sync = sync
        self._busy_timeout = busy_timeout
        self.identity = FileIdentity(path)
        self.too_new: str | None = None
        """The sentence of the failure, once a newer release has taken the file over."""
        self._seen = 0
        """The number of the file's last change by another process, as far as this one has read."""
        self.moves = 0
        """Rises with all progress: work is done, or the file was read while it is locked."""

    def open(self, *, log_full: Callable[[], None]) -> None:
        self._connection = open_writer(self._path, sync=self._sync, busy_timeout=self._busy_timeout)
        self.identity.opened()
        self._execute = self._connection.cursor().execute
        self.steps = StepWriter(self._connection)
        self.too_new = None
        self._seen = pragma(self._connection, "data_version")
        self._checkpoints = Checkpoints(self._path, self.identity, log_full=log_full)

    def close_checkpoints(self) -> None:
        """Wait for the thread that makes checkpoints. Called without the lock, which that thread may wait for."""
        self._checkpoints.close()

    def close(self) -> None:
        with contextlib.suppress(StoreReplaced, OSError):
            self.identity.check()  # it may have been replaced since the last check
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
        """Return a number that changes when another process has written; raise if that was a newer release."""
        (version,) = self._execute("PRAGMA data_version").fetchone()
        if version != self._seen:
            self._refuse_newer()
            self._seen = version
        return int(version)

    def _refuse_newer(self) -> None:
        try:
            refuse_newer(self._connection, self._path)
        except StoreTooNew as error:
            self.too_new = str(error)
            raise

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
        """Become the writer, or raise once the file was locked for the whole time without a change in it. A file that
        other processes write is only busy."""
        seen: int | None = self._seen

        def has_moved() -> bool:
            nonlocal seen
            self.moves += 1
            before, seen = seen, None
            with contextlib.suppress(*NAMED):  # another process may keep even readers out
                seen = pragma(self._connection, "data_version")
            return seen != before

        begin = partial(self._connection.execute, "BEGIN IMMEDIATE")
        patiently(begin, patience=self._busy_timeout, has_moved=has_moved)

    def transact(self, works: Sequence[Work], *, size: int) -> list[Any]:
        """Do the work in the transaction that was begun, and commit it."""
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
        # Where even that fails the next transaction tries again; the failure that led here is the one to report.
        with contextlib.suppress(*NAMED):
            rollback(self._connection)

    def name(self, error: BaseException) -> BaseException:
        """Return the named failure for the exception of a transaction that was undone. If a newer release has changed
        the file, that is the failure."""
        if not isinstance(error, NAMED):
            return error
        try:
            self._refuse_newer()
        except StoreTooNew as newer:
            return newer
        except NAMED:
            pass  # the first failure is the one to report
        ours: StoreError = failure(error, self._path, "written")
        ours.__cause__ = error
        return ours

    # The log beside the file

    def move_log(self, mode: Literal["RESTART", "TRUNCATE"]) -> None:
        """Copy the rest, so that the next commit begins the log again. Readers in the way only put that off."""
        with contextlib.suppress(*NAMED):
            self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()


class Checkpoints:
    """Counts the bytes written, and moves them from the log beside the file (`-wal`) into the file.

    SQLite would do that within some commit, which then takes milliseconds. Here another connection, in a thread of its
    own, copies while commits go on. That alone would let the log grow for ever under steady load, because its start is
    reused only when all of it has been copied at a moment without a write. So beyond `MAX_LOG` the writer copies the
    short rest itself between two commits. Reusing the log also makes commits about a quarter cheaper. Called under the
    writer's lock, except `close`.
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
        """Note a commit of about this many bytes."""
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
            # Put off, not lost; the commits report it if the file is in trouble.
            _log.warning("checkpoint of %s put off: %s", self._path, error, extra={"action": "store.checkpoint"})
        finally:
            self._running = False


def _copy(connection: sqlite3.Connection) -> int:
    """Copy what no reader needs in the log any more; returns the bytes in the log."""
    _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return int(pages) * pragma(connection, "page_size")
