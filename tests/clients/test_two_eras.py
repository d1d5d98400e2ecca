"""The official Python client in its default mode, which prefers 2026-07-28, meets both eras on one path (H7, P8)."""

from __future__ import annotations

import pytest

from tests.clients.python_clients import python_client
from tests.support.cutting_proxy import cutting_proxy
from tests.support.serving import TOOLBOX, serving

pytestmark = pytest.mark.anyio


async def test_with_both_eras_it_speaks_the_modern_one() -> None:
    async with serving(TOOLBOX) as server, python_client(server.url, mode="auto") as client:
        call = await client.call("count", n=12)
        assert await client.answer(call) == "counted to 12"
        assert call.progress == list(range(1, 13))
        assert client.protocol == "2026-07-28"


async def test_with_the_session_era_alone_it_falls_back_and_its_call_survives_a_cut() -> None:
    async with (
        serving(TOOLBOX, "--eras", "session", "--retry", "100ms") as server,
        cutting_proxy(server.port) as proxy,
        python_client(server.url) as keeper,
        python_client(proxy.url, mode="auto") as client,
    ):
        assert client.protocol == "2025-11-25"
        call = await client.call("count", n=12, gate="gate", pauses=[4])
        await client.saw(call, [1, 2, 3, 4])
        proxy.cut(only="POST")
        await keeper.result("open_gate", name="gate/4")
        assert await client.answer(call) == "counted to 12"
        assert call.progress == list(range(1, 13))
