"""The public names as a user types them. Never run: the type checker reads this."""

from functools import partial
from pathlib import Path
from typing import assert_type
from uuid import UUID

import httpx2
import mcp_types as types
from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.settings import AuthSettings
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


async def serve_users_of(issuer: AuthSettings, server: MCPServer, own: TokenVerifier) -> None:
    app = perdure.asgi(server, auth=issuer)
    assert_type(await app.check_tokens(), int)
    perdure.asgi(server, auth=issuer, token_verifier=own)


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


async def use(url: str, auth: httpx2.Auth) -> str:
    patience = perdure.Patience(max_time=60.0)
    async with perdure.connect(url, state="agent.json", headers={"x": "y"}, auth=auth, patience=patience) as client:
        assert_type(client, perdure.Client)
        assert_type(client.session_id, str | None)
        for call in client.pending():
            assert_type(call, perdure.PendingCall)
            async for note in call:
                assert_type(note, types.ServerNotification)
            assert_type(await call, types.CallToolResult)
        try:
            result = await client.call_tool("bake", {"loaves": 1})
        except perdure.OutcomeUnknown as unknown:
            return f"{unknown.tool} {unknown.arguments} {unknown.reason}"
        assert_type(result, types.CallToolResult)
        assert_type((await client.list_tools()).tools, list[types.Tool])
    return ""


async def use_more(url: str, state: perdure.StateStore, path: Path) -> None:
    async def token() -> str:
        return "t"

    async def gone(gap: perdure.Gap) -> None:
        assert_type(gap.tool, str | None)

    async with perdure.connect(url, state=state, auth=token, on_gap=gone, rerun_safe_tools=True):
        pass
    async with perdure.connect(url, state=path, auth=lambda: "t", on_gap=print, terminate_on_close=True):
        pass


async def steps() -> None:
    async def price(item: str, count: int = 1) -> float:
        return len(item) * count

    def charge(amount: float) -> str:
        return str(amount)

    def was_charged() -> str | perdure.steps.NotDone:
        return perdure.NOT_DONE

    async def is_charged() -> str | perdure.steps.NotDone:
        return was_charged()

    assert_type(await perdure.step("price", price, "pen"), float)
    assert_type(await perdure.step("price", price, "pen", 2, again=True), float)
    assert_type(await perdure.step("price", partial(price, "pen", count=2)), float)
    assert_type(await perdure.step("charge", charge, 1.5, check=was_charged), str)
    assert_type(await perdure.step("charge", charge, 1.5, check=is_charged), str)
    assert_type(perdure.step_key(), UUID)
    await perdure.sleep(3600, name="nap")
    assert_type(perdure.step_sync("charge", charge, 1.5), str)
    await perdure.step("price", price, 3)  # type: ignore[arg-type]
    perdure.step_sync("charge", charge)  # type: ignore[arg-type]
    await perdure.step("charge", price("pen"))  # type: ignore[call-overload]
