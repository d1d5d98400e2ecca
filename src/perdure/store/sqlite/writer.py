"""The one writer of a SQLite file: inline when it can be done at once, else a thread that groups what waits.

Both use one connection, under one lock. The thread takes jobs off the queue only while it holds the lock, and the
inline way is open only while the queue is empty; so jobs are done in the order in which they came, whichever way they
took.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from perdure.errors import StoreError, StoreReplaced, StoreTooNew, StoreUnavailable
from perdure.store.base import Refusals, Step
from perdure.store.cost import weigh
from perdure.store.sqlite.checkpoints import Checkpoints
from perdure.store.sqlite.file import (
    NAMED,
    STUCK,
    Sync,
    failure,
    is_busy,
    open_writer,
    patiently,
    refuse_newer,
    rollback,
)
from perdure.store.sqlite.identity import Identity
from perdure.store.sqlite.steps import MAX_INLINE_BYTES, MAX_INLINE_EVENTS, Steps
from perdure.store.time_limit import TimeLimit

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_GROUP = 256
MAX_GROUP_BYTES = 4 << 20
"""Jobs and bytes in one transaction. More would gain little and make the first of them wait for the last."""


@dataclass(slots=True, eq=False)
class Job:
    """Something to write, and who waits for it."""

    work: Callable[[Steps, sqlite3.Connection], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    asked: float
    """When, on the monotonic clock."""
    size: int
    result: Any = None
    error: BaseException | None = None

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Writer:
    def __init__(self, path: str, *, sync: Sync, busy_timeout: float) -> None:
        self._path = path
        self._sync = sync
        self._busy_timeout = busy_timeout
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._closed = True
        self._log_full = False
        self._too_new: str | None = None
        self.identity = Identity(path)
        self._seen = 0
        """The number of the file's last change by another process, as far as this one has looked."""
        self._moves = 0
        """Rises whenever the thread has got on: a job is done, or the file was looked at while it is locked."""
        self._processor: int | None = None
        """The clock of the processor's time that the thread has had; systems without such clocks have none."""
        self._limit = TimeLimit(busy_timeout * STUCK, moves=self._progress)
        self.life = 0
        """Rises with each opening: `look` begins anew then."""

    def open(self) -> None:
        self._connection = open_writer(self._path, sync=self._sync, busy_timeout=self._busy_timeout)
        self.identity.opened()
        self._execute = self._connection.cursor().execute
        self._steps = Steps(self._connection)
        self._too_new = None
        self._seen = self._data_version()
        self.life += 1
        self._checkpoints = Checkpoints(self._path, self.identity, log_full=self._note_log_full)
        self._thread = threading.Thread(target=self._serve, name="perdure-sqlite-writer", daemon=True)
        self._closed = False
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more. (Called where `run` is called, so nothing can slip in behind the end.)"""
        self._closed = True
        self._wake.put(False)

    def join(self) -> None:
        """Wait until what is queued was written and the file is closed."""
        self._thread.join()

    # In the event loop

    def check(self) -> None:
        """Raise if a newer release has taken the file over, or the file is not the one at its path any more."""
        if self._too_new is not None:
            raise StoreTooNew(self._too_new)
        if self.identity.lost:
            self.identity.check()

    def look_at_file(self) -> None:
        """Raise if the path leads to another file. Called in a thread of the readers'."""
        try:
            self.identity.check()
        except StoreReplaced:
            # The lost file is completed, wherever it is now, and its log does not meet the next one.
            with self._lock, contextlib.suppress(*NAMED):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self.identity.take_logs_away()
            raise

    def look(self) -> int | None:
        """A number that changes when another process has written; `None` if it cannot be told at once."""
        if self._closed or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._observe()
        except (*NAMED, StoreTooNew):
            return None
        finally:
            self._lock.release()

    def _observe(self) -> int:
        """Under the lock. Whoever wrote may have been a newer release."""
        version = self._data_version()
        if version != self._seen:
            try:
                refuse_newer(self._connection, self._path)
            except StoreTooNew as error:
                self._too_new = str(error)
                raise
            self._seen = version
        return version

    def _data_version(self) -> int:
        (version,) = self._execute("PRAGMA data_version").fetchone()
        return int(version)

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        """Commit in this very moment, or not at all (`None`)."""
        # A commit with full sync waits for the disk: not in the event loop.
        if self._jobs or self._closed or self._log_full or self._sync == "full":
            return None
        self.check()
        count, size, forget = weigh(steps)
        if count > MAX_INLINE_EVENTS or size > MAX_INLINE_BYTES or not self._lock.acquire(blocking=False):
            return None
        try:
            if forget and not self._steps.forgets_little(steps):
                return None
            return self._commit_now(steps, size)
        except NAMED as error:
            raise self._named(error) from error
        finally:
            self._lock.release()

    def _commit_now(self, steps: Sequence[Step], size: int) -> Refusals | None:
        execute = self._execute
        try:
            execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if is_busy(error):
                return None
            self._undo()
            raise
        try:
            refusals = self._steps.apply(steps)
            execute("COMMIT")
        except BaseException:
            self._undo()
            raise
        self._checkpoints.note(size)
        return refusals

    async def run(self, work: Callable[[Steps, sqlite3.Connection], T], *, size: int = 0) -> T:
        """Have something written by the thread, in a transaction."""
        if self._closed:
            raise StoreUnavailable(f"the SQLite file {self._path} is closed")
        self.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.append(Job(work=work, loop=loop, future=future, asked=time.monotonic(), size=size))
        self._wake.put(True)
        return await self._limit.wait(future)

    def _progress(self) -> tuple[int, float]:
        """Changes while the thread gets on, also within one long commit on a busy machine: a thread that is stuck, in
        the disk or in a lock, is given no time by the processor."""
        try:
            return self._moves, 0.0 if self._processor is None else time.clock_gettime(self._processor)
        except OSError:  # it has ended
            return self._moves, 0.0

    # In the thread

    def _serve(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._processor = time.pthread_getcpuclockid(threading.get_ident())
        while self._wake.get():
            self._work_off()
        self._work_off()
        self._checkpoints.close()
        with self._lock:
            self._close_file()

    def _close_file(self) -> None:
        with contextlib.suppress(StoreReplaced, OSError):
            self.identity.check()  # it may have gone since it was last looked at
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except NAMED as error:
            # Nothing is lost: the next one to open the file finds it in the log.
            _log.warning(
                "the log of %s could not be moved into the file at close: %s",
                self._path,
                error,
                extra={"action": "store.checkpoint"},
            )
        if self.identity.lost:
            self.identity.take_logs_away()
        self._connection.close()

    def _work_off(self) -> None:
        while self._jobs or self._log_full:
            with self._lock:
                if self._log_full:
                    self._restart_log()
                done = self._work_off_some() if self._jobs else []
            _settle(done)

    def _note_log_full(self) -> None:
        """Called by the checkpoints' thread. From here on nothing is written inline, until the log was restarted."""
        self._log_full = True
        self._wake.put(True)

    def _restart_log(self) -> None:
        """Copy the rest, so that the next commit begins the log anew. Readers in the way put that off, no more."""
        self._log_full = False
        with contextlib.suppress(*NAMED):
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()

    def _work_off_some(self) -> list[Job]:
        """One transaction for what waits; where that fails, one for each, so that only the cause of it fails."""
        since = time.monotonic()
        try:
            self._begin()
        except BaseException as error:
            self._undo()
            return self._give_up(error, since)
        group = self._take_group()
        try:
            self._do(group)
        except BaseException as error:
            if len(group) == 1:
                group[0].error = self._named(error)
            else:
                for job in group:
                    self._do_alone(job)
        return group

    def _begin(self) -> None:
        """Become the writer, or raise once the file was locked for the whole time without a change in it.

        A file that other processes write is busy, and does not fail."""
        seen: int | None = self._seen

        def has_moved() -> bool:
            nonlocal seen
            self._moves += 1
            before, seen = seen, self._written_elsewhere()
            return seen != before

        begin = partial(self._connection.execute, "BEGIN IMMEDIATE")
        patiently(begin, patience=self._busy_timeout, has_moved=has_moved)

    def _written_elsewhere(self) -> int | None:
        """`_seen` as it is now; `None` while another process keeps even readers out."""
        with contextlib.suppress(*NAMED):
            return self._data_version()
        return None

    def _take_group(self) -> list[Job]:
        group = [self._jobs.popleft()]
        size = group[0].size
        while self._jobs and len(group) < MAX_GROUP and size + self._jobs[0].size <= MAX_GROUP_BYTES:
            group.append(self._jobs.popleft())
            size += group[-1].size
        return group

    def _do(self, group: Sequence[Job]) -> None:
        try:
            self._observe()
            for job in group:
                job.result = job.work(self._steps, self._connection)
                self._moves += 1
            self._connection.execute("COMMIT")
        except BaseException:
            self._undo()
            raise
        self._checkpoints.note(sum(job.size for job in group))

    def _do_alone(self, job: Job) -> None:
        try:
            self._begin()
            self._do([job])
        except BaseException as error:
            job.result, job.error = None, self._named(error)

    def _give_up(self, error: BaseException, since: float) -> list[Job]:
        """Those that have waited for all of this try; the others get another one."""
        late = [self._jobs.popleft()]
        while self._jobs and self._jobs[0].asked <= since:
            late.append(self._jobs.popleft())
        for job in late:
            job.error = self._named(error)
        return late

    def _undo(self) -> None:
        self._steps.forget()
        # Where even that fails the next one to come tries again; the failure that led here is what is told.
        with contextlib.suppress(*NAMED):
            rollback(self._connection)

    def _named(self, error: BaseException) -> BaseException:
        """Outside of a transaction. A file that a newer release has changed is told as that, whatever it led to."""
        if not isinstance(error, NAMED):
            return error
        with contextlib.suppress(*NAMED):
            try:
                refuse_newer(self._connection, self._path)
            except StoreTooNew as newer:
                self._too_new = str(newer)
                return newer
        ours: StoreError = failure(error, self._path, "written")
        ours.__cause__ = error
        return ours


def _settle(jobs: Sequence[Job]) -> None:
    """Tell those who wait: one call into each event loop."""
    waiting: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        waiting.setdefault(job.loop, []).append(job)
    for loop, theirs in waiting.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle_all, theirs)


def _settle_all(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.settle()
