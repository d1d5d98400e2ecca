"""2026-07-28 beside the revisions with sessions, on the same path (P8, design: Two eras)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp.server.mcpserver import Context, MCPServer

from perdure._core.revisions import REVISIONS
from tests.support.clients.modern_requests import TASKS
from tests.support.clients.wire_client import EVENTS, Peer, answer_of, text_of
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

MODERN = "2026-07-28"


def declaring(extension: str) -> dict[str, Any]:
    return {"_meta": {"io.modelcontextprotocol/clientCapabilities": {"extensions": {extension: {}}}}}


TAKES_TASKS, GIVES_KEYS = declaring(TASKS), declaring("dev.perdure/calls")


async def test_both_eras_are_served_on_one_path(shop: ToolServer, site: Site) -> None:
    """P8: the same tools, the same process; the modern answer needs no session and opens none."""
    peer = await site.join()
    response = await site.modern("tools/call", {"name": "count", "arguments": {"n": 2}})
    assert response.status_code == 200, response.text
    assert "mcp-session-id" not in response.headers
    assert text_of(answer_of(response)) == "counted to 2"
    assert await peer.result("count", n=3) == "counted to 3"
    assert site.app.session_ids() == [peer.session]


async def test_the_operator_is_told_once_that_modern_clients_have_no_session(
    shop: ToolServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(shop.server, eras="both") as site:
        await site.join()
        assert told(caplog) == []
        for _ in range(3):
            await site.modern("server/discover", {})
            await site.modern("tools/list", {})
    [(level, action, sentence)] = told(caplog)
    assert (level, action) == (logging.WARNING, "era.sessionless")
    assert sentence.startswith(f"a client speaks {MODERN}: only tasks and calls with a key outlive its connections")
    assert sentence.endswith("--eras auto leads it to a session")


async def test_the_operator_is_told_once_which_way_clients_were_led(
    shop: ToolServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "perdure")
    async with serve(shop.server) as site:
        for _ in range(3):
            await site.modern("server/discover", {})
        [(level, action, sentence)] = told(caplog)
        assert (level, action) == (logging.INFO, "era.session")
        assert sentence.startswith(f"a client of {MODERN} that declares no tasks was led to a session")
        for _ in range(3):
            await site.modern("server/discover", TAKES_TASKS)
            await site.modern("tools/list", TAKES_TASKS)
    [_, (level, action, sentence)] = told(caplog)
    assert (level, action) == (logging.INFO, "era.sessionless")
    assert sentence.endswith("it declares tasks, or did not ask server/discover")


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, str]]:
    records = [(r.levelno, str(getattr(r, "action", "")), r.getMessage()) for r in caplog.records]
    return [record for record in records if record[1].startswith("era.")]


@pytest.mark.parametrize(("eras", "params"), [("both", {}), ("auto", TAKES_TASKS), ("auto", GIVES_KEYS)])
async def test_discovery_names_the_modern_revision(shop: ToolServer, eras: str, params: dict[str, Any]) -> None:
    """C1: the SDK's own handler answers."""
    async with serve(shop.server, eras=eras) as site:
        response = await site.modern("server/discover", params)
        assert response.status_code == 200
        assert MODERN in answer_of(response)["result"]["supportedVersions"]


async def test_by_default_a_client_without_tasks_is_led_to_a_session(site: Site) -> None:
    """Its call would end with its connection; a client that goes on at 2026-07-28 all the same is served."""
    response = await site.modern("server/discover", {})
    assert response.status_code == 400
    answer = response.json()
    assert (answer["id"], answer["error"]["code"]) == (1, -32022)
    assert answer["error"]["data"] == {"supported": list(REVISIONS), "requested": MODERN}
    for hint in ("initialize", "io.modelcontextprotocol/tasks", "--eras both"):
        assert hint in answer["error"]["message"]
    assert "2025-11-25" in answer["error"]["data"]["supported"]
    response = await site.modern("tools/call", {"name": "count", "arguments": {"n": 2}})
    assert text_of(answer_of(response)) == "counted to 2"


async def test_the_modern_era_ignores_a_session_id(site: Site) -> None:
    """C7: the version decides, before the session is looked at."""
    peer = await site.join()
    response = await site.modern("tools/call", {"name": "count", "arguments": {"n": 1}}, mcp_session_id=peer.session)
    assert text_of(answer_of(response)) == "counted to 1"


async def test_the_modern_era_has_neither_get_nor_delete(site: Site) -> None:
    """C7."""
    for method in ("GET", "DELETE"):
        headers = [("accept", EVENTS), ("mcp-protocol-version", MODERN)]
        assert (await site.request(method, headers=headers)).status_code == 405


async def test_what_is_not_in_order_is_refused_as_ever(site: Site) -> None:
    """C4: Origin and Host are judged before the era. The SDK refuses contradictions and unknown versions."""
    assert (await site.modern("server/discover", {}, origin="https://evil.example")).status_code == 403
    assert (await site.modern("server/discover", {}, host="evil.example")).status_code == 421
    assert (await site.modern("server/discover", {}, version="2020-01-01")).status_code == 400
    response = await site.modern("server/discover", {}, mcp_method="tools/list")
    assert (response.status_code, response.json()["error"]["code"]) == (400, -32020)


@pytest.mark.parametrize("version", [MODERN, "2027-01-01"])
async def test_eras_session_turns_modern_clients_to_the_resumable_revisions(shop: ToolServer, version: str) -> None:
    """400, -32022 and what is supported: dual-era clients fall back to `initialize`."""
    async with serve(shop.server, eras="session") as site:
        response = await site.modern("server/discover", {}, version=version)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == -32022
        assert set(error["data"]["supported"]) >= {"2025-03-26", "2025-06-18", "2025-11-25"}
        assert MODERN not in error["data"]["supported"]
        assert error["data"]["requested"] == version
        peer = await site.join()
        assert await peer.result("count", n=1) == "counted to 1"


async def test_the_lifespan_is_entered_once_with_both_eras_in_use() -> None:
    """Both eras share what the server's lifespan made."""
    entered: list[str] = []

    @asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncIterator[dict[str, str]]:
        entered.append("in")
        yield {"made": f"by {len(entered)}"}
        entered.append("out")

    server = MCPServer("lifespan", lifespan=lifespan)

    @server.tool()
    async def made(ctx: Context) -> str:
        state: Any = ctx.request_context.lifespan_context
        return str(state["made"])

    async with serve(server) as site:
        peer, other = await site.join(), await site.join()
        assert await peer.result("made") == "by 1"
        assert await other.result("made") == "by 1"
        response = await site.modern("tools/call", {"name": "made", "arguments": {}})
        assert text_of(answer_of(response)) == "by 1"
        assert entered == ["in"]
    assert entered == ["in", "out"]


async def test_an_initialize_with_a_session_version_header_opens_a_session(site: Site) -> None:
    """Some clients send the header with their first message."""
    peer = Peer(site)
    response = await site.request("POST", headers=peer.headers(), body=peer.handshake())
    assert response.status_code == 200
    assert response.headers["mcp-session-id"]
