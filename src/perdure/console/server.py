"""Runs the console under uvicorn until a signal."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.errors import Misuse, PerdureError

STOP_SECONDS = 1
"""Seconds that a page has to take its last bytes. Nothing is lost with it: the page reads it again."""

MAX_HEADERS = 64 << 10
"""Bytes of a request's headers: those of a browser with many cookies of other programs on the same machine."""


class Server(uvicorn.Server):
    """uvicorn's server, whose end is orderly: the status is 0 behind a signal."""

    def __init__(self, app: ASGIApp, *, protocol: type[asyncio.Protocol], on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            self.run_app,
            interface="asgi3",
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,  # it would show session ids
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
        super().__init__(config)
        self.app = app
        self.on_ready = on_ready
        self.failure: BaseException | None = None
        """Why the app did not start."""

    async def run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            await send(message)

        try:
            await self.app(scope, receive, send_on)
        except BaseException as error:
            if scope["type"] == "lifespan":
                self.failure = error
            raise

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again behind an orderly end, and the status would not be 0.
        self.force_exit = self.should_exit
        self.should_exit = True


def serve_console(
    app: ASGIApp, *, listener: socket.socket, protocol: type[asyncio.Protocol], on_ready: Callable[[], None]
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Raises `PerdureError` if the app does not start.

    `protocol`: the class of HTTP connections."""
    server = Server(app, protocol=protocol, on_ready=on_ready)
    with contextlib.suppress(SystemExit):
        server.run(sockets=[listener])
    if server.started:
        return 0
    if isinstance(server.failure, PerdureError):
        raise server.failure
    raise Misuse(f"the console did not start: {server.failure or 'it gave no reason'}")
