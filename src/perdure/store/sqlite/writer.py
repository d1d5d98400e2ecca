"""The one writer of a SQLite file: inline when it can be done at once, else a thread that groups what waits.

Both use one connection, under one lock. The thread takes jobs off the queue only while it holds the lock, and the
inline way is open only while the queue is empty; so jobs are done in the order in which they came, whichever way they
took.
"""

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from perdure.errors import StoreReplaced, StoreTooNew, StoreUnavailable
from perdure.store.codec import PLAIN, Codec, weigh
from perdure.store.sqlite.file import NAMED, STUCK, Sync
from perdure.store.sqlite.steps import MAX_INLINE_BYTES, MAX_INLINE_EVENTS, StepWriter
from perdure.store.sqlite.writing_connection import Work, WritingConnection
from perdure.store.steps import Refusals, Step
from perdure.store.time_limit import TimeLimit

T = TypeVar("T")

WRITER_FAILED = 70
"""The exit status of a process whose writer failed: an internal error (`EX_SOFTWARE`)."""

MAX_GROUP = 256
MAX_GROUP_BYTES = 4 << 20
"""Jobs and bytes in one transaction. More would gain little and make the first of them wait for the last."""


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
    """Queues what is to be written. The event loop calls the first part of it, the thread runs the second."""

    def __init__(self, path: str, *, sync: Sync, busy_timeout: float, codec: Codec = PLAIN) -> None:
        self._path = path
        self._sync = sync
        self._lock = threading.Lock()
        self._jobs: deque[WriteJob] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._closed = True
        self._log_full = False
        self._file = WritingConnection(path, sync=sync, busy_timeout=busy_timeout, codec=codec)
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
        """Take nothing more. (Called where `run` is called, so nothing can slip in behind the end.)"""
        self._closed = True
        self._wake.put(False)

    def join(self) -> None:
        """Wait until what is queued was written and the file is closed."""
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
        """A number that changes when another process has written; `None` if that is not known at once."""
        if self._closed or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._file.observe()
        except (*NAMED, StoreTooNew):
            return None
        finally:
            self._lock.release()

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
        """Changes while the thread gets on, also within one long commit on a busy machine: a thread that is stuck, in
        the disk or in a lock, is given no time by the processor."""
        try:
            return self._file.moves, 0.0 if self._processor is None else time.clock_gettime(self._processor)
        except OSError:  # it has ended
            return self._file.moves, 0.0

    # In the thread

    def _serve(self) -> None:
        """Write until the end. An error that no job is to blame for ends the process: as after a kill, the next process
        settles its calls. Without this thread nothing would be written any more, and everyone would wait."""
        try:
            self._write_until_stopped()
        except BaseException as error:
            lines = "".join(traceback.format_exception(error))
            with contextlib.suppress(OSError):
                os.write(2, f"{lines}perdure: the writer of {self._path} failed, and the process ends\n".encode())
            os._exit(WRITER_FAILED)

    def _write_until_stopped(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._processor = time.pthread_getcpuclockid(threading.get_ident())
        while self._wake.get():
            self._work_off()
        self._work_off()
        self._file.close_checkpoints()
        with self._lock:
            self._file.close()

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
        """Called by the checkpoints' thread. From here on nothing is written inline, until the log was restarted."""
        self._log_full = True
        self._wake.put(True)

    def _work_off_some(self) -> list[WriteJob]:
        """One transaction for what waits; where that fails, one for each, so that only the cause of it fails."""
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
