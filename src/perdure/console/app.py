"""Serves the console's HTTP requests: JSON below `/api`, and the page.

A failure is one sentence: 400 for a bad parameter, 404 for an unknown id, 429 beyond a limit, 503 while the store
cannot be read.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from perdure._core.ids import SessionId, StreamId
from perdure._core.jsonrpc import JsonObject
from perdure._core.text import printable
from perdure.admin.queries import NoSuchSession, end_session, find
from perdure.console.auth import AuthMiddleware, Ticket
from perdure.console.http import MAX_VIEWS, LiveResponse, encode_json, number_of, refuse, refuse_unknown
from perdure.console.overview import NodeWatch, StoreStatus, Ticker
from perdure.console.sessions import (
    DEFAULT_EVENTS,
    MAX_BEGINNING,
    MAX_EVENTS,
    ListQuery,
    NotFound,
    SessionList,
    SessionView,
    StoreView,
    session_object,
)
from perdure.errors import Misuse, PerdureError, StoreError

PAGE = Path(__file__).parent / "page"
"""The page as `make page` builds it from `clients/console`. It is in the repository, so that `pip install .` has it."""

MAX_SEQ = 10**10 - 1
"""The highest number of an event: a position has ten digits for it."""

STOP_SECONDS = 1
"""Seconds that a page has to read its last bytes. Nothing is lost: the page reads them again."""

MAX_HEADERS = 64 << 10
"""Bytes of a request's headers: those of a browser with many cookies of other programs on the same machine."""


class Forbidden(PerdureError):
    """This console does not do that."""


class Console:
    """Answers the requests of one console."""

    def __init__(self, address: str, *, allow_end: bool, on_ready: Callable[[], None]) -> None:
        self.allow_end = allow_end
        self.on_ready = on_ready
        self.view = StoreView(address)
        self.list = SessionList(self.view)
        self.nodes = NodeWatch(self.view, self.list)
        self.store_status = StoreStatus(self.view, self.list, self.nodes, allow_end=allow_end)
        self.sessions = SessionView(self.view)
        self.ticker = Ticker(self.list, self.nodes)
        self.views = asyncio.Semaphore(MAX_VIEWS)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: object) -> AsyncIterator[None]:
        async with contextlib.aclosing(self.view):
            self.on_ready()
            yield

    async def store(self, request: Request) -> JsonObject:
        return await self.store_status.object()

    async def list_nodes(self, request: Request) -> JsonObject:
        return {"nodes": await self.nodes.objects()}

    async def list_sessions(self, request: Request) -> JsonObject:
        return await self.list.page(ListQuery.parse(dict(request.query_params)))

    async def show(self, request: Request) -> JsonObject:
        return await session_object(await self.view.current(), await self._id(request))

    async def list_events(self, request: Request) -> JsonObject:
        query = dict(request.query_params)
        refuse_unknown(query, frozenset({"stream", "after", "limit"}))
        after = number_of(query, "after", default=0, low=0, high=MAX_SEQ)
        limit = number_of(query, "limit", default=DEFAULT_EVENTS, low=1, high=MAX_EVENTS)
        stream = StreamId(query.get("stream", ""))
        return await self.sessions.events(await self._id(request), stream, after=after, limit=limit)

    async def show_event(self, request: Request) -> JsonObject:
        seq = number_of(request.path_params, "seq", default=0, low=1, high=MAX_SEQ)
        return await self.sessions.event(await self._id(request), StreamId(request.path_params["stream"]), seq)

    async def end(self, request: Request) -> JsonObject:
        if not self.allow_end:
            raise Forbidden("this console only reads; start it with --allow-end to end sessions")
        session = await self._id(request)
        async with self.view.writing() as store:
            said = await end_session(store, session, now=time.time(), living=self.view.maintenance.living)
        return {"said": said}

    async def follow_session(self, request: Request) -> Response:
        query = dict(request.query_params)
        refuse_unknown(query, frozenset({"last"}))
        last = number_of(query, "last", default=0, low=0, high=MAX_BEGINNING)
        session = await self._id(request)
        return LiveResponse(lambda: self.sessions.follow(session, last=last), self.views)

    async def follow_all(self, request: Request) -> Response:
        await self.ticker.tick()  # a store that cannot be read is reported by the status
        return LiveResponse(self.ticker.follow, self.views)

    async def _id(self, request: Request) -> SessionId:
        """Return the whole id of the session that a path names by its id, or by the beginning of its id."""
        try:
            return (await find(await self.view.current(), request.path_params["id"])).id
        except NoSuchSession as error:
            raise NotFound(str(error)) from None

    def _answering(self, read: Callable[[Request], Awaitable[JsonObject]]) -> Callable[[Request], Awaitable[Response]]:
        """Answer with an object and the present time. Cached values of a store that is lost are not shown."""

        async def answer(request: Request) -> Response:
            await self.view.current()
            return Response(encode_json({"now": time.time(), **await read(request)}), media_type="application/json")

        return answer

    def routes(self) -> list[BaseRoute]:
        session = "/sessions/{id}"
        return [
            Route("/store", self._answering(self.store)),
            Route("/nodes", self._answering(self.list_nodes)),
            Route("/sessions", self._answering(self.list_sessions)),
            Route(session, self._answering(self.show)),
            Route(f"{session}/events", self._answering(self.list_events)),
            Route(f"{session}/events/{{stream}}/{{seq}}", self._answering(self.show_event)),
            Route(f"{session}/live", self.follow_session),
            Route(f"{session}/end", self._answering(self.end), methods=["POST"]),
            Route("/live", self.follow_all),
        ]


STATUSES: dict[type[PerdureError], int] = {
    NotFound: 404,
    Forbidden: 403,
    StoreError: 503,
    Misuse: 400,
}


async def on_failure(request: Request, error: Exception) -> Response:
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    return refuse(request.scope, status, " ".join(printable(str(error)).split()))


async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {404: "there is no such address here", 405: "this address does not take that method"}
    return refuse(request.scope, error.status_code, sentences.get(error.status_code, error.detail))


def console_app(
    address: str,
    *,
    token: str,
    ticket: Ticket,
    allow_end: bool,
    allowed_hosts: Collection[str],
    on_ready: Callable[[], None],
) -> Starlette:
    """Return the console of the store at an address, as an ASGI app.

    `token`: the secret of programs. `ticket`: the once-only secret of the next page. `allow_end`: sessions may be
    ended; without it the store is only read. `allowed_hosts`: names under which the console is reached, beside
    `localhost` and plain IP addresses. `on_ready` is called when requests are answered.
    """
    console = Console(address, allow_end=allow_end, on_ready=on_ready)
    return Starlette(
        routes=[Mount("/api", routes=console.routes()), Mount("/", StaticFiles(directory=PAGE, html=True))],
        lifespan=console.lifespan,
        middleware=[Middleware(AuthMiddleware, token=token, ticket=ticket, allowed_hosts=allowed_hosts)],
        exception_handlers={HTTPException: on_refusal, **dict.fromkeys(STATUSES, on_failure)},
    )


class Server(uvicorn.Server):
    """uvicorn's server, which ends in order: the status is 0 after a signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again after an orderly end, and the status would not be 0.
        self.force_exit = self.should_exit
        self.should_exit = True


def serve_console(app: Starlette, *, listener: socket.socket, protocol: type[asyncio.Protocol]) -> None:
    """Serve until SIGTERM or SIGINT. `protocol`: the class of HTTP connections."""
    config = uvicorn.Config(
        app,
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
    Server(config).run(sockets=[listener])
