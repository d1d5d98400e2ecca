"""Answers the console's HTTP requests: JSON below `/api`, and the page.

A failure is one sentence: 400 for a bad parameter, 404 for what is not there, 429 beyond a limit, 503 while the store
cannot be read.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from perdure._core.ids import SessionId
from perdure._core.jsonrpc import JsonObject
from perdure._core.text import printable
from perdure.admin.queries import find
from perdure.console import parameters
from perdure.console.entrance import Entrance, refuse
from perdure.console.health import Health
from perdure.console.node_watch import NodeWatch
from perdure.console.session_index import SessionIndex
from perdure.console.session_view import SessionView
from perdure.console.store_view import StoreView
from perdure.errors import Misuse, PerdureError, StoreError

PAGE = Path(__file__).parent / "page"
"""Where the built page is: in a wheel always, in a checkout after `make page`."""

NO_PAGE = "the page of the console is not built in this checkout: run `make page`; the API below /api works without it"


class NotFound(PerdureError):
    """There is no such thing in the store."""


class Console:
    """The parts of one console, and its answers."""

    def __init__(self, address: str, *, allow_end: bool) -> None:
        self.allow_end = allow_end
        self.view = StoreView(address)
        self.index = SessionIndex(self.view)
        self.nodes = NodeWatch(self.view, self.index)
        self.health = Health(self.view, self.index, self.nodes, allow_end=allow_end)
        self.sessions = SessionView(self.view)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: object) -> AsyncIterator[None]:
        await self.view.current()  # a store that is not there is told at the start
        try:
            yield
        finally:
            for part in (self.health, self.nodes, self.index, self.view):
                await part.aclose()

    async def store(self, request: Request) -> JsonObject:
        return await self.health.object()

    async def list_nodes(self, request: Request) -> JsonObject:
        return {"nodes": await self.nodes.objects()}

    async def list_sessions(self, request: Request) -> JsonObject:
        return await self.index.page(parameters.wanted(dict(request.query_params)))

    async def show(self, request: Request) -> JsonObject:
        return await self.sessions.object(await self._id(request))

    async def _id(self, request: Request) -> SessionId:
        """The whole id of the session that a path names by its id, or by the beginning of it."""
        try:
            return (await find(await self.view.current(), request.path_params["id"])).id
        except Misuse as error:
            raise NotFound(str(error)) from None

    def routes(self) -> list[BaseRoute]:
        """One row for each thing that can be asked for."""
        session = "/api/sessions/{id}"
        return [
            Route("/api/store", answering(self.store)),
            Route("/api/nodes", answering(self.list_nodes)),
            Route("/api/sessions", answering(self.list_sessions)),
            Route(session, answering(self.show)),
        ]


def answering(read: Callable[[Request], Awaitable[JsonObject]]) -> Callable[[Request], Awaitable[Response]]:
    """Answer with an object and the time at which it was so."""

    async def answer(request: Request) -> Response:
        return JSONResponse({"now": time.time(), **await read(request)})

    return answer


STATUSES: dict[type[PerdureError], int] = {NotFound: 404, StoreError: 503, Misuse: 400}


async def on_failure(request: Request, error: Exception) -> Response:
    status = next(status for kind, status in STATUSES.items() if isinstance(error, kind))
    return refuse(request.scope, status, " ".join(printable(str(error)).split()))


async def on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {404: "there is no such address here", 405: "this address does not take that method"}
    return refuse(request.scope, error.status_code, sentences.get(error.status_code, error.detail))


async def no_page(request: Request) -> Response:
    return PlainTextResponse(f"{NO_PAGE}\n", status_code=503)


def has_page() -> bool:
    return (PAGE / "index.html").is_file()


def console_app(address: str, *, token: str, allow_end: bool = False, allowed_hosts: Collection[str] = ()) -> Starlette:
    """Give the console of the store at an address, as an ASGI app.

    `token`: what a caller must show. `allow_end`: sessions may be ended; without it the store is only read.
    `allowed_hosts`: names under which the console is reached, beside `localhost` and plain IP addresses.
    """
    console = Console(address, allow_end=allow_end)
    page: BaseRoute = Mount("/", StaticFiles(directory=PAGE, html=True)) if has_page() else Route("/", no_page)
    return Starlette(
        routes=[*console.routes(), page],
        lifespan=console.lifespan,
        middleware=[Middleware(Entrance, token=token, allowed_hosts=allowed_hosts)],
        exception_handlers={HTTPException: on_refusal, **dict.fromkeys(STATUSES, on_failure)},
    )
