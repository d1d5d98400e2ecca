"""Any node serves any session; a call that runs in one is followed live through the other (promise 2)."""

from __future__ import annotations

import asyncio

import pytest

from perdure._core.ids import SessionId
from tests.cluster.conftest import Pair, Start
from tests.support.clients.wire_client import Ended, progress_of, text_of
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


async def test_a_session_opened_at_one_node_is_served_by_the_other(pair: Pair) -> None:
    """H1, H5: no initialize, no 404, no "not initialized"."""
    at_a, at_b = await pair.join()
    assert await at_b.result("count", n=3) == "counted to 3"
    assert await at_a.result("count", n=4) == "counted to 4"
    assert (pair.a.shop.seen, pair.b.shop.seen) == (["counted 4"], ["counted 3"])


async def test_first_requests_at_once_load_the_session_once(pair: Pair) -> None:
    """H4"""
    _, at_b = await pair.join()
    results = await asyncio.gather(*(at_b.result("count", n=n) for n in range(20)))
    assert results == [f"counted to {n}" for n in range(20)]
    assert pair.b.site.app.counters.sessions_loaded == 1


async def test_a_call_is_resumed_live_through_the_other_node(pair: Pair) -> None:
    """Promise 2: in order, none lost, none twice, whatever process the reader is attached to."""
    at_a, at_b = await pair.join()
    wire = await at_a.call("count", n=30, gate="g", pauses=[10, 20], token=1)
    first = await wire.messages(5)
    await wire.drop()
    resumed = await at_b.get(wire.last_id)
    more = await resumed.messages(5)
    pair.a.shop.open("g/10")
    more += await resumed.messages(10)
    pair.a.shop.open("g/20")
    more += await resumed.rest()
    assert progress_of(first + more) == list(range(1, 31))
    assert text_of(more[-1]) == "counted to 30"


async def test_the_newest_reader_wins_wherever_it_is(pair: Pair) -> None:
    """R4: a GET takes the stream over from a reader in another process that reads no more, and back."""
    at_a, at_b = await pair.join()
    wire = await at_a.call("count", n=4, gate="g", pauses=[1, 2, 3], token=1)
    await wire.message()
    second = await at_b.get(wire.last_id)
    with pytest.raises(Ended):
        await wire.message()
    pair.a.shop.open("g/1")
    await second.message()
    third = await at_a.get(second.last_id)
    with pytest.raises(Ended):
        await second.message()
    pair.a.shop.open("g/2")
    await third.message()
    fourth = await at_b.get(third.last_id)
    with pytest.raises(Ended):
        await third.message()
    pair.a.shop.open("g/3")
    rest = await fourth.rest()
    assert progress_of(rest) == [4]
    assert text_of(rest[-1]) == "counted to 4"


async def test_an_answer_to_an_ask_reaches_the_call_that_waits_elsewhere(pair: Pair) -> None:
    """P6"""
    at_a, at_b = await pair.join()
    wire = await at_a.call("ask", question="who?")
    ask = await wire.message()
    assert (await at_b.answer(ask, {"action": "accept", "content": {"answer": "me"}})).status_code == 202
    assert text_of((await wire.rest())[-1]) == "me"


async def test_a_cancellation_reaches_the_call_that_runs_elsewhere(pair: Pair) -> None:
    at_a, at_b = await pair.join()
    wire = await at_a.call("wait", id=7, gate="never")
    await until(lambda: pair.a.shop.seen)
    assert (await at_b.cancel(7)).status_code == 202
    assert (await wire.rest())[-1]["error"]["code"] == -32800
    await until(lambda: pair.a.shop.seen == ["waiting at never", "cancelled at never"])


async def test_an_id_in_use_at_one_node_is_refused_at_the_other(pair: Pair) -> None:
    at_a, at_b = await pair.join()
    await at_a.call("wait", id=8, gate="g")
    refused = await at_b.send(at_b.tool("count", n=1, id="8"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, -32600)


async def test_what_a_call_sends_to_the_standalone_stream_reaches_it_from_any_node(pair: Pair) -> None:
    """The home appends for the others: each notice once, in order."""
    at_a, at_b = await pair.join()
    standalone = await at_b.get()
    assert await at_a.result("announce", n=3) == "announced 3"
    assert await at_b.result("announce", n=3, start=4) == "announced 3"
    notices = [m["params"]["uri"] for m in await standalone.messages(6)]
    assert sorted(notices) == [f"notice://{n}" for n in range(1, 7)]
    assert notices.index("notice://4") < notices.index("notice://5") < notices.index("notice://6")


async def test_a_session_that_is_deleted_at_one_node_is_gone_at_the_other(pair: Pair) -> None:
    """H2: at once, and its calls and readers with it."""
    at_a, at_b = await pair.join()
    assert await at_b.result("count", n=1) == "counted to 1"
    standalone = await at_b.get()
    running = await at_b.call("wait", gate="never")
    await until(lambda: "waiting at never" in pair.b.shop.seen)
    assert (await at_a.delete()).status_code == 200
    assert (await at_b.send(PING)).status_code == 404
    assert (await at_b.try_get()).status_code == 404
    assert (await at_b.delete()).status_code == 404
    await standalone.rest()
    await running.rest()
    await until(lambda: "cancelled at never" in pair.b.shop.seen)


async def test_a_slow_reader_elsewhere_makes_its_call_wait(start: Start) -> None:
    """Slow readers: the call that feeds it waits, and nothing is trimmed under it."""
    pair = await start(max_stream_events=50, small_buffers=True)
    at_a, at_b = await pair.join()
    flood = await at_a.call("flood", n=2000, size=2000, gate="g", token=2)
    await flood.message()
    resumed = await at_b.get(flood.last_id)
    with pytest.raises(Ended):
        await flood.message()  # overtaken: from now on the writer knows of the reader elsewhere
    pair.a.shop.open("g")
    await resumed.message()
    await until(lambda: _stands_still(pair))
    assert pair.a.shop.sent < 2000
    messages = await resumed.rest()
    assert progress_of(messages) == list(range(3, 2001))
    assert text_of(messages[-1]) == "flooded 2000"


async def _stands_still(pair: Pair) -> bool:
    """The tool has sent nothing more for a while."""
    before = pair.a.shop.sent
    await asyncio.sleep(0.3)
    return pair.a.shop.sent == before


async def test_a_session_moves_when_its_home_rests(start: Start) -> None:
    """R8: the home goes with the grace; whoever is used next becomes it, and nothing is lost."""
    pair = await start(session_grace=0.3)
    at_a, at_b = await pair.join()
    await until(lambda: pair.a.site.app.session_info(at_a.session) is None)
    standalone = await at_b.get()
    assert await at_b.result("announce", n=2) == "announced 2"
    assert [m["params"]["uri"] for m in await standalone.messages(2)] == ["notice://1", "notice://2"]
    record = await pair.b.site.store.session(SessionId(at_a.session))
    assert record is not None
    assert record.incarnation == 1
