"""A store that lost its tail leaves no call without its answer, and tells what is gone (promises 2, 3 and 4).

The store is put back to an earlier state while a server uses it, which is what a failover to a replica that lagged
looks like, or a database server that was killed and had not waited for its disk.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure._core.codes import OUTCOME_UNKNOWN
from perdure._core.ids import SessionId, StreamId, parse_position
from perdure._core.states import CallState
from perdure.store.interface import Store, stream_by_id
from tests.support.clients.wire_client import Peer, Wire, gaps_of, notices_of, progress_of, text_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import life_of
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.lost_tail import LOST, Losing

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "sqlite"])
def losing(request: pytest.FixtureRequest, tmp_path: Path) -> Losing:
    return Losing(request.param, tmp_path)


def stream_of(wire: Wire) -> StreamId:
    position = parse_position(wire.last_id)
    assert position is not None
    return position.stream


async def is_stored(store: Store, wire: Wire, last: int) -> bool:
    record = await stream_by_id(store, stream_of(wire))
    return record is not None and record.last == last


async def settled(store: Store, peer: Peer) -> bool:
    """Whether no call of a client's is left running in the store, and no stream open."""
    calls = await store.calls(SessionId(peer.session))
    return all(call.state not in (CallState.RUNNING, CallState.WAITING) for call in calls)


async def test_a_call_whose_events_were_lost_goes_on_and_gets_its_answer(losing: Losing) -> None:
    """Its reader has seen everything; a reader that resumes is told of the gap, and sees each number once."""
    shop, store = ToolServer(), losing.store
    async with serve(shop.server, store=store, complaint=LOST) as site:
        peer = await site.join()
        wire = await peer.call("count", n=20, gate="g", pauses=[5, 10], token=1)
        messages = await wire.messages(5)
        await until(lambda: is_stored(store, wire, 5))
        lose = losing.remember()
        shop.open("g/5")
        messages += await wire.messages(5)
        await until(lambda: is_stored(store, wire, 10))
        early = wire.seen[3].id
        lose()
        shop.open("g/10")
        messages += await wire.rest()
        assert progress_of(messages) == list(range(1, 21))
        assert text_of(messages[-1]) == "counted to 20"
        assert gaps_of(messages) == []
        again = await (await peer.get(early)).rest()
        seen = parse_position(early)
        assert seen is not None
        assert gaps_of(again) == [(6, 10)]
        assert progress_of(again) == [*range(seen.seq + 1, 6), *range(11, 21)]
        assert text_of(again[-1]) == "counted to 20"
        assert await settled(store, peer)


async def test_a_reader_that_was_away_is_told_what_was_lost(losing: Losing) -> None:
    """Also before the call has gone on: the log has not what its writer knows to be there."""
    shop, store = ToolServer(), losing.store
    async with serve(shop.server, store=store, complaint=LOST) as site:
        peer = await site.join()
        wire = await peer.call("count", n=20, gate="g", pauses=[5, 10], token=1)
        await wire.messages(5)
        await until(lambda: is_stored(store, wire, 5))
        lose = losing.remember()
        await wire.drop()
        shop.open("g/5")
        await until(lambda: is_stored(store, wire, 10))
        lose()
        resumed = await peer.get(wire.last_id)
        told = await resumed.messages(1)
        assert gaps_of(told) == [(6, 10)]
        shop.open("g/10")
        messages = await resumed.rest()
        assert progress_of(messages) == list(range(11, 21))
        assert text_of(messages[-1]) == "counted to 20"
        assert await settled(store, peer)


async def test_a_call_whose_stream_was_lost_altogether_is_opened_again(losing: Losing) -> None:
    """With its row in the ledger, and the end of that."""
    shop, store = ToolServer(), losing.store
    async with serve(shop.server, store=store, complaint=LOST) as site:
        peer = await site.join()
        lose = losing.remember()
        wire = await peer.call("count", n=9, gate="g", pauses=[3, 6], token=1, id=77)
        messages = await wire.messages(3)
        await until(lambda: is_stored(store, wire, 3))
        early = wire.seen[1].id
        lose()
        assert await stream_by_id(store, stream_of(wire)) is None
        shop.open("g/3")
        messages += await wire.messages(3)
        [row] = [call for call in await store.calls(SessionId(peer.session)) if call.request_id == 77]
        assert (row.method, row.state) == ("tools/call", CallState.RUNNING)
        shop.open("g/6")
        messages += await wire.rest()
        assert progress_of(messages) == list(range(1, 10))
        assert text_of(messages[-1]) == "counted to 9"
        [row] = [call for call in await store.calls(SessionId(peer.session)) if call.request_id == 77]
        assert row.state is CallState.ANSWERED
        again = await (await peer.get(early)).rest()
        first = parse_position(early)
        assert first is not None
        assert gaps_of(again) == [(first.seq + 1, 3)]
        assert progress_of(again) == list(range(4, 10))
        assert text_of(again[-1]) == "counted to 9"


async def test_what_was_held_while_the_store_was_away_is_written_behind_what_it_lost(losing: Losing) -> None:
    """An outage, as every failover begins with one: live traffic goes on, and nothing of it is lost or comes twice."""
    shop, store = ToolServer(), FaultyStore(losing.store)
    async with serve(shop.server, store=store, store_timeout=0.5, complaint=LOST) as site:
        peer = await site.join()
        wire = await peer.call("count", n=60, gate="g", pauses=[5, 10, 40], token=1)
        messages = await wire.messages(5)
        await until(lambda: is_stored(store, wire, 5))
        early, lose = wire.last_id, losing.remember()
        shop.open("g/5")
        messages += await wire.messages(5)
        await until(lambda: is_stored(store, wire, 10))
        store.writes = Fault.RAISES
        shop.open("g/10")
        messages += await wire.messages(30)
        assert not await is_stored(store, wire, 40)
        lose()
        store.works()
        await until(lambda: is_stored(store, wire, 40))
        shop.open("g/40")
        messages += await wire.rest()
        assert progress_of(messages) == list(range(1, 61))
        again = await (await peer.get(early)).rest()
        assert gaps_of(again) == [(6, 10)]
        assert progress_of(again) == list(range(11, 61))
        assert text_of(again[-1]) == text_of(messages[-1]) == "counted to 60"
        assert await settled(store, peer)


async def test_a_call_whose_answer_was_lost_is_answered_as_unknown(losing: Losing) -> None:
    """Nothing runs here that could answer it: its node sees that, and does not run it again."""
    shop, store = ToolServer(), FaultyStore(losing.store)
    async with serve(shop.server, store=store, store_timeout=0.5, complaint=LOST) as site:
        peer = await site.join()
        wire = await peer.call("count", n=5, gate="g", pauses=[3], token=1, id=77)
        await wire.messages(3)
        await until(lambda: is_stored(store, wire, 3))
        early, lose = wire.last_id, losing.remember()
        shop.open("g/3")
        assert text_of((await wire.rest())[-1]) == "counted to 5"
        store.writes = Fault.RAISES
        other = await peer.result("count", n=1)  # so that the outage is noticed
        lose()
        store.works()
        assert other == "counted to 1"
        messages = await (await peer.get(early)).rest()
        assert [m["error"]["code"] for m in messages if m.get("id") == 77] == [OUTCOME_UNKNOWN]
        assert messages[-1]["error"]["data"]["reason"] == "the store lost its answer"
        assert shop.seen == ["counted 5", "counted 1"]
        await until(lambda: settled(store, peer))


async def test_of_two_calls_of_one_request_both_have_ended_although_the_first_end_was_lost(losing: Losing) -> None:
    shop, store = ToolServer(), losing.store
    async with serve(shop.server, store=store, complaint=LOST) as site:
        peer = await site.join("2025-03-26")
        lose = losing.remember()
        first, second = peer.tool("count", id=1, n=1), peer.tool("wait", id=2, gate="g")
        wire = await peer.post([first, second])
        assert (await wire.message())["id"] == 1
        await until(lambda: is_stored(store, wire, 1))
        lose()
        shop.open("g")
        assert [message["id"] for message in await wire.rest()] == [2]
        states = {call.request_id: call.state for call in await store.calls(SessionId(peer.session))}
        assert {states[1], states[2]} == {CallState.ANSWERED}


async def test_the_standalone_stream_goes_on_with_its_numbers(losing: Losing) -> None:
    shop, store = ToolServer(), losing.store
    async with serve(shop.server, store=store, complaint=LOST) as site:
        peer = await site.join()
        alone = await peer.get()
        await peer.result("announce", n=2)
        assert notices_of(await alone.messages(2)) == [1, 2]
        await until(lambda: is_stored(store, alone, 2))
        early, lose = alone.last_id, losing.remember()
        await peer.result("announce", n=3, start=3)
        assert notices_of(await alone.messages(3)) == [3, 4, 5]
        await until(lambda: is_stored(store, alone, 5))
        lose()
        await peer.result("announce", n=2, start=6)
        assert notices_of(await alone.messages(2)) == [6, 7]
        await alone.drop()
        again = await peer.get(early)
        told = await again.messages(3)
        assert (gaps_of(told), notices_of(told)) == ([(3, 5)], [6, 7])
        resumed = await peer.get(alone.last_id)
        await peer.result("announce", n=1, start=8)
        assert notices_of(await resumed.messages(1)) == [8], "nothing that was seen comes again"


async def test_a_session_at_rest_whose_end_was_lost_gives_no_number_twice(losing: Losing) -> None:
    """The home has let go of it, and the store has lost that and events before it: a generation begins."""
    shop, store = ToolServer(), losing.store
    async with serve(shop.server, store=store, complaint=LOST, session_grace=0.2) as site:
        peer = await site.join()
        alone = await peer.get()
        await peer.result("announce", n=2)
        assert notices_of(await alone.messages(2)) == [1, 2]
        await until(lambda: is_stored(store, alone, 2))
        lose = losing.remember()
        await peer.result("announce", n=3, start=3)
        assert notices_of(await alone.messages(3)) == [3, 4, 5]
        await alone.drop()
        await until(lambda: not site.app.session_ids())
        lose()
        await peer.result("announce", n=3, start=6)
        told = await (await peer.get(alone.last_id)).messages(4)
        assert (gaps_of(told), notices_of(told)) == ([(3, 5)], [6, 7, 8])


async def test_a_session_that_was_lost_is_not_there_and_its_call_ends(losing: Losing) -> None:
    """Its reader gets the answer from memory; from then on its client is told to begin again."""
    shop, store = ToolServer(), losing.store
    async with serve(shop.server, store=store, complaint=LOST) as site:
        lose = losing.remember()
        peer = await site.join()
        wire = await peer.call("count", n=6, gate="g", pauses=[3], token=1)
        messages = await wire.messages(3)
        await until(lambda: is_stored(store, wire, 3))
        lose()
        shop.open("g/3")
        messages += await wire.rest()
        assert progress_of(messages) == list(range(1, 7))
        assert text_of(messages[-1]) == "counted to 6"
        response = await peer.send(peer.tool("count", n=1))
        assert response.status_code == 404, json.dumps(response.text)


@pytest.mark.parametrize("away", [False, True])
async def test_a_call_whose_question_was_lost_asks_again(losing: Losing, away: bool) -> None:
    """It says nothing more before it has its answer, so nothing but a look tells it that the store has lost it."""
    shop, store = ToolServer(), FaultyStore(losing.store)
    async with serve(shop.server, store=store, store_timeout=0.5, complaint=LOST) as site:
        peer = await site.join()
        lose = losing.remember()
        wire = await peer.call("ask", question="Why?", id=77)
        asked = await wire.message()
        assert asked["method"] == "elicitation/create"
        await until(lambda: is_stored(store, wire, 1))
        if away:
            await wire.drop()
        store.writes = Fault.RAISES
        await peer.result("count", n=1)
        lose()
        store.works()
        reader = await peer.get(wire.seen[0].id) if away else wire
        while (again := await reader.message()).get("method") != "elicitation/create":
            pass
        assert again["id"] != asked["id"]
        [row] = await store.asks(SessionId(peer.session))
        assert row.id == again["id"], "another node would find it"
        await peer.answer(again, {"action": "accept", "content": {"answer": "Because"}})
        messages = await reader.rest()
        assert [message["id"] for message in messages if "result" in message] == [77]
        assert await settled(store, peer)


async def test_only_the_question_that_was_lost_is_asked_again_and_once(losing: Losing) -> None:
    """However many streams of its session the store has lost."""
    shop, store = ToolServer(), FaultyStore(losing.store)
    async with serve(shop.server, store=store, store_timeout=0.5, complaint=LOST) as site:
        peer = await site.join()
        kept = await peer.call("ask", question="Kept?", id=1)
        asked = await kept.message()
        await until(lambda: is_stored(store, kept, 1))
        lose = losing.remember()
        silent = [await peer.call("wait", gate="g", id=number) for number in (2, 3)]
        wire = await peer.call("ask", question="Lost?", id=4)
        first = await wire.message()
        await until(lambda: is_stored(store, wire, 1))
        store.writes = Fault.RAISES
        await peer.result("count", n=1)
        lose()
        store.works()
        cancelled, again = await wire.messages(2)
        assert (cancelled["params"]["requestId"], again["method"]) == (first["id"], "elicitation/create")
        assert "the question was lost" in cancelled["params"]["reason"]
        shop.open("g")
        for call in silent:
            assert [text_of(message) for message in await call.rest()] == ["went through g"]
        for reader, ask in ((kept, asked), (wire, again)):
            await peer.answer(ask, {"action": "accept", "content": {"answer": "Because"}})
            assert [text_of(message) for message in await reader.rest()] == ["Because"]


async def test_an_outage_without_a_loss_asks_nothing_again(losing: Losing) -> None:
    shop, store = ToolServer(), FaultyStore(losing.store)
    async with serve(shop.server, store=store, store_timeout=0.5, complaint=LOST) as site:
        peer = await site.join()
        wire = await peer.call("ask", question="Why?", id=77)
        asked = await wire.message()
        await until(lambda: is_stored(store, wire, 1))
        store.writes = Fault.RAISES
        await peer.result("count", n=1)
        store.works()
        journal = life_of(site).context.journal
        await until(lambda: not journal.is_degraded)
        await life_of(site).settler.go_round()
        await peer.answer(asked, {"action": "accept", "content": {"answer": "Because"}})
        assert [text_of(message) for message in await wire.rest()] == ["Because"]
