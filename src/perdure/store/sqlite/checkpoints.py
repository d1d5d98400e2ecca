"""Moves what was written from the log beside the file (`-wal`) into the file, off the append path.

SQLite would do that within some unlucky commit, which then takes milliseconds. Here another connection, in a thread of
its own, copies while commits go on. That alone would let the log grow for ever under steady load, because its start is
reused only when all of it has been copied at a moment without a write; so beyond `MAX_LOG` the writer copies the short
rest itself between two commits. A log that is reused, not grown, also makes commits about a quarter
cheaper.
"""

import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from perdure.errors import StoreReplaced
from perdure.store.sqlite.file import NAMED, FileIdentity, open_checkpointer

STEP = 4 << 20
"""Bytes written between two checkpoints: SQLite's own default."""

MAX_LOG = 64 << 20
"""Bytes in the log before its start is reused by force: rare enough to stay out of the 99th percentile."""

COMMIT = 4 << 10
"""What a commit adds to the log beside its own bytes: it writes whole pages, two at least."""

_log = logging.getLogger(__name__)


class Checkpoints:
    """Counts what is written, and makes checkpoints. Called under the writer's lock, but for `close`."""

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
