"""Several upstreams in one process: each at its path and in its store; one that fails keeps none of the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.server.auth.provider import TokenVerifier
from mcp.server.mcpserver import MCPServer

import perdure
from perdure import App, Settings
from perdure._core.backoff import Pauses
from perdure.errors import Misuse
from perdure.http import router as routing
from perdure.http.router import MakeApp, Router
from perdure.runtime.health import Health, UpstreamState
from perdure.runtime.server import host
from perdure.store import MemoryStore, own_store
from perdure.store.interface import Store
from tests.support.clients.token_holder import Holder, joined
from tests.support.clients.wire_client import HandshakeFailed, Web
from tests.support.servers.in_process import under_uvicorn, until
from tests.support.servers.tool_server import Guests, ToolServer

pytestmark = pytest.mark.anyio


@dataclasses.dataclass(kw_only=True)
class Served:
    """A router that answers, and the clients that were made."""

    port: int
    router: Router
    clients: list[Web] = dataclasses.field(default_factory=list)

    def web(self, path: str) -> Web:
        self.clients.append(Web(f"http://127.0.0.1:{self.port}{path}"))
        return self.clients[-1]

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        response: httpx2.Response = await self.web(path).request("GET", headers=list(headers.items()))
        return response


@asynccontextmanager
async def serving(
    upstreams: Mapping[str, MakeApp],
    *,
    path: str = "/mcp",
    auth: TokenVerifier | None = None,
    complaint: str | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    router = Router(upstreams, settings=Settings(**settings), auth=auth, path=path)
    async with under_uvicorn(router, complaint=complaint) as port:
        served = Served(port=port, router=router)
        try:
            yield served
        finally:
            for client in served.clients:
                await client.aclose()
            router.begin_stop()


def named(name: str, *, health: Health | None = None, **options: Any) -> MakeApp:
    """Makes apps of a server with a tool that says its name."""

    def make(path: str) -> App:
        server = MCPServer(name, log_level="WARNING")
        server.tool(name="name")(lambda: name)
        settings = options.get("settings", Settings())
        hosted = dataclasses.replace(host(server, settings, path=path), health=health)
        how = {"store": MemoryStore(), "settings": settings, "auth": None, **options}
        return App(hosted, path=path, **how)

    return make


def broken(_: str) -> App:
    raise Misuse("the oven is cold")


def counting(made: list[str], make: Callable[[str], App]) -> MakeApp:
    def count(path: str) -> App:
        made.append(path)
        return make(path)

    return count


FAILED = r"perdure: the upstream (cold|warm) failed, and is started again in \d+ s"


async def test_each_upstream_answers_at_its_own_path_and_a_broken_one_says_why() -> None:
    upstreams = {"bread": named("bread"), "cake": named("cake"), "cold": broken}
    async with serving(upstreams, complaint=FAILED) as served:
        for name in ("bread", "cake"):
            peer = await served.web(f"/mcp/{name}").join()
            assert await peer.result("name") == name
        with pytest.raises(HandshakeFailed, match="503"):
            await served.web("/mcp/cold").join()
        refused = await served.get("/mcp/cold")
        assert refused.json()["error"] == {
            "code": -31010,
            "message": "The server cold is not available: the oven is cold",
            "data": {"upstream": "cold", "reason": "not_started", "ran": False},
        }
        assert refused.headers["retry-after"] == "1"
        assert (await served.get("/healthz")).json() == {"status": "ok"}
        health = await served.get("/healthz/upstreams")
        assert (health.status_code, health.json()["status"]) == (503, "down")
        states = health.json()["upstreams"]
        assert {name: states[name]["state"] for name in states} == {"bread": "up", "cake": "up", "cold": "down"}
        assert states["cold"]["reason"] == "the oven is cold"
        assert states["cold"]["nextTry"] > states["cold"]["since"]


async def test_a_session_is_not_found_under_another_path() -> None:
    async with serving({"bread": named("bread"), "cake": named("cake")}) as served:
        peer = await served.web("/mcp/bread").join()
        strayed = peer.through(served.web("/mcp/cake"))
        assert (await strayed.send(strayed.tool("name"))).status_code == 404
        assert await peer.result("name") == "bread"


async def test_other_paths_are_not_found_and_the_common_one_says_where_they_are() -> None:
    async with serving({"bread": named("bread"), "cake": named("cake")}) as served:
        for path in ("/", "/mcp/bun", "/mcp/breadcrumb", "/bread"):
            assert (await served.get(path)).json() == {"error": "not found"}, path
        answer = await served.get("/mcp")
        assert answer.status_code == 404
        assert answer.json() == {"error": "several servers are served here: each is at /mcp/NAME"}


@pytest.mark.parametrize("path", ["/mcp", "/", "/a/b"])
async def test_one_alone_is_at_the_common_path_and_at_its_own(path: str) -> None:
    async with serving({"bread": named("bread")}, path=path) as served:
        own = f"{path.rstrip('/')}/bread"
        for web in (served.web(path), served.web(own)):
            peer, holder, token = await joined(web)
            assert await peer.result("name") == "bread"
            assert (await holder.resume(token))[0] == peer.session
        assert (await served.get("/healthz")).json() == {"status": "ok"}
        assert (await served.get("/healthz/upstreams")).json()["upstreams"]["bread"]["state"] == "up"
        assert "upstream=" not in (await served.get("/metrics")).text
        assert served.router.node


async def test_one_alone_that_does_not_start_ends_the_process() -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        async with serving({"cold": broken}, complaint="the oven is cold|Application startup failed"):
            raise AssertionError("it serves")


async def test_several_of_which_none_starts_end_the_process() -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        async with serving({"cold": broken, "warm": broken}, complaint=f"{FAILED}|the oven is cold|startup failed"):
            raise AssertionError("it serves")


async def test_one_that_did_not_start_is_started_again() -> None:
    made: list[str] = []

    def late(path: str) -> App:
        return named("cold")(path) if len(made) > 1 else broken(path)

    async with serving({"bread": named("bread"), "cold": counting(made, late)}, complaint=FAILED) as served:
        assert (await served.get("/healthz/upstreams")).status_code == 503

        async def is_up() -> bool:
            return (await served.get("/healthz/upstreams")).status_code == 200

        await until(is_up)
        assert await (await served.web("/mcp/cold").join()).result("name") == "cold"
        assert made == ["/mcp/cold", "/mcp/cold"]


async def test_one_that_is_down_for_a_night_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "PAUSES", Pauses(first=0.0, longest=0.0))
    made: list[str] = []
    async with serving({"bread": named("bread"), "cold": counting(made, broken)}, complaint=FAILED) as served:
        await until(lambda: len(made) > 1_100)
        assert await (await served.web("/mcp/bread").join()).result("name") == "bread"


async def test_a_replaced_store_restarts_its_upstream_alone(tmp_path: Path) -> None:
    made: list[str] = []
    store = own_store(f"sqlite:{tmp_path}/perdure.db", "bread")
    upstreams = {"bread": counting(made, named("bread", store=store)), "cake": named("cake")}
    async with serving(upstreams, complaint="this process can serve nothing more|steps are lost") as served:
        peer = await served.web("/mcp/cake").join()
        await served.web("/mcp/bread").join()
        for ending in ("", "-wal", "-shm"):
            (tmp_path / f"perdure.bread.db{ending}").unlink()

        async def is_again() -> bool:
            with contextlib.suppress(HandshakeFailed):
                await served.web("/mcp/bread").join()
            return len(made) > 1

        async def opens_a_session() -> bool:
            with contextlib.suppress(HandshakeFailed):
                return await (await served.web("/mcp/bread").join()).result("name") == "bread"
            return False

        await until(is_again)
        await until(opens_a_session)
        assert await peer.result("name") == "cake"


async def test_metrics_of_all_are_one_page_with_their_names() -> None:
    async with serving({"bread": named("bread"), "cake": named("cake")}) as served:
        await served.web("/mcp/bread").join()
        lines = (await served.get("/metrics")).text.splitlines()
        opened = [line for line in lines if line.startswith("perdure_sessions_opened_total{")]
        assert [line.partition(",")[0].partition("{")[2] for line in opened] == ['upstream="bread"', 'upstream="cake"']
        assert [line.rpartition(" ")[2] for line in opened] == ["1", "0"]
    async with serving({"bread": named("bread"), "cake": named("cake")}, metrics=False) as served:
        assert (await served.get("/metrics")).status_code == 404


async def test_health_is_what_the_upstream_was_seen_to_do() -> None:
    health = Health(clock=lambda: 1_000.0)
    async with serving({"bread": named("bread", health=health)}) as served:
        found = await served.get("/healthz/upstreams")
        assert found.json()["upstreams"] == {
            "bread": {"state": "starting", "since": "1970-01-01T00:16:40Z", "processes": 0}
        }
        health.report(UpstreamState.BACKING_OFF, "its process ended (SIGKILL)", next_try=1_002.0)
        found = await served.get("/healthz/upstreams")
        assert (found.status_code, found.json()["upstreams"]["bread"]) == (
            200,
            {
                "state": "backing off",
                "since": "1970-01-01T00:16:40Z",
                "nextTry": "1970-01-01T00:16:42Z",
                "processes": 0,
                "reason": "its process ended (SIGKILL)",
            },
        )
        health.report(UpstreamState.DOWN, "there is no program npx")
        assert (await served.get("/healthz/upstreams")).status_code == 503
        health.report(UpstreamState.UP)
        found = await served.get("/healthz/upstreams")
        assert found.json()["status"] == "ok"
        failure = {"at": "1970-01-01T00:16:40Z", "reason": "there is no program npx"}
        assert found.json()["upstreams"]["bread"]["lastFailure"] == failure


def test_a_state_has_begun_when_it_was_first_seen() -> None:
    now = iter([1.0, 2.0, 3.0])
    health = Health(clock=lambda: next(now))
    health.report(UpstreamState.UP)
    health.report(UpstreamState.UP)
    assert health.since == 2.0
    health.report(UpstreamState.DOWN, "gone")
    assert (health.since, health.reason) == (3.0, "gone")


async def test_with_tokens_nothing_is_told_to_a_stranger() -> None:
    auth = Guests()
    upstreams = {"bread": named("bread", auth=auth), "cold": broken}
    async with serving(upstreams, auth=auth, complaint=FAILED) as served:
        for path in ("/mcp/bread", "/mcp/cold", "/metrics"):
            assert (await served.get(path)).status_code == 401, path
        ann = {"authorization": "Bearer ann-1"}
        assert (await served.get("/mcp/cold", **ann)).status_code == 503
        assert (await served.get("/metrics", **ann)).status_code == 200
        states = (await served.get("/healthz/upstreams")).json()["upstreams"]
        assert set(states["cold"]) == {"state", "since", "nextTry"}
        peer = await served.web("/mcp/bread").join(token="ann-1")
        assert await peer.result("name") == "bread"


async def test_pages_of_other_sites_read_neither_health_nor_metrics() -> None:
    async with serving({"bread": named("bread"), "cake": named("cake")}) as served:
        for path in ("/healthz/upstreams", "/metrics"):
            assert (await served.get(path, origin="https://evil.example")).status_code == 403
            assert (await served.get(path, host="evil.example")).status_code == 421


async def test_the_broker_of_each_is_found_by_the_token() -> None:
    """The broker's paths are siblings of the endpoint's, so all upstreams share them."""
    async with serving({"bread": named("bread"), "cake": named("cake")}) as served:
        for name in ("bread", "cake"):
            peer, holder, token = await joined(served.web(f"/mcp/{name}"))
            token = await holder.rotate(token)
            assert (await holder.resume(token))[0] == peer.session
            await holder.revoke(token)
            assert await holder.is_rejected("resume", token)
            assert await (await peer.reattach()).result("name") == name


async def test_no_token_is_rejected_while_the_upstream_that_may_know_it_is_down() -> None:
    async with serving({"bread": named("bread"), "cold": broken}, complaint=FAILED) as served:
        holder = Holder(served.web("/mcp/cold"))
        assert (await holder.use("resume", "x" * 64)).status_code == 503
        assert (await holder.send("resume", b"no JSON")).status_code == 400


async def test_a_stop_drains_all() -> None:
    shop, made = ToolServer(), dict[str, Store]()

    def make(path: str) -> App:
        made[path] = MemoryStore()
        return perdure.asgi(shop.server, store=made[path], path=path)

    async with serving({"bread": named("bread"), "shop": make}) as served:
        peer = await served.web("/mcp/shop").join()
        wire = await peer.call("wait", gate="end")
        await until(lambda: served.router.is_busy)
        assert (served.router.running, served.router.has_tasks) == (["wait"], False)
        drained = served.router.drain()
        shop.open("end")
        await drained
        assert (await wire.rest())[-1]["result"]
        assert (await served.get("/healthz")).json() == {"status": "stopping"}
        with pytest.raises(HandshakeFailed, match="503"):
            await served.web("/mcp/bread").join()
