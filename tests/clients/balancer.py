"""A balancer that sends each request elsewhere, whatever connection it comes on: requests of one method take turns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.servers.in_process import under_uvicorn

_OF_CONNECTION = {"host", "content-length", "connection", "transfer-encoding", "date", "server"}


class Balancer:
    """Passes whole requests and whole responses on."""

    def __init__(self, ports: Sequence[int], http: httpx2.AsyncClient) -> None:
        self.ports = ports
        self.port = 0
        self.passed: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """How many requests of a method went to each node."""
        self._http = http

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def pass_on(self, request: Request) -> Response:
        passed = self.passed[request.headers.get("mcp-method", request.method)]
        port = self.ports[passed.total() % len(self.ports)]
        passed[port] += 1
        headers = {name: value for name, value in request.headers.items() if name not in _OF_CONNECTION}
        url = f"http://127.0.0.1:{port}/mcp"
        answer = await self._http.request(request.method, url, headers=headers, content=await request.body())
        headers = {name: value for name, value in answer.headers.items() if name not in _OF_CONNECTION}
        return Response(answer.content, status_code=answer.status_code, headers=headers)


@asynccontextmanager
async def balancer(*ports: int) -> AsyncIterator[Balancer]:
    """One that runs until the block ends."""
    async with httpx2.AsyncClient(timeout=30) as http:
        it = Balancer(ports, http)
        app = Starlette(routes=[Route("/mcp", it.pass_on, methods=["GET", "POST", "DELETE"])])
        async with under_uvicorn(app) as it.port:
            yield it
