"""A client of the resume broker over HTTP. It repairs nothing and keeps nothing by itself."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urljoin

import httpx2

from tests.support.clients.wire_client import Peer, Web

REJECTED = (403, {"error": "rejected"})


class Holder:
    """A holder by the name of its host process, with or without credentials."""

    def __init__(self, site: Web, name: str = "host", *, bearer: str | None = None) -> None:
        self.site = site
        self.id = hashlib.sha256(name.encode()).hexdigest()
        self.bearer = bearer

    async def send(self, action: str, body: Any, *, method: str = "POST", **headers: str) -> httpx2.Response:
        """Send any request to the broker. A body of bytes is sent as it is."""
        names = {"content-type": "application/json"} | {n.replace("_", "-"): value for n, value in headers.items()}
        if self.bearer is not None:
            names["authorization"] = f"Bearer {self.bearer}"
        url = urljoin(self.site.url, f"resume/{action}")
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self.site.http.request(method, url, headers=names, **content)

    async def use(self, action: str, token: str) -> httpx2.Response:
        return await self.send(action, {"token": token, "holder": self.id})

    async def open(self, session: str) -> str:
        response = await self.send("open", {"holder": self.id}, mcp_session_id=session)
        assert response.status_code == 200, response.text
        assert set(response.json()) == {"token"}
        token: str = response.json()["token"]
        return token

    async def resume(self, token: str) -> tuple[str, str]:
        """The session and the next token."""
        response = await self.use("resume", token)
        assert response.status_code == 200, response.text
        assert set(response.json()) == {"session", "token"}
        return response.json()["session"], response.json()["token"]

    async def confirm(self, token: str) -> None:
        response = await self.use("confirm", token)
        assert (response.status_code, response.json()) == (200, {})

    async def revoke(self, token: str) -> None:
        response = await self.use("revoke", token)
        assert (response.status_code, response.json()) == (200, {})

    async def rotate(self, token: str) -> str:
        """Resume, and confirm the new token."""
        _, new = await self.resume(token)
        await self.confirm(new)
        return new

    async def is_rejected(self, action: str, token: str) -> bool:
        response = await self.use(action, token)
        return (response.status_code, response.json()) == REJECTED


async def joined(site: Web, *, token: str | None = None) -> tuple[Peer, Holder, str]:
    """A client with a session, its holder, and the first token, confirmed."""
    peer = await site.join(token=token)
    holder = Holder(site, bearer=token)
    first = await holder.open(peer.session)
    await holder.confirm(first)
    return peer, holder, first
