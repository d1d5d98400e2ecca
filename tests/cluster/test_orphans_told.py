"""A client is told of the calls that it lost, in whatever process they ran and whether or not that lives (R5)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure._core.ids import SessionId
from perdure._core.losses import ORPHAN
from perdure.sessions import orphans
from tests.cluster.conftest import Node, Pair, Start
from tests.support.clients.wire_client import Message, Peer, Web, Wire, progress_of, text_of
from tests.support.processes.cluster import cluster
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

UNKNOWN, CANCELLED = -31001, -32800


@pytest.fixture(autouse=True)
def little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "SLACK", 0.8)


@pytest.fixture
async def pair(start: Start) -> Pair:
    """Two nodes whose clients are asked to come back soon: so they are not waited for long."""
    return await start(retry=0.1)


def told(message: Message) -> tuple[str, str]:
    """The call of which a client is told, and how it is."""
    assert message["method"] == ORPHAN, message
    return message["params"]["call"], message["params"]["state"]


async def lose(node: Node, wire: Wire, peer: Peer) -> None:
    await wire.drop()
    await until(lambda: _lost(node, peer))


async def _lost(node: Node, peer: Peer) -> bool:
    return len(await node.site.store.streams(SessionId(peer.session), only_unread=True)) == 1


async def test_a_call_on_another_node_than_the_clients_is_told_and_cancelled(pair: Pair) -> None:
    """R5, A32: it runs in B; the client begins again at A, hears of it there, and cancels it there."""
    at_a, at_b = await pair.join()
    call = await at_b.call("count", id=7, n=3, gate="g", pauses=[1, 2, 3], token=1)
    await call.message()
    await lose(pair.b, call, at_a)
    standalone = await (again := await at_a.reattach()).get()
    running = await standalone.message()
    assert told(running) == ("1:7", "running")
    pair.b.shop.open("g/1")
    assert progress_of([await standalone.message()]) == [2]
    await again.cancel("1:7")
    ended = await standalone.message()
    assert told(ended) == ("1:7", "ended")
    [answer] = await (await again.get(ended["params"]["position"])).rest()
    assert answer["error"]["code"] == CANCELLED


async def test_a_client_that_kept_one_position_gets_what_a_call_on_another_node_says(pair: Pair) -> None:
    """R5: no handshake; the standalone stream is resumed at A, the call runs in B."""
    at_a, at_b = await pair.join()
    before = await at_a.get()
    start = await before.event()
    call = await at_b.call("count", id=7, n=3, gate="g", pauses=[1, 2, 3], token=1)
    await call.message()
    await before.drop()
    await lose(pair.b, call, at_a)
    standalone = await at_a.get(start.id)
    assert told(await standalone.message()) == ("1:7", "running")
    for number in (1, 2):
        pair.b.shop.open(f"g/{number}")
    assert progress_of(await standalone.messages(2)) == [2, 3]
    pair.b.shop.open("g/3")
    assert told(await standalone.message()) == ("1:7", "ended")


async def test_a_call_that_ended_at_another_node_is_told_once(pair: Pair) -> None:
    """R5: B wrote it and tells of it, when A has given the client the time to resume it."""
    at_a, at_b = await pair.join()
    call = await at_b.call("count", id=7, n=1, gate="g", pauses=[1], token=1)
    await call.message()
    await lose(pair.b, call, at_a)
    pair.b.shop.open("g/1")
    await until(lambda: pair.b.shop.seen)
    standalone = await at_a.get()
    ended = await standalone.message()
    assert told(ended) == ("1:7", "ended")
    assert not await pair.a.site.store.streams(SessionId(at_a.session), only_unread=True)
    [answer] = await (await at_a.get(ended["params"]["position"])).rest()
    assert text_of(answer) == "counted to 1"


async def test_a_call_at_another_node_whose_connection_died_is_told_to_the_client_that_still_reads(pair: Pair) -> None:
    """R5, promise 4: the standalone stream is read at A all the time."""
    at_a, at_b = await pair.join()
    early = await at_b.call("wait", id=6, gate="early")
    await early.event()
    await lose(pair.b, early, at_a)
    standalone = await at_a.get()
    assert told(await standalone.message()) == ("1:6", "running")  # the time since the GET has passed
    pair.b.shop.open("early")
    assert told(await standalone.message()) == ("1:6", "ended")
    call = await at_b.call("count", id=7, n=2, gate="g", pauses=[1, 2], token=1)
    await call.message()
    await lose(pair.b, call, at_a)
    assert told(await standalone.message()) == ("1:7", "running")
    pair.b.shop.open("g/1")
    assert progress_of([await standalone.message()]) == [2]
    pair.b.shop.open("g/2")
    assert told(await standalone.message()) == ("1:7", "ended")


async def test_a_question_of_a_call_at_another_node_is_asked_again(pair: Pair) -> None:
    """R5: the client comes back to A by GET alone, and has forgotten what B's call asked it."""
    at_a, at_b = await pair.join()
    pair.b.shop.open("g")
    call = await at_b.call("quiz", gate="g", question="who?", id=7)
    asked = (await call.messages(2))[-1]
    await lose(pair.b, call, at_a)
    standalone = await at_a.get()
    orphan, cancelled, again = await standalone.messages(3)
    assert told(orphan) == ("1:7", "running")
    assert (cancelled["params"]["requestId"], again["params"]) == (asked["id"], asked["params"])
    await at_a.answer(again, {"action": "accept", "content": {"answer": "me"}})
    assert text_of((await (await at_a.get(call.last_id)).rest())[-1]) == "me"


async def test_a_request_takes_the_id_of_an_orphan_of_another_node(pair: Pair) -> None:
    """A32: a cancellation by that id means the newer one, from whichever node it comes."""
    at_a, at_b = await pair.join()
    call = await at_b.call("count", id=0, n=2, gate="g", pauses=[1, 2], token=0)
    await call.message()
    await lose(pair.b, call, at_a)
    standalone = await at_a.get()
    await standalone.event()
    new = await at_a.call("wait", id=0, gate="new")
    await new.event()
    assert told(await standalone.message()) == ("1:0", "running")
    pair.b.shop.open("g/1")
    assert (await standalone.message())["params"]["progressToken"] == "1:0"
    await at_b.cancel(0)
    assert (await new.rest())[-1]["error"]["code"] == CANCELLED
    pair.b.shop.open("g/2")
    assert told(await standalone.message()) == ("1:0", "ended")


async def test_the_id_of_a_call_that_is_read_at_another_node_is_refused(pair: Pair) -> None:
    at_a, at_b = await pair.join()
    call = await at_b.call("count", id=0, n=1, gate="g", pauses=[1], token=0)
    await call.message()
    await lose(pair.b, call, at_a)
    standalone, resumed = await at_a.get(), await at_b.get(call.last_id)
    for wire in (standalone, resumed):
        await wire.event()
    assert (await at_a.send(at_a.tool("count", id=0, n=1))).status_code == 400
    pair.b.shop.open("g/1")


# Over a crash


async def test_calls_of_a_process_that_was_killed_are_told_by_the_next(tmp_path: Path) -> None:
    """R5, promises 3 and 4. A call that may not run again is told as ended to a client that begins again. A call that
    runs again is told to a client that sends the position of the standalone stream alone; the rest comes there. A call
    that had ended unread is told: that no reader came to its end is in the store."""
    gate, path = tmp_path / "gate", tmp_path / "log.db"
    async with cluster(path, "--retry", "0.1") as servers, AsyncExitStack() as stack:
        stack.push_async_callback((web := Web(servers.server.url)).aclose)
        begins_again, kept_one, unread = await web.join(), await web.join(), await web.join()
        standalone = await kept_one.get()
        start = await standalone.event()
        read = [await begin(begins_again, "pay", gate, n=3), await begin(kept_one, "count", gate, n=3)]
        await (await begin(unread, "count", tmp_path / "own", n=2)).drop()
        await until(lambda: servers.rows("SELECT unread FROM stream WHERE unread = 1") == [(1,)])
        open_gate(tmp_path / "own.1")
        await until(lambda: servers.rows("SELECT sealed FROM stream WHERE unread = 1") == [(1,)])
        await servers.server.kill()
        for wire in (standalone, *read):
            await wire.drop()
        await servers.start()
        stack.push_async_callback((after := Web(servers.server.url)).aclose)

        again = await begins_again.reattach(after)
        first, second, third = (
            await again.get(),
            await kept_one.through(after).get(start.id),
            await unread.through(after).get(),
        )
        ended = await first.message()
        assert told(ended) == ("1:7", "ended")
        rest = await (await again.get(ended["params"]["position"])).rest()
        assert rest[-1]["error"]["code"] == UNKNOWN

        assert told(await second.message()) == ("1:7", "running")
        open_gate(f"{gate}.1")
        assert progress_of(await second.messages(2)) == [2, 3]
        assert told(await second.message()) == ("1:7", "ended")

        ended = await third.message()
        assert told(ended) == ("1:7", "ended")
        assert (ended["params"]["from"], ended["params"]["to"]) == (2, 3)


async def begin(peer: Peer, tool: str, gate: Path, *, n: int) -> Wire:
    """A call whose client has seen one number."""
    call = await peer.call(tool, id=7, n=n, gate=str(gate), pauses=[1], token=1)
    assert progress_of([await call.message()]) == [1]
    return call
