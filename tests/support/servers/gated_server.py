"""A served tool server in the test's own event loop, spoken to over raw sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.settings import AuthSettings

import perdure
from perdure.settings import Settings
from perdure.store.interface import Store
from tests.support.clients.raw_http import Peer, SessionPeer
from tests.support.servers.gated_tools import server as gated
from tests.support.servers.in_process import info_of, under_uvicorn


@dataclass(kw_only=True)
class Live(Peer):
    """A running server, and a peer without a session."""

    app: perdure.App


@asynccontextmanager
async def live(
    *,
    server: object = gated,
    store: Store | str = "memory:",
    auth: TokenVerifier | AuthSettings | None = None,
    token_verifier: TokenVerifier | None = None,
    complaint: str | None = None,
    **settings: Any,
) -> AsyncIterator[Live]:
    """Serve until the block ends. `complaint` is a pattern of logged errors that the test expects; others fail it."""
    app = perdure.asgi(server, store=store, settings=Settings(**settings), auth=auth, token_verifier=token_verifier)
    async with under_uvicorn(app, complaint=complaint) as port:
        try:
            yield Live(port=port, app=app)
        finally:
            app.begin_stop()


def readers(served: Live, peer: SessionPeer) -> int:
    """How many connections read a session's streams."""
    return sum(stream.connected_since is not None for stream in info_of(served.app, peer.id).streams)
