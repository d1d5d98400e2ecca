"""Answers the console's HTTP requests: JSON below `/api`, and the page.

A failure is one sentence: 400 for a bad parameter, 404 for what is not there, 429 beyond a limit, 503 while the store
cannot be read.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path

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
from perdure.console import parameters
from perdure.console.entrance import Entrance, Ticket, refuse
from perdure.console.health import Health
from perdure.console.live import LiveResponse, Seats
from perdure.console.node_watch import NodeWatch
from perdure.console.payloads import encoded
from perdure.console.pulse import TICK, Pulse
from perdure.console.session_index import SessionIndex
from perdure.console.session_view import DEFAULT_EVENTS, MAX_BEHIND, MAX_EVENTS, NotFound, SessionView
from perdure.console.store_view import StoreView
from perdure.errors import Misuse, PerdureError, StoreError

PAGE = Path(__file__).parent / "page"
"""The page as `make page` builds it from `clients/console`. It is in the repository, so that `pip install .` has it."""

MAX_SEQ = 10**10 - 1
"""The highest number of an event: a position has ten digits for it."""


class Forbidden(PerdureError):
    """This console does not do that."""


class Console:
    """The parts of one console, and its answers."""

    def __init__(self, address: str, *, allow_end: bool) -> None:
        self.allow_end = allow_end
        self.view = StoreView(address)
        self.index = SessionIndex(self.view)
        self.nodes = NodeWatch(self.view, self.index)
        self.health = Health(self.view, self.index, self.nodes, allow_end=allow_end)
        self.sessions = SessionView(self.view)
        self.pulse = Pulse(self.index, self.nodes, self.health.is_degraded)
        self.seats = Seats()

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

    async def list_events(self, request: Request) -> JsonObject:
        query = dict(request.query_params)
        parameters.refuse_unknown(query, frozenset({"stream", "after", "limit"}))
        after = parameters.number(query, "after", default=0, low=0, high=MAX_SEQ)
        limit = parameters.number(query, "limit", default=DEFAULT_EVENTS, low=1, high=MAX_EVENTS)
        stream = StreamId(query.get("stream", ""))
        return await self.sessions.events(await self._id(request), stream, after=after, limit=limit)

    async def show_event(self, request: Request) -> JsonObject:
        seq = parameters.number(request.path_params, "seq", default=0, low=1, high=MAX_SEQ)
        return await self.sessions.event(await self._id(request), StreamId(request.path_params["stream"]), seq)

    async def end(self, request: Request) -> JsonObject:
        if not self.allow_end:
            raise Forbidden("this console only reads; start it with --allow-end to end sessions")
        session = await self._id(request)
        async with self.view.writing() as store:
            said = await end_session(store, session, now=time.time(), living=self.view.upkeep.living)
        return {"said": said}

    async def follow_session(self, request: Request) -> Response:
        query = dict(request.query_params)
        parameters.refuse_unknown(query, frozenset({"last"}))
        behind = parameters.number(query, "last", default=0, low=0, high=MAX_BEHIND)
        session = await self._id(request)
        return LiveResponse(lambda: self.sessions.follow(session, behind=behind), self.seats)

    async def follow_all(self, request: Request) -> Response:
        await self.pulse.tick()  # a store that cannot be read is told by the status
        return LiveResponse(self._ticks, self.seats)

    async def _ticks(self) -> AsyncGenerator[JsonObject | None]:
        seen: object = None
        while True:
            yield await self.pulse.tick()
            before, seen = seen, await self.pulse.version()
            if before not in (None, seen):
                yield {"what": "changed"}
            await asyncio.sleep(TICK)

    async def _id(self, request: Request) -> SessionId:
        """The whole id of the session that a path names by its id, or by the beginning of it."""
        try:
            return (await find(await self.view.current(), request.path_params["id"])).id
        except NoSuchSession as error:
            raise NotFound(str(error)) from None

    def _answering(self, read: Callable[[Request], Awaitable[JsonObject]]) -> Callable[[Request], Awaitable[Response]]:
        """Answer with an object and the time at which it was so; what is kept of a store that is lost is not shown."""

        async def answer(request: Request) -> Response:
            await self.view.current()
            return Response(encoded({"now": time.time(), **await read(request)}), media_type="application/json")

        return answer

    def routes(self) -> list[BaseRoute]:
        """One row for each thing that can be asked for."""
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
    address: str, *, token: str, ticket: Ticket, allow_end: bool = False, allowed_hosts: Collection[str] = ()
) -> Starlette:
    """Give the console of the store at an address, as an ASGI app.

    `token`: what a caller must show. `ticket`: what a page shows at first. `allow_end`: sessions may be ended; without
    it the store is only read. `allowed_hosts`: names under which the console is reached, beside
    `localhost` and plain IP addresses.
    """
    console = Console(address, allow_end=allow_end)
    return Starlette(
        routes=[Mount("/api", routes=console.routes()), Mount("/", StaticFiles(directory=PAGE, html=True))],
        lifespan=console.lifespan,
        middleware=[Middleware(Entrance, token=token, ticket=ticket, allowed_hosts=allowed_hosts)],
        exception_handlers={HTTPException: on_refusal, **dict.fromkeys(STATUSES, on_failure)},
    )
