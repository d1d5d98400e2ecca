"""The public names as a user types them. Never run: the type checker reads this."""

from typing import assert_type

from mcp.server.auth.provider import TokenVerifier
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.routing import Mount

import perdure
from perdure.testing import check_store


def serve(server: MCPServer, auth: TokenVerifier) -> Starlette:
    app = perdure.asgi(server, store="sqlite:perdure.db", settings=perdure.Settings(retry=1.0), auth=auth)
    assert_type(app, perdure.App)
    app.begin_stop()
    return Starlette(routes=[Mount("/", app=app)], lifespan=app.lifespan)


def ask(app: perdure.App) -> None:
    for session_id in app.session_ids():
        info = app.session_info(session_id)
        if info is not None:
            assert_type(info.running_calls, tuple[str, ...])
            assert_type(info.streams[0].last, int)
    assert_type(app.counters.snapshot(), dict[str, int])


def make(name: str) -> perdure.Store:
    return perdure.open_store(f"sqlite:{name}.db?sync=full")


async def prove() -> None:
    await check_store(make)
