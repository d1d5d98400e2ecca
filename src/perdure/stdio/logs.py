"""Writes the bridge's log to stderr, and to a file if the user names one. stdout belongs to MCP.

A thread writes the records: a host that does not read stderr must not stop the bridge. What such a host leaves unread
beyond `ROOM` records is dropped.
"""

import contextlib
import logging
import os
import queue
import sys
import threading
from pathlib import Path

from perdure.remote.endpoint import shown
from perdure.remote.link import Notice
from perdure.telemetry.log_records import LogLines, log_event

#: Records that wait for stderr. A bridge writes a few at its start and at trouble, and none for each message.
ROOM = 1_000
#: Seconds for the last records at the end of the process.
FLUSH = 0.2


class Unblocked(logging.Handler):
    """Hands records to another handler, in its own thread."""

    def __init__(self, below: logging.Handler) -> None:
        super().__init__()
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(ROOM)

        def run() -> None:
            while (record := self._records.get()) is not None:
                below.handle(record)

        self._thread = threading.Thread(target=run, name="perdure-stderr", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(record)

    def finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(None)
        self._thread.join(FLUSH)


def to_stderr(level: str) -> Unblocked:
    logging.raiseExceptions = False  # a host that closed stderr
    logger = logging.getLogger("perdure")
    logger.setLevel(level.upper())
    logger.propagate = False
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(LogLines("perdure: %(message)s"))
    unblocked = Unblocked(shown)
    logger.addHandler(unblocked)
    return unblocked


def to_file(path: Path) -> None:
    """Raises `OSError` where it cannot be opened."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    written = logging.StreamHandler(os.fdopen(opened, "a", encoding="utf-8"))
    written.setFormatter(LogLines("%(asctime)s %(process)d %(levelname)s %(message)s"))
    logging.getLogger("perdure").addHandler(written)


class ConnectionLog:
    """Writes the link's notices to the log: once that a server is away or refuses, and again after a success."""

    def __init__(self, url: str) -> None:
        self._where = shown(url)
        self._last: str | None = None
        """The refusal that was said last, "" for a server that is away, None for one that answers."""

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None:
        match notice:
            case Notice.REFUSED if self._last != why:
                self._last = why
                log_event(logging.ERROR, "stdio.refused", why, reason=reason)
            case Notice.WAITING if self._last is None:
                self._last = ""
                sentence = f"{self._where} cannot be reached, and is tried again: {why}"
                log_event(logging.WARNING, "stdio.waiting", sentence)
            case Notice.REACHED if self._last is not None:
                self._last = None
                log_event(logging.INFO, "stdio.reached", f"{self._where} answers again")
            case Notice.SESSION_GONE:
                log_event(logging.WARNING, "stdio.session_gone", "the session is gone; a new one is begun")
            case Notice.NOT_RENEWED:
                log_event(logging.WARNING, "stdio.not_renewed", f"no new session could be begun: {why}")
            case Notice.NOT_REPEATED:
                log_event(logging.WARNING, "stdio.not_repeated", f"subscriptions or the log level are lost: {why}")
            case Notice.NOT_SENT:
                log_event(logging.WARNING, "stdio.not_told", f"a message of the host could not be sent: {why}")
            case Notice.POSITION_LOST:
                sentence = "the server refused the position; what was missed is not repeated"
                log_event(logging.WARNING, "stdio.position_lost", sentence)
            case Notice.LISTENING_LOST:
                sentence = f"the standalone stream is given up, what belongs to no call is missed: {why}"
                log_event(logging.WARNING, "stdio.standalone_lost", sentence)
