"""The resume broker where several processes share the store: any of them answers, and none is needed (T10, H1)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from tests.cluster.conftest import Pair
from tests.support.clients.token_holder import Holder, joined
from tests.support.clients.wire_client import Web
from tests.support.processes.cluster import cluster

pytestmark = pytest.mark.anyio

REVOKED = "notifications/perdure/resume_revoked"


async def test_tokens_are_renewed_at_either_node(pair: Pair) -> None:
    peer, at_a, token = await joined(pair.a.site)
    at_b = Holder(pair.b.site)
    for here, there in ((at_a, at_b), (at_b, at_a)) * 2:
        session, token = await here.resume(token)
        assert session == peer.session
        await there.confirm(token)
    assert await peer.through(pair.b.site).result("count", n=1) == "counted to 1"


async def test_of_those_who_resume_at_both_nodes_at_once_one_goes_on(pair: Pair) -> None:
    """T10: all but the last new token are void, whatever process issued them; the first use of one revokes."""
    peer, at_a, first = await joined(pair.a.site)
    at_b = Holder(pair.b.site)
    answers = await asyncio.gather(*(holder.resume(first) for holder in (at_a, at_b) * 10))
    assert {session for session, _ in answers} == {peer.session}
    taken = [(await at_a.use("confirm", token)).status_code == 200 for _, token in answers]
    assert sum(taken) <= 1
    for holder in (at_a, at_b):
        for _, token in answers:
            assert await holder.is_rejected("resume", token)
    counters = [node.site.app.counters for node in (pair.a, pair.b)]
    assert sum(counter.resume_chains_revoked for counter in counters) == 1


@pytest.mark.parametrize("attached", ["at its home", "elsewhere"])
async def test_a_revocation_is_heard_in_whatever_process_one_is_attached(pair: Pair, attached: str) -> None:
    peer, at_a, first = await joined(pair.a.site)
    reader = peer if attached == "at its home" else peer.through(pair.b.site)
    standalone = await reader.get()
    await standalone.event()
    await at_a.rotate(first)
    thief = Holder(pair.b.site if attached == "at its home" else pair.a.site)
    assert await thief.is_rejected("resume", first)
    assert (await standalone.message())["method"] == REVOKED
    fresh = await Holder(reader.site).open(peer.session)
    assert (await at_a.resume(fresh))[0] == peer.session


async def test_a_server_killed_between_resume_and_confirm_loses_nothing(tmp_path: Path) -> None:
    """T10: real processes and SIGKILL. Whichever token the holder found on its disk is taken."""
    async with cluster(tmp_path / "log.db", processes=2) as servers, contextlib.AsyncExitStack() as stack:
        webs = [Web(served.url) for served in servers.servers]
        for web in webs:
            stack.push_async_callback(web.aclose)
        peer, holder, first = await joined(webs[0])
        _, second = await holder.resume(first)
        await servers.servers[0].kill()
        holder.site = webs[1]
        _, third = await holder.resume(second)  # it was on disk, not confirmed
        _, lost = await holder.resume(second)  # the answer with the third was lost after all
        assert lost != third
        session, fourth = await holder.resume(second)  # the one before it did not get there either
        assert session == peer.session
        await holder.confirm(fourth)
        await holder.confirm(fourth)
        [(kept,)] = servers.rows("SELECT value FROM note WHERE name LIKE 'chain/%'")
        assert isinstance(kept, bytes)
        assert json.loads(kept)[-1] == "", "no secret waits to be confirmed"
        assert (await peer.through(webs[1]).reattach()).session == peer.session
        assert await holder.is_rejected("resume", third)
        assert servers.rows("SELECT count(*) FROM note WHERE name LIKE 'chain/%'") == [(0,)]
