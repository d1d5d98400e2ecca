"""Run the app under uvicorn: one line when it is ready, a clean end on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Iterator, MutableMapping
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from perdure.errors import Misuse, PerdureError
from perdure.listener import BACKLOG, Connection
from perdure.settings import Settings
from perdure.target import blame

#: Longer than what load balancers keep an idle connection for (60 s is common), so that they close first and no
#: request meets a connection that we are just closing.
KEEP_ALIVE_SECONDS = 65
#: Readers end at the signal; this is for peers that do not take their last bytes or do not finish their body.
STOP_SECONDS = 3
#: Files, pipes and idle connections beside the readers.
SPARE_FILES = 4096


class Stoppable(Protocol):
    """An ASGI app that is told when the end begins, so that it can end its readers."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...

    def begin_stop(self) -> None: ...


def serve(app: Stoppable, *, listener: socket.socket, url: str, settings: Settings) -> int:
    """Serve until a signal; returns the exit status. Raises `PerdureError` if the app does not start."""
    _allow_open_files(settings.max_readers + SPARE_FILES)
    watched = _Watched(app)
    server = _Server(_config(watched, settings), app=app, url=url)
    # uvicorn ends the program when the app does not start; why is told by the app's own error.
    with _quiet(server), contextlib.suppress(SystemExit):
        server.run(sockets=[listener])
    if not server.started:
        raise watched.why()
    return 1 if watched.failure or server.force_exit else 0


def _config(app: _Watched, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        # Its warnings are about what peers do wrong; they would let any peer fill our log.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=settings.max_headers,
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, *, app: Stoppable, url: str) -> None:
        super().__init__(config)
        self.app = app
        self.url = url
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        print(f"perdure: serving on {self.url}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class would raise the signal again after a clean stop; then the exit status would not be 0.
        if self.should_exit:
            self.force_exit = self.force_exit or sig == signal.SIGINT
            return
        self.should_exit = True
        if self.loop is not None:
            # A signal comes between any two instructions; the app wants to be called from its loop.
            self.loop.call_soon_threadsafe(self.app.begin_stop)


class _Watched:
    """The app, with the reason remembered if its lifespan fails: uvicorn would only print a traceback."""

    def __init__(self, app: Stoppable) -> None:
        self._app = app
        self.failure: BaseException | None = None
        self.message = ""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self._lifespan(scope, receive, send)
        return self._app(scope, receive, send)

    async def _lifespan(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def watch(message: Message) -> None:
            self.message = message.get("message") or self.message
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    def why(self) -> PerdureError:
        """What kept the app from starting."""
        if self.failure is None:
            return Misuse(f"the server did not start: {self.message or 'it gave no reason'}")
        cause = self.failure
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        return cause if isinstance(cause, PerdureError) else Misuse(f"the server did not start: {blame(cause)}")


@contextlib.contextmanager
def _quiet(server: uvicorn.Server) -> Iterator[None]:
    """Keep back what uvicorn logs about a start that failed (we say it) and about requests it cancels at the end."""

    def worth_telling(record: logging.LogRecord) -> bool:
        cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return server.started and not cancelled

    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(worth_telling)
    try:
        yield
    finally:
        logger.removeFilter(worth_telling)


def _allow_open_files(wanted: int) -> None:
    """Each reader is an open file, and many systems begin with 1,024 although they would allow more."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < ceiling:
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
