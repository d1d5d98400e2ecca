"""Clients go on with their sessions on the copy of a store: from SQLite to PostgreSQL, and back (promises 2, 3 and 4).

Real servers in processes of their own, real HTTP; the servers are stopped, or killed, before the store is copied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cli.test_sessions import lines
from tests.support.clients.wire_client import Peer, Web, gaps_of, notices_of, progress_of, text_of
from tests.support.processes.serving import BASIC_TOOLS, Served, serving
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite to postgres", "postgres to sqlite"])
def addresses(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    pair = (f"sqlite:{tmp_path / 'perdure.db'}", store_url())
    return pair if request.param == "sqlite to postgres" else pair[::-1]


@asynccontextmanager
async def site(store: str) -> AsyncIterator[tuple[Served, Web]]:
    async with serving(BASIC_TOOLS, "--store", store) as served:
        web = Web(served.url)
        try:
            yield served, web
        finally:
            await web.aclose()


async def test_a_client_resumes_its_calls_and_its_session_with_its_old_positions(
    tmp_path: Path, addresses: tuple[str, str]
) -> None:
    source, target = addresses
    async with site(source) as (served, web):
        peer = await web.join()
        standalone = await peer.get()
        call = await peer.call("count", n=6, gate="g", pauses=[2], token=1)
        seen = await call.messages(2)
        await call.drop()
        assert await peer.result("open_gate", name="g/2") == "opened g/2"
        assert await peer.result("gate", name="g/done") == "went through g/done"
        assert await peer.result("announce", n=3) == "announced 3"
        notices = await standalone.messages(2)
        await standalone.drop()
        await served.stop()
    told, verified = await lines(tmp_path, "store", "copy", source, target)
    assert told.startswith("copied 1 sessions, ")
    assert verified.startswith("verified: ")
    async with site(target) as (_, web):
        there = peer.through(web)
        seen += await (await there.get(call.last_id)).rest()
        assert progress_of(seen) == [1, 2, 3, 4, 5, 6]
        assert text_of(seen[-1]) == "counted to 6"
        resumed = await there.get(standalone.last_id)
        notices += await resumed.messages(1)
        assert await there.result("announce", n=2, start=4) == "announced 2"
        notices += await resumed.messages(2)
        assert notices_of(notices) == [1, 2, 3, 4, 5]
        assert gaps_of([*seen, *notices]) == []
        assert await there.result("count", n=1) == "counted to 1"


async def test_a_call_that_a_killed_server_left_is_settled_on_the_copy(
    tmp_path: Path, addresses: tuple[str, str]
) -> None:
    """Promise 3: every accepted call gets one answer, also if its server died before its store was copied."""
    source, target = addresses
    async with site(source) as (served, web):
        peer: Peer = await web.join()
        call = await peer.call("gate", name="never", id=8)
        again = await peer.call("count", n=3, gate="g", pauses=[2], token=1)
        seen = await again.messages(2)
        await call.event()
        await served.kill()
    await lines(tmp_path, "store", "copy", source, target)
    async with site(target) as (_, web):
        there = peer.through(web)
        [unknown] = await (await there.get(call.last_id)).rest()
        assert (unknown["id"], unknown["error"]["code"]) == (8, -31001)
        assert await there.result("open_gate", name="g/2") == "opened g/2"
        seen += await (await there.get(again.last_id)).rest()
        assert progress_of(seen) == [1, 2, 3]
        assert text_of(seen[-1]) == "counted to 3"
