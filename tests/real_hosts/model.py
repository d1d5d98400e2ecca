"""A model on this machine that asks for the tools of a script, and remembers what the host shows of their results."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.real_hosts.model_apis import APIS, Call, Json, Say, Turn, call_id, sse
from tests.support.servers.in_process import under_uvicorn

#: Perdure's tool that waits for a call that was answered early, and the call's id in that answer.
WAIT = "perdure_wait_for_result"
EARLY = re.compile(r'"call\\*": *\\*"([\w-]+)')


class Model:
    """Asks for `tools` one after the other, each with `arguments`, but `WAIT` with the id that it was shown."""

    def __init__(self, tools: list[str], arguments: Json) -> None:
        self.url = ""
        self.tools = tools
        self.shown: dict[str, str] = {}
        """What the host showed of each call's result, by the call's id."""
        self.asked = 0
        self.before_next: Callable[[], Awaitable[None]] | None = None
        """What is done between the first call's result and the second call."""
        self.held: set[str] = set()
        """Calls of which the host said only that it waits for the result."""
        self._arguments = arguments
        self._news = asyncio.Condition()

    async def has_seen(self, number: int) -> None:
        """Wait until the host has shown the result of the n-th call."""
        async with self._news:
            await self._news.wait_for(lambda: call_id(number) in self.shown)

    async def holds(self, number: int) -> None:
        """Wait until the host has said that it waits for the result of the n-th call."""
        async with self._news:
            await self._news.wait_for(lambda: call_id(number) in self.held)

    async def has_asked(self, number: int) -> None:
        """Wait until the n-th call was asked for."""
        async with self._news:
            await self._news.wait_for(lambda: self.asked >= number)

    def forget_last(self) -> None:
        """Ask for the last call again, because the host ended before it came."""
        self.asked -= 1

    async def answer(self, turn: Turn) -> Say | Call:
        async with self._news:
            self.shown.update(turn.results)
            self.held.update(turn.held)
            self._news.notify_all()
            # Hosts also ask for titles and summaries, and offer no tools then.
            wanted = self.tools[self.asked] if self.asked < len(self.tools) else None
            tool = next((t for t in turn.tools if wanted is not None and t.name.endswith(wanted)), None)
            if tool is None:
                return Say("That is all.")
            self.asked += 1
            number = self.asked
            self._news.notify_all()
        if number > 1 and self.before_next is not None:
            await self.before_next()
        return Call(call_id(number), tool, _named_call(turn) if wanted == WAIT else self._arguments)

    async def respond(self, request: Request) -> Response:
        path = request.url.path
        api = next((api for api in APIS if api.serves(path)), None)
        if api is None:
            # A list of models, a count of tokens, a report: nothing of it matters here.
            return JSONResponse({"data": [], "models": [], "input_tokens": 1, "totalTokens": 1})
        body = await request.json()
        answer = await self.answer(api.read(body))
        if body.get("stream") or "streamGenerateContent" in path:
            return Response(sse(api.events(answer)), media_type="text/event-stream")
        return JSONResponse(api.whole(answer))


def _named_call(turn: Turn) -> Json:
    """Arguments of the tool that waits: the id in an early answer that the host shows now, else none."""
    found = EARLY.search(" ".join(turn.results.values()))
    return {"call": found[1]} if found else {}


@asynccontextmanager
async def model(tools: list[str], arguments: Json) -> AsyncIterator[Model]:
    """A model that answers at its `url`, whichever of the APIs it is asked by."""
    scripted = Model(tools, arguments)
    app = Starlette(routes=[Route("/{path:path}", scripted.respond, methods=["GET", "POST"])])
    async with under_uvicorn(app) as port:
        scripted.url = f"http://127.0.0.1:{port}"
        yield scripted
