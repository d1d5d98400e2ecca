"""Writes the log of a serving process to stderr: its handler, and what it does not show.

Workers share their parent's stderr. A write of a few kilobytes is one piece on any pipe, but a traceback is longer, so
each record is written under a lock of the file that stderr leads to. The system frees it when a process dies.

Below warning only Perdure and the user's own code are shown. A library (what is installed beside Perdure, and the
standard library) speaks for itself from warning on; it may say more where the user's code sets its logger's level.

The access log is a record for each request when its response has ended: what was asked for, how it was answered, how
long it took. A record names the path and no query, and of a session only the beginning of its id: neither tokens nor
what a query carries are in it.
"""

import contextlib
import logging
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
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


def start_log(
    level: str, form: str, *, target: str, colors: bool, shared: bool, stream: TextIO = sys.stderr
) -> logging.Handler:
    """Show log records on stderr from now on. `shared`: other processes write there as well."""
    handler = SharedStream(stream) if shared and HAS_FLOCK else logging.StreamHandler(stream)
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
        with _turn(self.stream.fileno(), self._patience) as is_ours:
            self._patience = TURN_SECONDS if is_ours else 0.0
            super().emit(record)


@contextlib.contextmanager
def _turn(file: int, patience: float) -> Iterator[bool]:
    """Hold the lock of a file, a pipe or a terminal. Yields whether the lock was free in time."""
    is_ours = _lock(file, patience)
    try:
        yield is_ours
    finally:
        if is_ours:
            with contextlib.suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_UN)


def _lock(file: int, patience: float) -> bool:
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(TURN_LOOK)
        except OSError:  # the system has no locks for such a file, so waiting is of no use
            return False
        else:
            return True


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
        if record.levelno >= logging.WARNING or record.name.partition(".")[0] == _OURS:
            return True
        return not self._is_library(record.pathname) or _has_level(logging.getLogger(record.name))


def _has_level(logger: logging.Logger | None) -> bool:
    """Whether code has set a level for this logger, or for one above it that is not the root."""
    while logger is not None and logger.parent is not None:
        if logger.level:
            return True
        logger = logger.parent
    return False


def name_call(record: logging.LogRecord) -> bool:
    """Let a record say in which call it was written, unless it names a session by itself.

    Perdure's own records name what they are about. A call that meets a failing store first is not what its record is
    about, and neither is one whose event has started a task of the whole process.
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


class AccessLog:
    """Wraps an application, and writes a record for each of its requests.

    The records have a level of their own, so that they are written whatever level the rest of the log has.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        _access_log.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        response = _Response(scope, send)
        began = time.monotonic()
        try:
            await self._app(scope, receive, response.send)
        except Exception:
            response.fail()
            raise
        finally:
            response.write_record(time.monotonic() - began)


class _Response:
    """One response: its status, its size and whether it has ended."""

    __slots__ = ("_content_type", "_ended", "_scope", "_send", "_sent", "_session", "_status")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._status: int | None = None
        self._content_type = ""
        self._session = _header(scope, _SESSION)
        self._sent = 0
        self._ended = False

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._content_type = _header(message, b"content-type").partition(";")[0]
            self._session = self._session or _header(message, _SESSION)
        elif message["type"] == "http.response.body":
            self._sent += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)

    def fail(self) -> None:
        """The application raised an exception. The server that runs it answers in its place, if it can."""
        if self._status is None:
            self._status, self._ended = 500, True

    def write_record(self, seconds: float) -> None:
        scope = self._scope
        method, path = (printable(scope[name], MAX_WORD) for name in ("method", "path"))
        sent = 0 if method == "HEAD" else self._sent
        kind = printable(self._content_type, MAX_WORD)
        how = "" if self._ended else ", cut off"
        _access_log.info(
            "%s %s %s in %.3f s, %d bytes%s%s",
            *(
                method,
                path.replace(" ", "%20"),
                self._status or "unanswered",
                seconds,
                sent,
                kind and f" of {kind}",
                how,
            ),
            extra={
                "action": "http.request",
                "method": method,
                "path": path,
                "status": self._status,
                "duration": round(seconds, 6),
                "bytes": sent,
                "content_type": kind or None,
                "complete": self._ended,
                **({"client": scope["client"][0]} if scope.get("client") else {}),
                **({"session": printable(self._session, SHORT)[:SHORT]} if self._session else {}),
            },
        )


def _header(message: Scope | Message, name: bytes) -> str:
    value: bytes = next((value for key, value in message.get("headers", ()) if key.lower() == name), b"")
    return value.decode("latin-1")
