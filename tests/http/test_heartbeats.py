"""A client that gave a progress token hears of its silent call, in both eras, and the log knows nothing of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from mcp.server.mcpserver import Context, MCPServer

from perdure.store import MemoryStore
from perdure.store.interface import Store
from perdure.store.postgres.store import PostgresStore
from perdure.store.sqlite.store import SqliteStore
from tests.support.clients.modern_peer import TAKES_TASKS, CallPeer
from tests.support.clients.wire_client import Message, Wire, progress_of, text_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import BUSY_SECONDS

pytestmark = pytest.mark.anyio

BEAT = 0.1


def new_stores(kind: str, path: Path) -> Callable[[], Store]:
    """Opens one store again and again, as each node does."""
    if kind == "sqlite":
        return lambda: SqliteStore(str(path / "log.db"))
    url = store_url()
    return lambda: PostgresStore(url, timeout=BUSY_SECONDS, process=lambda: None)


async def beats(wire: Wire, count: int) -> list[Message]:
    """The params of the next messages, which are all beats: none has a position."""
    found: list[Message] = []
    while len(found) < count:
        before = wire.last_id if wire.seen else ""
        message = await wire.message()
        assert (message["method"], wire.last_id) == ("notifications/progress", before)
        found.append(message["params"])
    return found


def are_rising(params: list[Message]) -> bool:
    values = [each["progress"] for each in params]
    return all(lower < higher for lower, higher in itertools.pairwise(values))


def talker(gates: ToolServer) -> MCPServer:
    server = MCPServer("talker", log_level="WARNING")

    @server.tool()
    async def talk(values: list[float], gate: str, ctx: Context, notes: int = 0) -> str:
        """Before each value, wait at the gate, and log notes."""
        for place, value in enumerate(values):
            await gates.gates[f"{gate}/{place}"].wait()
            for number in range(notes):
                await gates.log(f"note {number}", ctx)
            await ctx.report_progress(value, 10, f"value {place}")
        await gates.gates[gate].wait()
        return "talked"

    return server


async def test_a_silent_call_with_a_token_has_beats_and_one_without_has_none(shop: ToolServer) -> None:
    async with serve(shop.server, heartbeat=BEAT, keepalive_interval=0.2) as site:
        peer = await site.join()
        silent, heard = await peer.call("wait", gate="g"), await peer.call("wait", gate="g", token="t")
        await heard.event()  # the priming event
        said = await beats(heard, 3)
        assert are_rising(said)
        assert {each["progressToken"] for each in said} == {"t"}
        assert said[0]["message"] == "Still running (0 s)"
        await heard.comment("keep-alive")  # comments come as ever
        await silent.comment("keep-alive")
        shop.open("g")
        [answer] = await silent.rest()
        *_, last = await heard.rest()
        assert text_of(answer) == text_of(last) == "went through g"
        assert [event.data for event in silent.seen if "progress" in event.data] == []


async def test_beats_are_switched_off_by_0(shop: ToolServer) -> None:
    async with serve(shop.server, heartbeat=0.0, keepalive_interval=0.1) as site:
        peer = await site.join()
        call = await peer.call("wait", gate="g", token=1)
        await call.comment("keep-alive")
        await call.comment("keep-alive\n\n: keep-alive")
        shop.open("g")
        [answer] = await call.rest()
        assert text_of(answer) == "went through g"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_values_rise_over_a_resume_and_at_a_second_node_and_are_not_in_the_log(
    shop: ToolServer, tmp_path: Path, kind: str
) -> None:
    opened = new_stores(kind, tmp_path)
    async with AsyncExitStack() as stack:
        shops = (shop, ToolServer())
        sites = [await stack.enter_async_context(serve(shop.server, store=opened(), heartbeat=BEAT)) for shop in shops]
        peer = await sites[0].join()
        call = await peer.call("count", n=3, gate="g", pauses=[2], token=7)
        primed = await call.event()
        said = [(await call.message())["params"] for _ in range(2)] + await beats(call, 2)
        await call.drop()
        await until(lambda: all(len(site.app.other_nodes()) == 1 for site in sites))
        for site in (sites[1], sites[0]):
            resumed = await peer.through(site).get(call.last_id)
            await resumed.event()
            said += await beats(resumed, 2)
            await resumed.drop()
        assert are_rising(said)
        assert all(each["total"] == 3 and each["progressToken"] == 7 for each in said)
        resumed = await peer.get(call.last_id)
        shop.open("g/2")
        *_, third, answer = await resumed.rest()
        assert (third["params"]["progress"], text_of(answer)) == (3, "counted to 3")
        replayed = await peer.get(primed.id)
        assert progress_of(await replayed.rest()) == [1, 2, 3]


async def test_what_a_tool_says_behind_a_beat_arrives_with_its_text_and_a_higher_value(shop: ToolServer) -> None:
    """A first 0, the same value again, and a replay of both says the same."""
    async with serve(talker(shop), heartbeat=BEAT) as site:
        peer = await site.join()
        call = await peer.call("talk", values=[0, 0, 5, 5], gate="g", token=1)
        primed = await call.event()
        said, own = [], []
        for place in range(4):
            said += await beats(call, 1)
            shop.open(f"g/{place}")
            while (message := await call.message())["params"].get("message") != f"value {place}":
                said.append(message["params"])
            said.append(message["params"])
            own.append(message["params"])
        assert are_rising(said)
        assert [round(each["progress"], 3) for each in own] == [0, 0, 5, 5]
        assert own[2]["progress"] == 5
        assert all(each["total"] == 10 for each in own)
        replayed = await peer.get(primed.id)
        again = [each["params"] for each in await replayed.messages(4)]
        shop.open("g")
        assert again == own
        assert text_of((await replayed.rest())[-1]) == "talked"


async def test_beats_never_fall_whatever_the_tool_says(shop: ToolServer) -> None:
    """It falls back to 5, and says that again behind a silence that a log message has ended."""
    async with serve(talker(shop), heartbeat=BEAT) as site:
        peer = await site.join()
        call = await peer.call("talk", values=[10, 5, 5, 4], gate="g", notes=20, token=1)
        primed = await call.event()
        shop.open("g/0")
        shop.open("g/1")
        own: list[Message] = []

        async def heard(of: Wire, last: str) -> list[Message]:
            said: list[Message] = []
            while not said or said[-1].get("message") != last:
                if (message := await of.message())["method"] == "notifications/progress":
                    said.append(message["params"])
                    own.extend(said[-1:] if of.seen[-1].id else [])
            return said

        said = [(await heard(call, "value 1"))[0], *await beats(call, 2)]
        shop.open("g/2")
        said += [*await heard(call, "value 2"), *await beats(call, 2)]
        shop.open("g/3")
        said += await heard(call, "value 3")
        assert are_rising(said)
        assert [round(each["progress"], 3) for each in own] == [10, 5, 10, 10]
        before, own = own, []
        await heard(await peer.get(primed.id), "value 3")
        assert own == before
        shop.open("g")


async def test_no_reader_is_ended_in_an_outage_because_of_a_beat(shop: ToolServer) -> None:
    """Promise 7: live traffic goes on from memory, which no longer has what the tool said before."""
    store = FaultyStore(MemoryStore())
    async with serve(
        shop.server, store=store, heartbeat=BEAT, on_store_failure="hold", complaint="the store fails"
    ) as (site):
        peer = await site.join()
        call = await peer.call("count", n=3, gate="g", pauses=[1, 2], token=7)
        await call.event()
        assert (await call.message())["params"]["progress"] == 1
        store.writes = store.reads = Fault.RAISES
        for place in (1, 2):
            await asyncio.sleep(3 * BEAT)
            shop.open(f"g/{place}")
            assert (await call.message())["params"]["progress"] == place + 1
        store.works()
        assert text_of((await call.rest())[-1]) == "counted to 3"


async def test_a_call_of_2026_07_28_has_beats_and_so_has_one_that_joined_it(shop: ToolServer) -> None:
    async with serve(shop.server, heartbeat=BEAT, task_after=3_600.0) as site:
        caller = CallPeer(port=site.port, capabilities=TAKES_TASKS)
        token = {"_meta": {"progressToken": "t"}}
        async with (
            await caller.begin_call("wait", {"gate": "g"}, key="k", params=token) as first,
            await caller.begin_call("wait", {"gate": "g"}, key="k", params=token) as joined,
            await caller.begin_call("wait", {"gate": "g"}) as silent,
        ):
            for exchange in (first, joined):
                said = [message["params"] for message in await exchange.until_messages(3)]
                assert are_rising(said)
                assert {each["progressToken"] for each in said} == {"t"}
            shop.open("g")
            answers = [await exchange.answer() for exchange in (first, joined, silent)]
        assert [b"went through g" in answer.body for answer in answers] == [True] * 3
        assert b"notifications/progress" not in answers[2].body
