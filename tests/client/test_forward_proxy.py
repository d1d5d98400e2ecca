"""The proxy that the environment names sees what goes to other machines, and nothing that stays on this one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from mcp.shared.exceptions import MCPError

import perdure
from perdure.remote.endpoint import is_this_machine
from tests.client.conftest import text
from tests.client.odd_server import BRIEF, Odd, good, json_of
from tests.support.servers.in_process import under_uvicorn

pytestmark = pytest.mark.anyio

VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


class ForwardProxy:
    """Remembers every request that it is given, and hands none of them on."""

    def __init__(self) -> None:
        self.heads: list[str] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def forward_proxy(environment: pytest.MonkeyPatch) -> AsyncIterator[ForwardProxy]:
    proxy = ForwardProxy()
    async with await asyncio.start_server(proxy.answer, "127.0.0.1", 0) as server:
        for name in ("NO_PROXY", "no_proxy"):
            environment.delenv(name, raising=False)
        for name in VARIABLES:
            environment.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield proxy


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_what_goes_to_this_machine_is_not_shown_to_a_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    odd = Odd(tool=lambda key: json_of(good(key)))
    async with forward_proxy(monkeypatch) as proxy, under_uvicorn(odd.app) as port:
        async with perdure.connect(f"http://{host}:{port}/mcp", auth=lambda: "a-secret", patience=BRIEF) as client:
            assert text(await client.call_tool("tool")) == "fine"
        assert proxy.heads == []


async def test_what_goes_to_another_machine_goes_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with forward_proxy(monkeypatch) as proxy:
        with pytest.raises(MCPError):
            async with perdure.connect("http://elsewhere.invalid/mcp", patience=BRIEF):
                raise AssertionError("the proxy refuses")
        assert proxy.heads[0].startswith("POST http://elsewhere.invalid/mcp HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000/mcp", True),
        ("http://127.8.9.10/mcp", True),
        ("https://[::1]:8000/mcp", True),
        ("http://[::ffff:127.0.0.1]/mcp", True),
        ("http://0.0.0.0:8000/mcp", True),
        ("http://LocalHost:8000/mcp", True),
        ("http://localhost.:8000/mcp", True),
        ("http://bakery.localhost/mcp", True),
        ("http://localhost.evil/mcp", False),
        ("http://notlocalhost/mcp", False),
        ("http://192.168.0.1/mcp", False),
        ("http://example.com/mcp", False),
    ],
)
def test_addresses_of_this_machine(url: str, is_here: bool) -> None:
    """The clients for programs and for desktop hosts share the rule."""
    assert is_this_machine(httpx2.URL(url).host) == is_here
