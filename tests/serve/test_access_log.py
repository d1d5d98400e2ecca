"""The log of `perdure serve` as a program reads it: as JSON, with a record for each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.raw_http import Peer, message
from tests.support.processes.serving import Served, serving
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

TARGET = """
import logging, warnings
import anyio, httpx2
from mcp.server.mcpserver import Context, MCPServer
from starlette.responses import Response

log = logging.getLogger("bakery.oven")
server = MCPServer("bakery")

@server.tool()
async def bake(url: str, ctx: Context) -> str:
    log.debug("heat")
    async with httpx2.AsyncClient() as client:  # which logs each of its requests
        await client.get(url)
    await ctx.report_progress(1)
    warnings.warn("it is\\nhot")
    return "bread"

@server.tool()
async def wait(ctx: Context) -> None:
    await ctx.report_progress(1)
    await anyio.sleep_forever()

@server.custom_route("/crash", methods=["GET"])
async def crash(_):
    raise ValueError("burnt")
"""
TOKEN = "a-token-that-nobody-may-read"


def logged(served: Served) -> list[dict[str, Any]]:
    """All that was written behind the ready line. Each line is one object."""
    return [json.loads(line) for line in served.output[1:]]


def requests(served: Served) -> list[tuple[Any, ...]]:
    told = [line for line in logged(served) if line["action"] == "http.request"]
    return [(line["method"], line["path"], line["status"], line["content_type"], line["complete"]) for line in told]


async def test_each_request_is_logged_once_when_its_response_ends_and_only_perdure_and_the_target_speak(
    tmp_path: Path,
) -> None:
    (tmp_path / "bakery.py").write_text(TARGET)
    (tmp_path / "tokens").write_text(f"alice:{TOKEN}\n")
    (tmp_path / "tokens").chmod(0o600)
    said = ("--log-level", "debug", "--log-format", "json", "--access-log")
    target = f"{tmp_path}/bakery.py:server"
    async with serving(target, "--store", "memory:", "--tokens", f"{tmp_path}/tokens", *said) as served:
        stranger = Peer(port=served.port)
        assert (await stranger.ask("GET", path="/healthz?secret=1")).status == 200
        assert (await stranger.ask("POST", message("ping", id=1))).status == 401
        assert (await stranger.ask("GET", path="/a%20200%20in%200.1%20s%0A%1B[31m")).status == 401
        peer = Peer(port=served.port, headers={"authorization": f"Bearer {TOKEN}"})
        assert (await peer.ask("GET", path="/crash?secret=1")).status == 500
        session = await peer.session()
        async with await session.begin("GET") as stream:
            assert await stream.head() == 200
            stream.cut()
        await until(lambda: ("GET", "/mcp", 200, "text/event-stream", False) in requests(served))
        async with await session.begin_call("wait") as call:
            await call.until_messages(1)
            call.cut()
        await until(lambda: ("POST", "/mcp", 200, "text/event-stream", False) in requests(served))
        answer = await session.call("bake", url=f"http://127.0.0.1:{served.port}/healthz")
        assert answer.status == 200
        await session.delete()
        await until(lambda: requests(served)[-1][0] == "DELETE")
    assert requests(served) == [
        ("GET", "/healthz", 200, "application/json", True),
        ("POST", "/mcp", 401, "application/json", True),
        ("GET", "/a 200 in 0.1 s\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m", 401, "application/json", True),
        ("GET", "/crash", 500, "text/plain", True),
        ("POST", "/mcp", 200, "text/event-stream", True),
        ("POST", "/mcp", 202, None, True),
        ("GET", "/mcp", 200, "text/event-stream", False),
        ("POST", "/mcp", 200, "text/event-stream", False),
        ("GET", "/healthz", 200, "application/json", True),
        ("POST", "/mcp", 200, "text/event-stream", True),
        ("DELETE", "/mcp", 200, None, True),
    ]
    lines = logged(served)
    [odd] = [line["message"] for line in lines if line.get("path", "").startswith("/a ")]
    assert odd.startswith("GET /a%20200%20in%200.1%20s\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m 401 in ")
    [baked] = [line for line in lines if line["action"] == "http.request" and line["bytes"] == len(answer.body)][-1:]
    assert baked["session"] == session.id[:8]
    assert 0 < baked["duration"] < 20
    ours = {line["logger"] for line in lines if line["level"] in ("debug", "info")}
    assert ours == {"perdure", "perdure.access", "bakery.oven"}
    [heat] = [line for line in lines if line["logger"] == "bakery.oven"]
    assert (heat["message"], heat["session"], heat["call"]) == ("heat", session.id[:8], 2)
    [warned] = [line["message"] for line in lines if line["logger"] == "py.warnings"]
    assert "it is\nhot" in warned
    [crashed] = [line for line in lines if "exception" in line]
    assert crashed["level"] == "error"
    assert crashed["exception"].endswith("ValueError: burnt")
    assert {len(line["node"]) for line in lines} == {8}
    told = "\n".join(served.output)
    assert [secret for secret in (TOKEN, "secret=1", session.id) if secret in told] == []


async def test_without_the_option_no_request_is_logged_and_at_warning_the_user_s_own_code_is_silent(
    tmp_path: Path,
) -> None:
    (tmp_path / "bakery.py").write_text(TARGET)
    async with serving(f"{tmp_path}/bakery.py:server", "--store", "memory:") as served:
        session = await Peer(port=served.port).session()
        assert (await session.call("bake", url=f"http://127.0.0.1:{served.port}/healthz")).status == 200
        await until(lambda: len(served.output) > 2)
    assert [line.split()[1:3] for line in served.output if line[:4].isdigit()] == [["WARNING", "py.warnings"]]
