"""A client that goes from one process to another and back with its positions (promise 2, R4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients.raw_http import Peer, SessionPeer
from tests.support.processes.cluster import cluster

pytestmark = pytest.mark.anyio


async def test_a_position_seen_in_one_process_is_good_in_another_that_held_the_session_before(tmp_path: Path) -> None:
    """Promises 2 and 4: the other process knows the stream as it was, and must not take the rest for lost."""
    async with cluster(tmp_path / "log.db", processes=2) as site:
        home, other = site.servers
        here = await Peer(port=home.port).session()
        there = SessionPeer(port=other.port, headers=here.headers, id=here.id, calls=100)
        assert (await there.call("count", n=1)).status == 200  # so that it holds the session
        async with await here.resume("") as standalone:
            assert await standalone.head() == 200
            assert (await here.call("announce", n=4)).status == 200
            await standalone.until_messages(4)
        async with await there.resume(standalone.position) as moved:
            assert await moved.head() == 200
            assert (await here.call("announce", n=1, start=5)).status == 200
            (message,) = await moved.until_messages(1)
        assert message["params"] == {"uri": "notice://5"}, message
