"""Writes the log of a serving process to stderr: its handler and its filters.

Workers share their parent's stderr. A traceback is longer than what a pipe takes in one piece, so each record is
written under a lock of the file that stderr leads to. The system frees the lock when a process dies.

Below warning only records of Perdure and of the user's own code are shown, and those of a library whose logger's level
the user's code has set.

The access log has a record for each request when its response has ended. A record names the path without its query, and
only the beginning of a session's id: it holds no secrets.
"""

import contextlib
import logging
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure._core.text import printable
from perdure._files.locks import HAS_FLOCK
from perdure.telemetry.log_records import SHORT, JsonLines, TextLines, current_call

FORMATS = ("text", "json")

TURN_SECONDS = 2.0
"""The longest that a record waits for other workers' records: long for a busy machine. A worker that is stopped while
it writes holds up the others for this time once; then they do not wait until its record is written, and their lines may
stand within it."""

TURN_LOOK = 0.0005
"""Seconds between two tries. A record takes some microseconds."""

MAX_WORD = 200
"""Characters of a path or of a content type, which peers and targets write."""

if HAS_FLOCK:
    import fcntl

_OURS = "perdure"
_SESSION = b"mcp-session-id"
_access_log = logging.getLogger("perdure.access")
_LIBRARIES = tuple(sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}))


def start_log(level: str, form: str, *, target: str, colors: bool, shared: bool) -> logging.Handler:
    """Show log records on stderr from now on. `shared`: other processes write there as well."""
    handler = SharedStream(sys.stderr) if shared and HAS_FLOCK else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines(colors=colors))
    handler.addFilter(ShownRecords(target))
    handler.addFilter(name_call)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    return handler


class SharedStream(logging.StreamHandler[TextIO]):
    """Writes records in one piece each to a stream that other processes write to."""

    _patience = TURN_SECONDS

    def emit(self, record: logging.LogRecord) -> None:
        is_locked, until = False, time.monotonic() + self._patience
        while not is_locked:
            try:
                fcntl.lockf(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
                time.sleep(TURN_LOOK)
            except OSError:  # the system has no locks for such a file, so waiting is of no use
                break
        self._patience = TURN_SECONDS if is_locked else 0.0
        try:
            super().emit(record)
        finally:
            if is_locked:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self.stream, fcntl.LOCK_UN)


class ShownRecords:
    """Decides which records are shown. The package that the target is in counts as the user's own code, wherever it is
    installed."""

    def __init__(self, target: str, libraries: tuple[str, ...] = _LIBRARIES) -> None:
        package = target.partition(":")[0].partition(".")[0]
        own = tuple(f"{folder}/{package}{end}" for folder in libraries for end in ("/", ".py"))

        @lru_cache(maxsize=4096)
        def is_library(file: str) -> bool:
            file = file.replace("\\", "/")
            return file.startswith((*(f"{folder}/" for folder in libraries), "<frozen ")) and not file.startswith(own)

        self._is_library = is_library

    def __call__(self, record: logging.LogRecord) -> bool:
        is_ours = record.name.partition(".")[0] == _OURS
        if record.levelno >= logging.WARNING or is_ours or not self._is_library(record.pathname):
            return True
        # The user's code may have set a level for this logger, or for one above it that is not the root.
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger.parent is not None and not logger.level:
            logger = logger.parent
        return logger is not None and logger.parent is not None


def name_call(record: logging.LogRecord) -> bool:
    """Add the call in which a record was written, unless the record names a session itself.

    Perdure's own records name their subject, which is not the call that first meets a failing store, or whose event
    has started a task of the whole process.
    """
    is_other = record.name.partition(".")[0] == _OURS and not str(vars(record).get("action")).startswith("call.")
    if not is_other and (ids := current_call.get()) is not None and "session" not in vars(record):
        record.session, record.stream, record.call = ids
    return True


def name_node(handler: logging.Handler, node: Callable[[], str]) -> None:
    """Let the lines of a handler name the node that writes them, where a record names no other one."""

    def with_node(record: logging.LogRecord) -> bool:
        if "node" not in vars(record) and (name := node()):
            record.node = name
        return True

    handler.addFilter(with_node)


def last_line(action: str, sentence: str) -> bytes:
    """Return a line for a process that cannot log any more, because a stuck thread may hold the log's lock."""
    record = logging.LogRecord(_OURS, logging.ERROR, "", 0, sentence, (), None)
    record.action = action
    formatter = next((handler.formatter for handler in logging.getLogger().handlers if handler.formatter), None)
    return f"{(formatter or logging.Formatter('perdure: %(message)s')).format(record)}\n".encode(errors="replace")


def with_access_log(app: ASGIApp) -> ASGIApp:
    """Wrap an application, and write a record for each of its requests, whatever level the rest of the log has."""
    _access_log.setLevel(logging.INFO)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        began = time.monotonic()
        session, kind = _header(scope, _SESSION), ""
        status: int | None = None
        size, is_complete = 0, False

        async def send_on(message: Message) -> None:
            nonlocal session, kind, status, size, is_complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
                kind = _header(message, b"content-type").partition(";")[0]
                session = session or _header(message, _SESSION)
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)

        try:
            return await app(scope, receive, send_on)
        except Exception:
            if status is None:  # the server that runs the application answers in its place, if it can
                status, is_complete = 500, True
            raise
        finally:
            seconds = time.monotonic() - began
            method, path = (printable(scope[name], MAX_WORD) for name in ("method", "path"))
            size, kind = 0 if method == "HEAD" else size, printable(kind, MAX_WORD)
            of_kind, how = f" of {kind}" if kind else "", "" if is_complete else ", cut off"
            shown = (method, path.replace(" ", "%20"), status or "unanswered", seconds, size, of_kind, how)
            _access_log.info(
                "%s %s %s in %.3f s, %d bytes%s%s",
                *shown,
                extra={
                    "action": "http.request",
                    "method": method,
                    "path": path,
                    "status": status,
                    "duration": round(seconds, 6),
                    "bytes": size,
                    "content_type": kind or None,
                    "complete": is_complete,
                    **({"client": scope["client"][0]} if scope.get("client") else {}),
                    **({"session": printable(session, SHORT)[:SHORT]} if session else {}),
                },
            )

    return answer


def _header(message: Scope | Message, name: bytes) -> str:
    value: bytes = next((value for key, value in message.get("headers", ()) if key.lower() == name), b"")
    return value.decode("latin-1")
