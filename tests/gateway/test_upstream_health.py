"""`/healthz/upstreams` says what traffic has shown: over real HTTP, with real upstreams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import App, Settings
from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import HttpUpstream, Upstream
from perdure.store import MemoryStore
from tests.gateway.gateways import scripted
from tests.gateway.test_http_upstreams import go_away, port_of
from tests.http.test_router import Served, serving
from tests.support.clients.wire_client import HandshakeFailed
from tests.support.servers.in_process import until
from tests.support.servers.scripted_http import ScriptedHttp, scripted_http

pytestmark = pytest.mark.anyio

INVALID_PARAMS, INTERNAL = -32602, -32603


@asynccontextmanager
async def serving_one(upstream: Upstream, **options: Any) -> AsyncIterator[Served]:
    def make(path: str) -> App:
        settings = Settings()
        hosted = host_upstream(upstream, settings)
        return App(hosted, path=path, store=MemoryStore(), settings=settings, auth=None)

    async with serving({upstream.name: make}, **options) as served:
        yield served


def at(upstream: ScriptedHttp, **limits: Any) -> Upstream:
    options: dict[str, Any] = {"patience": 0.3, "era": "session", **limits}
    return Upstream(name="scripted", address=HttpUpstream(url=upstream.url), **options)


async def health(served: Served) -> tuple[int, str]:
    answer = await served.get("/healthz/upstreams")
    return answer.status_code, answer.json()["upstreams"]["scripted"]["state"]


async def test_an_address_that_does_not_answer_is_down_until_it_does() -> None:
    async with scripted_http() as upstream, serving_one(at(upstream), complaint="cannot be reached") as served:
        assert await health(served) == (200, "starting")
        web = served.web("/mcp")
        peer = await web.join()
        assert await peer.result("plain") == "done"
        assert await health(served) == (200, "up")
        await go_away(upstream)
        answer = (await (await peer.call("plain")).rest())[-1]
        assert answer["error"]["data"]["reason"] == "unreachable"
        assert await health(served) == (503, "down")
        with pytest.raises(HandshakeFailed):
            await web.join()
        assert await health(served) == (503, "down")
        async with scripted_http(port=port_of(upstream)):
            assert await peer.result("plain") == "done"
            assert await health(served) == (200, "up")


async def test_a_lost_session_that_is_not_begun_again_is_down() -> None:
    async with scripted_http() as upstream, serving_one(at(upstream), complaint="404") as served:
        peer = await served.web("/mcp").join()
        upstream.lose_sessions()
        upstream.refuse("initialize", 404)
        answer = (await (await peer.call("plain")).rest())[-1]
        assert answer["error"]["data"]["reason"] == "not_found"
        assert await health(served) == (503, "down")
        assert await peer.result("plain") == "done"
        assert await health(served) == (200, "up")


@pytest.mark.parametrize("code", [INVALID_PARAMS, INTERNAL])
async def test_one_clients_handshake_does_not_make_it_down(code: int) -> None:
    """It is refused while others work; the operator reads why."""
    async with scripted_http() as upstream, serving_one(at(upstream)) as served:
        peer = await served.web("/mcp").join()
        upstream.refuse("initialize", 200, error=[code, "your params"])
        with pytest.raises(HandshakeFailed):
            await served.web("/mcp").join()
        assert await health(served) == (200, "up")
        failure = (await served.get("/healthz/upstreams")).json()["upstreams"]["scripted"]["lastFailure"]
        assert "your params" in failure["reason"]
        assert await peer.result("plain") == "done"


@pytest.mark.parametrize(("code", "seen"), [(INVALID_PARAMS, (200, "starting")), (INTERNAL, (503, "down"))])
async def test_the_first_handshake_is_refused(code: int, seen: tuple[int, str], tmp_path: Path) -> None:
    """Only its own word that it is about the params says that the program may work."""
    async with serving_one(scripted(tmp_path, f"refuse={code}")) as served:
        with pytest.raises(HandshakeFailed):
            await served.web("/mcp").join()
        assert await health(served) == seen


async def test_a_program_that_ends_at_its_start_is_down(tmp_path: Path) -> None:
    """An open session, whose process goes on, does not say that the next one starts."""
    more = tmp_path / "more"
    async with serving_one(scripted(tmp_path, patience=0.1)) as served:
        peer = await served.web("/mcp").join()
        more.write_text("exit=3")
        with pytest.raises(HandshakeFailed):
            await served.web("/mcp").join()
        assert await peer.result("plain") == "done"
        assert (await health(served))[1] in ("down", "backing off")
        more.unlink()

        async def is_up() -> bool:
            try:
                await served.web("/mcp").join()
            except HandshakeFailed:
                return False
            return await health(served) == (200, "up")

        await until(is_up)
