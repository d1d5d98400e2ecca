"""Logs each request when its response has ended: what was asked for, how it was answered, how long it took.

A record names the path and no query, and of a session only the beginning of its id: neither tokens nor what a query
carries are in it.
"""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure._core.text import printable
from perdure.telemetry.log_records import SHORT

MAX_WORD = 200
"""Characters of a path or of a content type, which peers and targets write."""

_SESSION = b"mcp-session-id"

_logger = logging.getLogger("perdure.access")


class AccessLog:
    """Wraps an application, and writes a record for each of its requests.

    The records have a level of their own, so that they are written whatever level the rest of the log has.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        _logger.setLevel(logging.INFO)

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
    """What was sent of one response so far."""

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
        """The application raised an exception; the server that runs it answers in its place, if it can."""
        if self._status is None:
            self._status, self._ended = 500, True

    def write_record(self, seconds: float) -> None:
        scope = self._scope
        method, path = (printable(scope[name], MAX_WORD) for name in ("method", "path"))
        sent = 0 if method == "HEAD" else self._sent
        kind = printable(self._content_type, MAX_WORD)
        how = "" if self._ended else ", cut off"
        _logger.info(
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
