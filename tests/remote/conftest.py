"""A program above the engine that remembers what it was given, and a link of it to a server of the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2

from perdure._core.reconnect import Patience
from perdure._core.sse import MAX_EVENT_BYTES
from perdure.remote.call import Call, OutgoingRequest
from perdure.remote.endpoint import Bearer, Endpoint, Handshake, Refused, TokenProvider
from perdure.remote.link import Link
from perdure.remote.message import Message, encode
from perdure.remote.route import ClientLimits, Notice, Route
from tests.client.odd_server import Odd
from tests.support.servers.in_process import under_uvicorn

BRIEF = Patience(max_time=0.5, max_tries=3, first_delay=0.01, max_delay=0.02)
LIMITS = ClientLimits(
    patience=BRIEF,
    listening=BRIEF,
    handshake=BRIEF,
    handshake_seconds=10.0,
    message_bytes=MAX_EVENT_BYTES,
    counts_from_request=False,
)


class Recorder:
    """A program that remembers."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.complaints: list[str] = []
        self.positions: list[str | None] = []
        self.notices: list[tuple[Notice, str, str]] = []
        self.lost_positions = 0
        self.adopted: list[str] = []
        self.repeats: list[str] = []
        self.refusal: Refused | None = None
        self.link: Link

    async def take(self, message: Message) -> None:
        self.taken.append(message)

    async def complain(self, error: Exception) -> None:
        self.complaints.append(str(error))

    def move(self, position: str | None, retry: int | None) -> None:
        self.positions.append(position)

    async def lose_position(self) -> None:
        self.lost_positions += 1

    async def replace(self, gone: Handshake) -> Handshake:
        made = await self.link.begin_again(INITIALIZE, gone)
        if self.refusal is not None:
            raise self.refusal
        await self.link.bring_up(made, self.repeats)
        return made

    async def on_replaced(self, handshake: Handshake) -> None:
        self.adopted.append(handshake.session)

    def fail(self, error: Exception) -> None:
        raise error

    def report(self, notice: Notice, why: str = "", *, reason: str = "") -> None:
        self.notices.append((notice, why, reason))

    def heard(self, notice: Notice) -> list[str]:
        return [why for seen, why, _ in self.notices if seen is notice]


INITIALIZE = encode({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}})


class Client:
    """A link whose session has begun, and the calls that are made over it."""

    def __init__(self, link: Link, program: Recorder, odd: Odd) -> None:
        self.link = link
        self.program = program
        self.odd = odd
        self.positions: list[str | None] = []

    def call(self, name: str, *, method: str = "tools/call", position: str | None = None) -> Call:
        def body(request_id: str) -> bytes:
            return encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": {"name": name}}).encode()

        return Call(
            self.link.route,
            OutgoingRequest(method=method, name=name, body=body if position is None else None),
            link=self.link,
            take=self.program.take,
            move=lambda position, retry: self.positions.append(position),
            position=position,
        )

    async def answer(self, name: str, **options: Any) -> dict[str, Any]:
        """The answer's own part: its result, or its error."""
        found = json.loads((await self.call(name, **options).answer()).text)
        return dict(found.get("error") or found["result"])

    async def begin(self) -> None:
        begun = await self.link.begin(INITIALIZE, self.link.route.new_id())
        made = Handshake(session=begun.session, request={}, result=begun.answer.result, initialized=True)
        self.link.handshake = made


@asynccontextmanager
async def linked(
    odd: Odd,
    *,
    token: TokenProvider | None = None,
    listens: bool = False,
    limits: ClientLimits = LIMITS,
    change: Callable[[ClientLimits], ClientLimits] = replace,
) -> AsyncIterator[Client]:
    program = Recorder()
    auth = None if token is None else Bearer(token)
    async with (
        under_uvicorn(odd.app, complaint=".*") as port,
        httpx2.AsyncClient(auth=auth, trust_env=False) as http,
        asyncio.timeout(60),
    ):
        endpoint = Endpoint(http, f"http://127.0.0.1:{port}/mcp", on_401="wants a token")
        about: Any = {"complain": program.complain, "report": program.report, "prefix": "p"}
        link = Link(Route(endpoint=endpoint, limits=change(limits), **about), program, listening_seconds=1.0)
        program.link = link
        client = Client(link, program, odd)
        async with link.running() as scope:
            await client.begin()
            if listens:
                await link.listen(is_new=True)
            yield client
            scope.cancel()
