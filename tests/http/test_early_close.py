"""A tool closes its own connection, the client comes back for the rest (P7, A10, SEP-1699)."""

from __future__ import annotations

import pytest

from tests.support.clients.wire_client import SESSION_VERSIONS, Peer, notices_of, progress_of, text_of
from tests.support.servers.in_process import Site, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def test_what_was_sent_before_the_close_arrives_and_the_rest_is_resumed(shop: ToolServer, peer: Peer) -> None:
    wire = await peer.call("close", before=3, after=2, gate="g", token=1)
    assert progress_of(await wire.rest()) == [1, 2, 3]
    shop.open("g")
    messages = await (await peer.get(wire.last_id)).rest()
    assert progress_of(messages) == [4, 5]
    assert text_of(messages[-1]) == "came back"


async def test_closing_as_the_first_act_still_primes(shop: ToolServer, peer: Peer) -> None:
    """A10: only once an id has been sent; without it the client could never come back."""
    wire = await peer.call("close", before=0, after=1, gate="g", token=1)
    assert await wire.rest() == []
    [priming] = wire.seen
    assert (priming.data, priming.retry) == ("", 5000)
    shop.open("g")
    messages = await (await peer.get(priming.id)).rest()
    assert progress_of(messages) == [1]
    assert text_of(messages[-1]) == "came back"


async def test_the_answer_may_be_there_when_the_connection_closes(peer: Peer) -> None:
    """Whatever arrives before the end, nothing is lost and nothing comes twice."""
    wire = await peer.call("close", before=1, after=1, token=1)
    messages = await wire.rest()
    if "result" not in messages[-1]:
        messages += await (await peer.get(wire.last_id)).rest()
    assert progress_of(messages) == [1, 2]
    assert text_of(messages[-1]) == "came back"


async def test_closing_again_and_again(shop: ToolServer, peer: Peer) -> None:
    """Polling: closed, resumed; closing a stream that nobody reads does nothing."""
    wire = await peer.call("close", before=1, after=0, gate="g", token=1)
    await wire.rest()
    await until(lambda: shop.seen == ["closed"])
    again = await peer.get(wire.last_id)
    await again.event()
    shop.open("g")
    assert text_of((await again.rest())[-1]) == "came back"


@pytest.mark.parametrize("version", SESSION_VERSIONS[:-1])
async def test_older_revisions_are_never_closed_early(shop: ToolServer, site: Site, version: str) -> None:
    """A11."""
    peer = await site.join(version)
    wire = await peer.call("close", before=2, after=2, gate="g", token=1)
    await wire.messages(2)
    await until(lambda: shop.seen == ["closed"])
    shop.open("g")
    messages = await wire.rest()
    assert progress_of(messages) == [3, 4]
    assert text_of(messages[-1]) == "came back"


async def test_a_tool_can_close_the_standalone_connection(peer: Peer) -> None:
    """The stream stays: what follows is there for whoever comes back. Where there is none, nothing happens."""
    assert await peer.result("close_standalone") == "closed"
    wire = await peer.get()
    await peer.result("announce", n=2)
    assert await peer.result("close_standalone") == "closed"
    assert notices_of(await wire.rest()) == [1, 2]
    await peer.result("announce", n=1, start=3)
    again = await peer.get(wire.last_id)
    assert notices_of([await again.message()]) == [3]


async def test_a_standalone_connection_closed_before_any_event_was_primed(peer: Peer) -> None:
    wire = await peer.get()
    await peer.result("close_standalone")
    assert await wire.rest() == []
    [priming] = wire.seen
    assert priming.data == ""
    await peer.result("announce", n=1)
    assert notices_of([await (await peer.get(priming.id)).message()]) == [1]
