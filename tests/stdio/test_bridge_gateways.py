"""Gateways on the way that speak for a server which they cannot reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.stdio.served_hosts import RESUMED, sentences, serving_host
from tests.stdio.test_bridge_resume import _offer_again
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


class Gateway:
    """Passes everything on, but answers itself where a request begins with one of `refusals`."""

    def __init__(self, port: int) -> None:
        self.refusals: dict[bytes, str] = {}
        self.refused = 0
        self.url = ""
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.create_task(_pass_on(from_server, writer))
        with suppress(ConnectionError):  # a process that is killed resets its connections
            await self._pass_on(reader, writer, to_server)
        to_server.close()
        await back

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: asyncio.StreamWriter
    ) -> None:
        while chunk := await reader.read(65536):
            status = next((status for begin, status in self.refusals.items() if chunk.startswith(begin)), None)
            if status is not None:
                self.refused += 1
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
                return
            to_server.write(chunk)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
    writer.close()


@asynccontextmanager
async def a_gateway(port: int) -> AsyncIterator[Gateway]:
    gateway = Gateway(port)
    async with await asyncio.start_server(gateway.serve, "127.0.0.1", 0) as server:
        gateway.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        yield gateway


async def test_a_gateway_that_says_404_for_a_while_costs_no_session(folder: Path) -> None:
    """T3: a token goes when the broker rejects it, and it has not."""
    async with serving_host(folder) as hosted, a_gateway(hosted.site.port) as gateway:
        hosted.host.url = f"{gateway.url}?tenant=1"
        await (await hosted.host.session()).end()
        gateway.refusals = {b"POST": "404 Not Found"}
        away = await hosted.host.start()
        assert (await away.handshake())["error"]["data"] == {"reason": "not_found"}
        await away.end()
        gateway.refusals = {}
        again = await hosted.host.session()
        assert await sentences(again) == [RESUMED]
        await again.end()
        # The server answers and has no broker: its session is the last one, and the earlier one is not resumed.
        gateway.refusals = {b"POST /resume": "404 Not Found"}
        await (await hosted.host.session()).end()
        assert not list(hosted.host.tokens.glob("*/token-*"))


async def test_a_revoked_chain_is_replaced_when_the_broker_is_back(folder: Path) -> None:
    async with serving_host(folder) as hosted, a_gateway(hosted.site.port) as gateway:
        hosted.host.url = gateway.url
        await (await hosted.host.session()).end()
        [file] = hosted.host.tokens.glob("*/token-*[0-9]")
        retired = file.read_text()
        bridge = await hosted.host.session()
        current = file.read_text()
        gateway.refusals = {b"POST /resume/open": "503 Service Unavailable"}
        (folder / "copy").mkdir(0o700)
        await _offer_again(hosted, retired)
        await until(lambda: gateway.refused >= 1)
        gateway.refusals = {}
        await until(lambda: file.exists() and file.read_text()[:20] != current[:20])
        await bridge.end()
        assert await sentences(await hosted.host.session()) == [RESUMED]
