"""Adds the bearer token that the user's function gives, and asks it again when the server answers 401 (R11, R9)."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
import httpx2

TokenProvider = Callable[[], str | Awaitable[str]]


class Bearer(httpx2.Auth):
    """Keeps a token in memory until the server refuses it; it is never written anywhere."""

    def __init__(self, provider: TokenProvider) -> None:
        self._provider = provider
        self._token: str | None = None
        self._turn = anyio.Lock()

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        used = self._token or await self._renew(None)
        request.headers["authorization"] = f"Bearer {used}"
        response = yield request
        if response.status_code == 401:
            request.headers["authorization"] = f"Bearer {await self._renew(used)}"
            yield request

    async def _renew(self, refused: str | None) -> str:
        """The token that is used from now on; several requests that were refused together ask once."""
        async with self._turn:
            if self._token is None or self._token == refused:
                given = self._provider()
                self._token = await given if inspect.isawaitable(given) else given
            return self._token
