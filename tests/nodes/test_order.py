"""What one tool says on the standalone stream arrives in its order, once, however the session's home moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest

from perdure._core.ids import SessionId
from tests.nodes.conftest import Pair, Start
from tests.support.site import until
from tests.support.wire import Peer, notices_of
from tests.support.workshop import Workshop

pytestmark = pytest.mark.anyio

EACH = 10_000
"""The first numbers of two tools lie so far apart: a number tells its tool."""


def subscribing() -> Workshop:
    return Workshop(subscribes=True)


async def log_of(pair: Pair, peer: Peer) -> list[int]:
    """The notices on the standalone stream, as the store has them."""
    store = pair.a.site.store
    record = await store.session(SessionId(peer.session))
    assert record is not None
    found: list[int] = []
    after = 0
    while events := await store.read(record.standalone, after=after, limit=1_000):
        found += notices_of(json.loads(event.payload) for event in events)
        after = events[-1].seq
    return found


def by_tool(numbers: Iterable[int]) -> dict[int, list[int]]:
    tools: dict[int, list[int]] = {}
    for number in numbers:
        tools.setdefault(number // EACH, []).append(number % EACH)
    return tools


async def subscribe(peer: Peer, number: int) -> None:
    """Whoever is told to subscribe becomes the home."""
    wire = await peer.post(peer.request("resources/subscribe", {"uri": f"x://{number}"}))
    await wire.rest()


async def test_a_home_that_moves_while_tools_speak_changes_nothing_in_their_order(start: Start) -> None:
    """Promise 2: no crash is needed for a home to move."""
    pair = await start(subscribing, max_stream_events=100_000)
    peers = await pair.join()
    tools, each = 4, 400
    calls = [
        asyncio.create_task(peers[tool % 2].result("announce", n=each, start=tool * EACH + 1)) for tool in range(tools)
    ]
    moves = 0
    while not all(call.done() for call in calls):
        await subscribe(peers[moves % 2], moves % 10)
        moves += 1
    await asyncio.gather(*calls)
    assert moves > 1

    async def said() -> bool:
        return len(await log_of(pair, peers[0])) >= tools * each

    await until(said)
    assert by_tool(await log_of(pair, peers[0])) == {tool: list(range(1, each + 1)) for tool in range(tools)}
