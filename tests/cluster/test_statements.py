"""What nodes ask of a PostgreSQL server: a round trip is what a request waits for, so none may come back unnoticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.cluster.node import LONGEST_PAUSE, ROUND
from perdure.store.postgres.store import PostgresStore
from tests.cluster.conftest import Pair, Start
from tests.cluster.statement_counter import Statements, counting
from tests.support.clients.listeners import listening
from tests.support.clients.wire_client import text_of
from tests.support.servers.in_process import until
from tests.support.stores.dead_node import life_of
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import BUSY_SECONDS

pytestmark = pytest.mark.anyio

ROUNDS = {"overview", "beat"}
"""What a node asks again and again."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Two nodes, and what each of them asks."""

    pair: Pair
    a: Statements
    b: Statements


@pytest.fixture
async def counted(tmp_path: Path) -> AsyncIterator[Counted]:
    url = store_url()
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(counting(url)) for _ in range(2)]
        stores = iter([PostgresStore(way, timeout=BUSY_SECONDS) for way, _ in ways])
        pair = await Start(stack, tmp_path, lambda _: next(stores))()
        yield Counted(pair=pair, a=ways[0][1], b=ways[1][1])


def besides_rounds(seen: Counter[str]) -> dict[str, int]:
    """The queries that were asked for a request. In a round that falls on a running call, a node looks at its stream as
    well; and the driver has questions of its own on a connection that is new."""
    rounds = seen["overview"]
    extra = {"streams_by_id": rounds, "read_events": rounds}
    asked = {name: n for name, n in seen.items() if name.isidentifier() and name not in ROUNDS}
    return {name: n for name, n in asked.items() if n > extra.get(name, 0)}


async def test_a_call_is_two_commits_and_nothing_else(counted: Counted) -> None:
    peer, _ = await counted.pair.join()
    await peer.result("count", n=1)
    counted.a.take()
    for n in range(5):
        assert await peer.result("count", n=n) == f"counted to {n}"
    seen = besides_rounds(counted.a.take())
    # The events of a call are committed before its answer, or together with it.
    assert seen.keys() == {"commit"}
    assert 10 <= seen["commit"] <= 15


async def test_a_resume_is_one_read_at_the_node_that_wrote_it_and_at_any_other(counted: Counted) -> None:
    """The session's record, the stream and its events come in one answer."""
    at_a, at_b = await counted.pair.join()
    wire = await at_a.call("count", n=3, token=1)
    await wire.event()
    position = wire.last_id
    assert len(await wire.rest()) == 4
    for peer, statements in ((at_a, counted.a), (at_b, counted.b)):
        for _ in range(2):  # connections are made, and the session is loaded, with the first
            statements.take()
            assert text_of((await (await peer.get(position)).rest())[-1]) == "counted to 3"
        assert besides_rounds(statements.take()) == {"follow_streams": 1}


async def test_the_first_request_at_a_node_loads_the_session_with_two_reads(counted: Counted) -> None:
    """Its record with its home; and what is retained of it."""
    await (await counted.pair.join())[1].result("count", n=0)  # so that connections are there
    peer, at_b = await counted.pair.join()
    counted.b.take()
    assert await at_b.result("count", n=0) == "counted to 0"
    seen = dict(besides_rounds(counted.b.take()))
    # Where the client's `initialized` was written in between, the call is refused once, and the record read again.
    late = seen.pop("session_by_id", 0)
    assert late <= 1
    # What came to this node before, such as mail about the first session, may be put away meanwhile.
    assert seen.pop("commit") in (2 + late, 3 + late)
    assert seen == {"load_session": 1, "kept_of_session": 1}
    assert await peer.result("count", n=0) == "counted to 0"


async def test_an_idle_node_asks_twice_a_second(counted: Counted) -> None:
    """It looks round and it beats. Both together, however many sessions it has."""
    assert 1 / ROUND + 1 / LONGEST_PAUSE <= 2
    for _ in range(3):
        await counted.pair.join()
    counted.a.take()
    await until(lambda: counted.a.seen["overview"] >= 2)  # what was begun with the handshakes is written by then
    counted.a.take()
    await until(lambda: counted.a.seen["overview"] >= 4)
    seen = counted.a.take()
    assert besides_rounds(seen) == {}
    assert seen["beat"] <= 2


async def test_a_change_costs_the_node_of_a_listener_one_read_and_a_rest_none(counted: Counted) -> None:
    """A change is mail, which a hint brings; without a listener a node asks nothing more than before there was any."""
    a, b = counted.pair.a.site, counted.pair.b.site
    async with listening(b.port, "tools") as listener:
        listens = life_of(a).listening
        assert listens is not None
        counted.b.take()
        for _ in range(12):
            listens.heard("notifications/tools/list_changed", None)
            await listener.until_told("tools")
            listener.forget()
        seen = counted.b.take()
        assert seen["read_mail"] <= 2 * 13 + seen["overview"]  # each once, and one that finds no more
        assert seen["overview"] < 10  # hints bring them, and no round
    await until(lambda: len(life_of(b).listening or ()) == 0)

    async def has_only_rounds() -> bool:
        """For two rounds: what was begun with the listener is over then."""
        counted.b.take()
        await until(lambda: counted.b.seen["overview"] >= 2)
        return besides_rounds(counted.b.take()) == {}

    await until(has_only_rounds)
