"""A client under a rule of `answer_within` is answered in time, and gets its result by a tool."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError

from perdure import connect
from perdure._core.envelope import KEY
from perdure._core.ids import NodeId, SessionId, StreamId, new_stream_id, parse_stream_id
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState
from perdure.errors import BadSetting
from perdure.settings import Settings
from perdure.store import MemoryStore
from perdure.store.interface import Store
from perdure.store.records import Followed
from tests.http.test_heartbeats import new_stores
from tests.support.clients.modern_peer import CallPeer, result_of
from tests.support.clients.wire_client import Message, Peer, Web, answer_of, text_of
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import Guests, ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import FAILS

pytestmark = pytest.mark.anyio

WAIT, CANCEL = "perdure_wait_for_result", "perdure_cancel_call"
RULE = ("*=1s",)
GATE_FILE_TOOLS = "tests.support.servers.gate_file_tools:server"


@pytest.fixture
async def early(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, answer_within=RULE) as site:
        yield site


def call_in(answer: Message) -> str:
    found: str = answer["result"]["_meta"]["dev.perdure/call"]["id"]
    return found


async def answered(peer: Peer, name: str, /, **arguments: Any) -> Message:
    return (await (await peer.call(name, **arguments)).rest())[-1]


async def test_a_call_that_takes_longer_is_answered_in_time_and_its_result_is_fetched(
    shop: ToolServer, early: Site
) -> None:
    peer = await early.join()
    call = await peer.call("wait", gate="g", id="mine")
    *_, first = await call.rest()
    found = call_in(first)
    assert (first["id"], "isError" in first["result"], "structuredContent" in first["result"]) == ("mine", False, False)
    assert re.match(
        rf'"wait" is still running after 1 s, and goes on. .* {WAIT} with {{"call": "{found}"}}', text_of(first)
    )
    again = await answered(peer, WAIT, call=found)
    assert "still running" in text_of(again)
    assert call_in(again) == found
    assert (await peer.try_get(call.last_id)).status_code == 405
    assert '"wait", begun' in text_of(await answered(peer, WAIT))
    waiting = await peer.call(WAIT, call=found)
    shop.open("g")
    *_, last = await waiting.rest()
    assert last["result"] == (await answered(peer, "wait", gate="g"))["result"]
    assert (await answered(peer, WAIT, call=found))["result"] == last["result"]


async def test_an_answer_within_the_time_is_the_tools_own(shop: ToolServer, early: Site) -> None:
    shop.open("g")
    async with serve(shop.server) as plain:
        answers = [await answered(await site.join(), "wait", gate="g", id=1) for site in (early, plain)]
    assert answers[0] == answers[1]


async def test_a_client_under_a_rule_sees_two_tools_more_and_no_output_schema(shop: ToolServer) -> None:
    async with serve(shop.server, answer_within=("other=1s", "WIRE=45s")) as ruled, serve(shop.server) as plain:
        lists = []
        for site in (ruled, plain):
            peer = await site.join()
            [listed] = await (await peer.post(peer.request("tools/list"))).rest()
            lists.append(listed["result"]["tools"])
    mine, theirs = lists
    assert [tool["name"] for tool in mine[-2:]] == [WAIT, CANCEL]
    assert "Waits up to 45 s" in mine[-2]["description"]
    assert any("outputSchema" in tool for tool in theirs)
    assert mine[:-2] == [{name: value for name, value in tool.items() if name != "outputSchema"} for tool in theirs]


async def test_a_server_that_lists_our_names_keeps_them(shop: ToolServer) -> None:
    @shop.server.tool(name=WAIT)
    async def own(call: str = "") -> str:
        return f"the server's own, {call}"

    async with serve(shop.server, answer_within=RULE) as site:
        peer = await site.join()
        assert text_of(await answered(peer, WAIT, call="x")) == "the server's own, x"
        first = await answered(peer, "wait", gate="g")
        assert f"call the tool {WAIT}_2 with" in text_of(first)
        shop.open("g")
        assert text_of(await answered(peer, f"{WAIT}_2", call=call_in(first))) == "went through g"
        [listed] = await (await peer.post(peer.request("tools/list"))).rest()
        assert [tool["name"] for tool in listed["result"]["tools"][-2:]] == [f"{WAIT}_2", CANCEL]


async def test_the_two_tools_stand_on_the_last_of_three_pages_once() -> None:
    """A name that stands on an earlier page is the server's."""

    async def list_tools(_: ServerRequestContext[Any], params: types.PaginatedRequestParams | None) -> Any:
        page = int((params.cursor if params else None) or 0)
        tool = types.Tool(name=("first", WAIT, "third")[page], input_schema={"type": "object"})
        return types.ListToolsResult(tools=[tool], next_cursor=str(page + 1) if page < 2 else None)

    async with serve(Server("pages", on_list_tools=list_tools), answer_within=RULE) as site:
        peer, names, cursor = await site.join(), list[list[str]](), Message()
        while not names or cursor:
            [page] = await (await peer.post(peer.request("tools/list", cursor))).rest()
            names.append([tool["name"] for tool in page["result"]["tools"]])
            cursor = {"cursor": found} if (found := page["result"].get("nextCursor")) else {}
    assert names == [["first"], [WAIT], ["third", f"{WAIT}_2", CANCEL]]


async def test_errors_and_cancellations_are_told_to_the_model(shop: ToolServer, early: Site) -> None:
    peer = await early.join()
    call = await peer.call("wait", gate="g", id="mine")
    *_, first = await call.rest()
    await peer.cancel("mine")  # its request has its answer: this does nothing
    assert "still running" in text_of(await answered(peer, WAIT, call=call_in(first)))
    assert text_of(await answered(peer, CANCEL, call=call_in(first))).startswith('"wait" is being cancelled')
    told = (await answered(peer, WAIT, call=call_in(first)))["result"]
    assert told["isError"] is True
    assert told["content"][0]["text"] == '"wait" was cancelled; it may have done a part of its work.'
    assert shop.seen == ["waiting at g", "cancelled at g"]
    assert "has ended already" in text_of(await answered(peer, CANCEL, call=call_in(first)))


async def test_the_wait_gives_any_result_unchanged_and_a_protocol_error_as_a_text() -> None:
    """Images, `structuredContent`, `_meta` and `isError` are the tool's own."""
    release = asyncio.Event()
    image = types.ImageContent(data="aGk=", mime_type="image/png")
    given = types.CallToolResult(
        content=[image], structured_content={"n": 2**60}, is_error=True, _meta={"shop/rest": [1, None]}
    )

    async def call_tool(_: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name != "quick":
            await release.wait()
        if params.name == "broken":
            raise MCPError(code=-32050, message="no flour")
        return given

    async with serve(Server("odd", on_call_tool=call_tool), answer_within=RULE) as site:
        peer = await site.join()
        first = [await answered(peer, name) for name in ("picture", "broken")]
        release.set()
        picture, broken = [(await answered(peer, WAIT, call=call_in(answer)))["result"] for answer in first]
        assert picture == (await answered(peer, "quick"))["result"]
        assert (broken["isError"], broken["content"][0]["text"]) == (True, '"broken" failed: no flour (code -32050).')


async def test_a_resume_before_the_early_answer_gets_it_and_the_end_and_its_call_is_no_orphan(
    shop: ToolServer, early: Site
) -> None:
    peer = await early.join()
    call = await peer.call("wait", gate="g", id="mine")
    await call.event()
    position = call.last_id
    *_, first = await call.rest()
    standalone = await peer.get()
    assert await (await peer.get(position)).rest() == [first]
    again = await peer.reattach()
    shop.open("g")
    assert text_of(await answered(again, WAIT, call=call_in(first))) == "went through g"
    await standalone.drop()
    listening = await again.get()
    await again.result("announce", n=1)
    assert (await listening.message())["method"] == "notifications/resources/updated"  # no word of an orphan before it


async def test_a_request_in_a_batch_is_never_answered_early(shop: ToolServer, early: Site) -> None:
    peer = await early.join("2025-03-26")
    wire = await peer.post([peer.tool("wait", gate="g", id=number) for number in (1, 2)])
    await until(lambda: len(shop.seen) == 2)
    await asyncio.sleep(1.1)  # a rule that applied would have answered
    shop.open("g")
    assert [text_of(answer) for answer in await wire.rest()] == ["went through g"] * 2


async def test_an_id_whose_result_is_no_longer_kept_is_an_unknown_one(shop: ToolServer, early: Site) -> None:
    peer = await early.join()
    first = await answered(peer, "wait", gate="g")
    shop.open("g")
    assert text_of(await answered(peer, WAIT, call=call_in(first))) == "went through g"
    await early.store.sweep(Cutoffs(events=math.inf, answers=math.inf))
    told = [await answered(peer, WAIT, id=1, call=call) for call in (call_in(first), "nothing")]
    assert told[0] == told[1]
    assert text_of(told[0]).startswith("There is no such call, or its result is no longer kept (24 h). Check what")


async def test_cancelling_a_wait_does_not_cancel_its_call(shop: ToolServer, early: Site) -> None:
    peer = await early.join()
    first = await answered(peer, "wait", gate="g")
    waiting = await peer.call(WAIT, call=call_in(first), id="waits")
    await peer.cancel("waits")
    assert (await waiting.rest())[-1]["error"]["code"] == -32800
    shop.open("g")
    assert text_of(await answered(peer, WAIT, call=call_in(first))) == "went through g"


async def test_a_call_behind_its_early_answer_has_the_time_of_tasks_when_its_server_stops(shop: ToolServer) -> None:
    """Its client can ask for it again. A call of a batch has no early answer, and ends at once."""
    async with serve(shop.server, answer_within=RULE, drain_timeout=0.0, task_drain=3_600.0) as site:
        peer, batching = await site.join(), await site.join("2025-03-26")
        first = await answered(peer, "wait", gate="g")
        batch = await batching.post([batching.tool("wait", gate="h")])
        await until(lambda: len(shop.seen) == 2)
        stopping = asyncio.create_task(site.app.drain())
        assert (await batch.rest())[-1]["error"]["code"] == -31001
        shop.open("g")
        await stopping
        [row] = await site.store.calls(SessionId(peer.session), stream=parse_stream_id(call_in(first)))
        assert row.state is CallState.ANSWERED


async def test_a_foreign_id_is_an_unknown_id_to_the_byte(shop: ToolServer) -> None:
    async with serve(shop.server, auth=Guests(), answer_within=RULE) as site:
        ann, bob = [await site.join(token=token) for token in ("ann-1", "bob-1")]
        first = await answered(ann, "wait", gate="g")
        for tool in (WAIT, CANCEL):
            given = (call_in(first), new_stream_id(lambda n: b"1" * n), "nothing", 5)
            told = [await answered(bob, tool, id=1, call=call) for call in given]
            assert told[0] == told[1] == told[2] == told[3]
            assert told[0]["result"]["isError"] is True
        shop.open("g")
        again = await site.join(token="ann-2")  # as a host that was restarted
        assert text_of(await answered(again, WAIT, call=call_in(first))) == "went through g"


async def test_a_question_that_is_open_is_asked_again_by_the_next_wait(shop: ToolServer, early: Site) -> None:
    peer = await early.join()
    call = await peer.call("ask", question="Why?")
    before = await call.message()
    *_, first = await call.rest()
    assert text_of(first).endswith("It waits for an answer from the user.")
    waiting = await peer.call(WAIT, call=call_in(first))
    withdrawn, asked = await waiting.message(), await waiting.message()
    assert (withdrawn["method"], withdrawn["params"]["requestId"]) == ("notifications/cancelled", before["id"])
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    assert text_of((await waiting.rest())[-1]) == "because"


async def test_a_question_behind_the_early_answer_is_asked_on_the_standalone_stream(
    shop: ToolServer, early: Site
) -> None:
    peer = await early.join()
    standalone = await peer.get()
    first = await answered(peer, "quiz", question="Why?", gate="g")
    shop.open("g")
    asked = await standalone.message()
    while asked["method"] != "elicitation/create":
        asked = await standalone.message()
    assert ", waits for an answer from the user: " in text_of(await answered(peer, WAIT))
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    assert text_of(await answered(peer, WAIT, call=call_in(first))) == "because"


async def test_a_question_behind_the_early_answer_is_asked_on_a_wait(shop: ToolServer, early: Site) -> None:
    peer = await early.join()
    first = await answered(peer, "quiz", question="Why?", gate="g", token=1)
    assert "Last progress: 1." in text_of(first)
    shop.open("g")
    asked: Message = {}
    while asked.get("method") != "elicitation/create":
        if not asked or "result" in asked:
            waiting = await peer.call(WAIT, call=call_in(first))
        asked = await waiting.message()
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    last = (await waiting.rest())[-1]
    while "still running" in text_of(last):
        last = await answered(peer, WAIT, call=call_in(first))
    assert text_of(last) == "because"


async def test_a_question_is_asked_on_the_wait_that_is_still_open(shop: ToolServer) -> None:
    """The newer one of two was cancelled."""
    async with serve(shop.server, answer_within=("*=5s",)) as site:
        peer = await site.join()
        found = call_in(await answered(peer, "quiz", question="Why?", gate="g"))
        older = await peer.call(WAIT, call=found)
        newer = await peer.call(WAIT, call=found, id="newer")
        await until(lambda: site.app.running.count(WAIT) == 2)
        await peer.cancel("newer")
        assert (await newer.rest())[-1]["error"]["code"] == -32800
        shop.open("g")
        asked = await older.message()
        while asked["method"] != "elicitation/create":
            asked = await older.message()
        await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
        assert text_of((await older.rest())[-1]) == "because"


async def test_a_question_is_not_asked_on_a_wait_of_another_session(shop: ToolServer, early: Site) -> None:
    """An answer in that session would find no question. The model is told what it can do."""
    peer, later = await early.join(), await early.join()
    found = call_in(await answered(peer, "quiz", question="Why?", gate="g"))
    waiting = await later.call(WAIT, call=found)
    await waiting.event()
    shop.open("g")
    [told] = await waiting.rest()
    while "from the user" not in text_of(told):
        told = await answered(later, WAIT, call=found)
    assert text_of(told).endswith(
        " It waits for an answer from the user, who is asked only by the client that called it. If that is gone, stop"
        f" it with the tool {CANCEL}."
    )
    waiting = await peer.call(WAIT, call=found)
    _, asked = await waiting.message(), await waiting.message()
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    assert text_of((await waiting.rest())[-1]) == "because"


async def test_a_tools_own_0_comes_under_the_token_of_the_wait() -> None:
    server, release = MCPServer("slow", log_level="WARNING"), asyncio.Event()

    @server.tool()
    async def read(ctx: Context) -> str:
        await ctx.report_progress(0, 12)
        await release.wait()
        return "read"

    async with serve(server, answer_within=RULE) as site:
        peer = await site.join()
        *_, first = await (await peer.call("read", token="first")).rest()
        assert text_of(first).endswith("Last progress: 0 of 12.")
        waiting = await peer.call(WAIT, call=call_in(first), token="mine")
        shown = await waiting.message()
        assert shown["params"] == {"progressToken": "mine", "progress": 0, "total": 12}
        release.set()
        assert text_of((await waiting.rest())[-1]) == "read"


@pytest.mark.parametrize("version", ["2025-06-18", "2025-11-25"])
async def test_progress_of_the_tool_comes_under_the_token_of_the_wait(
    shop: ToolServer, early: Site, version: str
) -> None:
    """Of 2025-06-18 the first progress is Perdure's own, and no word of the tool: it gives the client a position."""
    peer = await early.join(version)
    quiet = await answered(peer, "wait", gate="q", token="quiet")
    assert "Last progress" not in text_of(quiet)
    first = await answered(peer, "count", n=2, gate="g", pauses=[1], token="first")
    assert text_of(first).endswith("Last progress: 1 of 2.")
    waiting = await peer.call(WAIT, call=call_in(first), token="mine")
    shown = [await waiting.message()]
    if version == "2025-06-18":
        assert shown.pop()["params"] == {"progressToken": "mine", "progress": 0}
        assert waiting.last_id
        shown = [await waiting.message()]
    assert shown[0]["params"] == {"progressToken": "mine", "progress": 1, "total": 2}
    shop.open("g/1")
    assert text_of((await waiting.rest())[-1]) == "counted to 2"


async def test_a_known_caller_is_shown_its_calls_of_all_sessions_that_it_has_not_seen_the_end_of(
    shop: ToolServer,
) -> None:
    """A host that was restarted, and has a session of its own, finds what was cut there. What was delivered is not
    told, and a server's own tool is no tool of Perdure's, whatever its name begins with."""

    @shop.server.tool(name=f"{WAIT}_of_the_oven")
    async def own() -> str:
        return await shop.wait("h")

    async with serve(shop.server, auth=Guests(), answer_within=RULE) as site:
        ann = await site.join(token="ann-1")
        shop.open("open")
        await answered(ann, "wait", gate="open")
        first = await answered(ann, "wait", gate="g")
        cut = await ann.call(f"{WAIT}_of_the_oven")
        await until(lambda: "waiting at h" in shop.seen)
        await cut.drop()
        here, elsewhere = [text_of(await answered(peer, WAIT)) for peer in (ann, await site.join(token="ann-2"))]
        assert here.count("still running") == elsewhere.count("still running") == 2  # also without an early answer
        assert call_in(first) in elsewhere
        assert text_of(await answered(await site.join(token="bob-1"), WAIT)).startswith("No call of yours runs")
        shop.open("g")
        shop.open("h")
        again = await site.join(token="ann-2")
        assert text_of(await answered(again, WAIT, call=call_in(first))) == "went through g"
        await until(partial(is_told, again, lines=1))
        lost = text_of(await answered(again, WAIT)).rpartition(" ")[2]
        assert text_of(await answered(again, WAIT, call=lost)) == "went through h"
        await until(partial(is_told, again, lines=0))


async def is_told(peer: Peer, *, lines: int) -> bool:
    told = text_of(await answered(peer, WAIT)).splitlines()
    return len([line for line in told if ", begun " in line]) == lines


async def test_a_result_that_its_client_did_not_get_stays_in_the_list(shop: ToolServer, early: Site) -> None:
    peer = await early.join()
    first = await answered(peer, "wait", gate="g")
    waiting = await peer.call(WAIT, call=call_in(first))
    await waiting.event()
    await waiting.drop()
    info = early.app.session_info
    await until(lambda: not any(stream.connected_since for stream in getattr(info(peer.session), "streams", ())))
    shop.open("g")
    await until(lambda: not early.app.running)
    assert await is_told(peer, lines=1)
    assert text_of(await answered(peer, WAIT, call=call_in(first))) == "went through g"
    await until(partial(is_told, peer, lines=0))


async def test_a_client_that_resumes_by_itself_is_not_answered_early(shop: ToolServer, early: Site) -> None:
    peer = await early.join()
    async with connect(early.url, mode="legacy") as client:
        assert {WAIT, CANCEL}.isdisjoint(tool.name for tool in (await client.list_tools()).tools)
        calling = asyncio.create_task(client.call_tool("wait", {"gate": "g"}))
        await until(lambda: shop.seen)
        await answered(peer, "wait", gate="h")  # a rule that applied would have answered the other too
        shop.open("g")
        assert "went through g" in str((await calling).content)
        shop.open("h")
    assert early.app.counters.calls_answered_early == 1


@pytest.mark.parametrize("rule", ["=45s", "claude", "claude=", "claude=0.5s", "*=2h", "x=soon"])
def test_a_rule_that_cannot_be_read_is_refused(rule: str) -> None:
    with pytest.raises(BadSetting, match=rf"answer_within: '{re.escape(rule)}' is not CLIENT=TIME"):
        Settings(answer_within=(rule,))


@pytest.mark.parametrize("rule", ["1s", "*=1h", "Claude-AI=45s", "a=b=45s"])
def test_a_rule_names_a_client_and_a_time_of_1s_to_1h(rule: str) -> None:
    assert Settings(answer_within=(rule,)).answer_within == (rule,)


async def test_a_json_answer_is_the_early_one(shop: ToolServer) -> None:
    async with serve(shop.server, answer_within=RULE, json_response=True) as site:
        peer = await site.join()
        first = (await peer.send(peer.tool("wait", gate="g"))).json()
        shop.open("g")
        assert text_of((await peer.send(peer.tool(WAIT, call=call_in(first)))).json()) == "went through g"


async def test_a_server_that_does_not_list_its_tools_is_not_waited_for(shop: ToolServer) -> None:
    """Whether it must keep its names is not known in time. The wait is in time as well."""
    listed = asyncio.Event()

    async def list_tools(_: ServerRequestContext[Any], __: types.PaginatedRequestParams | None) -> Any:
        await listed.wait()
        return types.ListToolsResult(tools=[])

    async def call_tool(_: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text=await shop.wait("g"))])

    async with serve(Server("slow", on_list_tools=list_tools, on_call_tool=call_tool), answer_within=RULE) as site:
        peer = await site.join()
        first = await answered(peer, "wait")
        assert text_of(first).startswith('"wait" is still running after 1 s')
        waiting = await peer.call(WAIT, call=call_in(first))
        await waiting.event()
        listed.set()
        shop.open("g")
        assert text_of((await waiting.rest())[-1]) == "went through g"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_wait_ends_when_the_call_ends_at_whatever_node(
    shop: ToolServer, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hint of the node that runs the call: nothing is read again in time."""
    monkeypatch.setattr("perdure.sessions.context.READ_AGAIN", 3_600.0)
    opened: Callable[[], Store] = new_stores(kind, tmp_path)
    async with AsyncExitStack() as stack:
        shops = (shop, ToolServer())
        sites = [
            await stack.enter_async_context(serve(each.server, store=opened(), answer_within=("a=1s", "*=1h")))
            for each in shops
        ]
        caller, waiter = Peer(sites[0]), await sites[0].join()
        handshake = caller.handshake()
        handshake["params"]["clientInfo"]["name"] = "a"
        caller.session = (await caller.send(handshake)).headers["mcp-session-id"]
        await caller.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        await until(lambda: all(len(site.app.other_nodes()) == 1 for site in sites))
        first = await answered(caller, "wait", gate="g")
        waiting = [await waiter.through(site).call(WAIT, call=call_in(first)) for site in sites]
        for wire in waiting:
            await wire.event()
        # Each at its own node; of a program both at the home of its session.
        await until(lambda: sum(site.app.running.count(WAIT) for site in sites) == len(waiting))
        shop.open("g")
        assert [text_of((await wire.rest())[-1]) for wire in waiting] == ["went through g"] * 2


async def test_a_fastmcp_server_has_early_answers_beats_and_keys_in_sessions() -> None:
    from fastmcp import FastMCP

    server, release, runs = FastMCP("fast"), asyncio.Event(), list[int]()

    @server.tool
    async def slow() -> dict[str, int]:
        runs.append(1)
        await release.wait()
        return {"n": len(runs)}

    async with serve(server, answer_within=RULE, heartbeat=0.1) as site:
        peer = await site.join()
        call = await peer.call("slow", token="t")
        await call.event()
        beat = await call.message()
        assert (beat["method"], beat["params"]["message"]) == ("notifications/progress", "Still running (0 s)")
        first = (await call.rest())[-1]
        keyed = peer.tool("slow")
        keyed["params"]["_meta"] = {KEY: "order-7"}
        joined = [await peer.post({**keyed, "id": number}) for number in (1, 2)]
        await until(lambda: len(runs) == 2)
        release.set()
        answers = [(await wire.rest())[-1]["result"]["structuredContent"] for wire in joined]
        assert answers == [{"n": 2}] * 2
        assert (await answered(peer, WAIT, call=call_in(first)))["result"]["structuredContent"] == {"n": 2}


async def test_a_request_for_a_task_is_not_answered_early_where_there_are_none(shop: ToolServer, early: Site) -> None:
    """Nor is one with a key."""
    peer = await early.join()
    plain, keyed = peer.tool("wait", gate="g"), peer.tool("wait", gate="g")
    plain["params"]["task"], keyed["params"]["_meta"] = {}, {KEY: "order-7"}
    calls = [await peer.post(message) for message in (plain, keyed)]
    first = await answered(peer, "wait", gate="h")  # a rule that applied would have answered the others too
    shop.open("g")
    assert [text_of((await call.rest())[-1]) for call in calls] == ["went through g"] * 2
    shop.open("h")
    assert text_of(await answered(peer, WAIT, call=call_in(first))) == "went through h"


async def test_calls_behind_early_answers_and_waits_count_as_the_calls_of_their_session(shop: ToolServer) -> None:
    async with serve(shop.server, answer_within=RULE, max_calls=2) as site:
        peer = await site.join()
        first = await answered(peer, "wait", gate="g")
        assert "still running" in text_of(await answered(peer, WAIT, call=call_in(first)))
        await answered(peer, "wait", gate="g")
        refused = await peer.send(peer.tool(WAIT, call=call_in(first)))
        assert (refused.status_code, answer_of(refused)["error"]["code"]) == (429, -31004)
        shop.open("g")
        await until(lambda: not site.app.running)
        assert text_of(await answered(peer, WAIT, call=call_in(first))) == "went through g"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_wait_at_another_node_asks_what_its_call_asks_and_gets_the_result(
    shop: ToolServer, tmp_path: Path, kind: str
) -> None:
    """As behind a balancer, for a client that does not read the standalone stream. The node that runs the call serves
    the wait."""
    opened: Callable[[], Store] = new_stores(kind, tmp_path)
    async with AsyncExitStack() as stack:
        shops = (shop, ToolServer())
        sites = [
            await stack.enter_async_context(serve(each.server, store=opened(), answer_within=RULE)) for each in shops
        ]
        peer = await sites[0].join()
        await until(lambda: all(len(site.app.other_nodes()) == 1 for site in sites))
        there = peer.through(sites[1])
        first = await answered(peer, "ask", question="Why?")
        waiting = await there.call(WAIT, call=call_in(first))
        withdrawn, asked = await waiting.message(), await waiting.message()
        assert (withdrawn["method"], asked["params"]["message"]) == ("notifications/cancelled", "Why?")
        later = [await waiting.message(), *[await answered(each, WAIT, call=call_in(first)) for each in (peer, there)]]
        assert all(text_of(each).endswith("It waits for an answer from the user.") for each in later)
        assert ", waits for an answer from the user: " in text_of(await answered(there, WAIT))
        waiting = await there.call(WAIT, call=call_in(first))
        _, asked = await waiting.message(), await waiting.message()
        await there.answer(asked, {"action": "accept", "content": {"answer": "because"}})
        assert text_of((await waiting.rest())[-1]) == "because"
        await until(partial(is_told, peer, lines=0))


async def test_a_call_whose_process_is_killed_behind_its_early_answer_ends_as_its_tool_allows(tmp_path: Path) -> None:
    """A wait that was held goes on in the next process under its request id. An unmarked tool runs once."""
    options = ("--store", f"sqlite:{tmp_path}/log.db", "--answer-within", "2s")
    log, gate = tmp_path / "diary", tmp_path / "gate"
    async with serving(GATE_FILE_TOOLS, *options) as server:
        peer = await (web := Web(server.url)).join()
        arguments = {"n": 1, "gate": str(gate), "pauses": [1], "log": str(log)}
        calls = [await peer.call(tool, key=tool, **arguments) for tool in ("put", "pay")]
        put, pay = [call_in((await call.rest())[-1]) for call in calls]
        held = await peer.call(WAIT, call=put, id="held")
        await held.event()
        await server.kill()
        await web.aclose()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        later = peer.through(web := Web(server.url))
        resumed = await later.get(held.last_id)
        unknown = await answered(later, WAIT, call=pay)
        while "still running" in text_of(unknown):
            unknown = await answered(later, WAIT, call=pay)
        assert (unknown["result"]["isError"], "outcome unknown" in text_of(unknown)) == (True, True)
        open_gate(f"{gate}.1")
        *_, last = await resumed.rest()
        assert last["id"] == "held"
        while "still running" in text_of(last):
            last = await answered(later, WAIT, call=put)
        assert text_of(last) == "counted to 1"
        assert sorted(key for key, _ in diary(log)) == ["pay", "put", "put"]
        await web.aclose()


async def test_the_stock_python_client_validates_nothing(shop: ToolServer, early: Site) -> None:
    async with streamable_http_client(early.url) as streams, ClientSession(*streams[:2]) as client:
        await client.initialize()
        await client.list_tools()
        first = await client.call_tool("wait", {"gate": "g"})
        shop.open("g")
        found = re.search(r'"call": "([^"]+)"', str(first.content))
        assert found is not None
        last = await client.call_tool(WAIT, {"call": found[1]})
        assert "went through g" in str(last.content)


async def test_a_wait_is_answered_whatever_fails_meanwhile(shop: ToolServer) -> None:
    """So are a request for a task's result and one that was joined to a call; none keeps its place of `max_calls`."""
    store = FaultyStore(MemoryStore())
    bug = "a store with a bug"
    options: dict[str, Any] = {"answer_within": ("*=1h",), "tasks": ("wait=optional",), "max_calls": 5}
    async with serve(shop.server, store=store, complaint=bug, **options) as site:
        peer = await site.join()
        begun, keyed = peer.tool("wait", gate="g"), peer.tool("wait", gate="h")
        begun["params"]["task"], keyed["params"]["_meta"] = {}, {KEY: "order-7"}
        task = answer_of(await peer.send(begun))["result"]["task"]["taskId"]
        call = await peer.post(keyed)
        waiting = [
            await peer.call(WAIT, call=task),
            await peer.post(peer.request("tasks/result", {"taskId": task})),
            await peer.post({**keyed, "id": "again"}),
        ]
        await until(lambda: len(shop.seen) == 2)
        store.reads = Fault.BREAKS
        shop.open("g")
        shop.open("h")
        assert [(await wire.rest())[-1]["error"]["code"] for wire in waiting] == [-32603] * 3
        store.works()
        assert text_of((await call.rest())[-1]) == "went through h"
        await until(lambda: not site.app.running)


async def test_the_two_tools_say_when_the_store_fails_in_both_eras(shop: ToolServer) -> None:
    store = FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, auth=Guests(), answer_within=RULE, complaint=FAILS) as site:
        peer, modern = (
            await site.join(token="ann-1"),
            CallPeer(port=site.port, headers={"authorization": "Bearer ann-1"}),
        )
        call = {"call": call_in(await answered(peer, "wait", gate="g"))}
        store.reads = Fault.RAISES
        for tool, arguments in ((WAIT, call), (WAIT, {}), (CANCEL, call)):
            for told in (
                (await answered(peer, tool, **arguments))["result"],
                result_of(await modern.call(tool, arguments)),
            ):
                sentence = "The server cannot look for the call now. Call this again later."
                assert (told["isError"], told["content"][0]["text"]) == (True, sentence)
        store.works()
        shop.open("g")
        assert text_of(await answered(peer, WAIT, **call)) == "went through g"


class Outdated(MemoryStore):
    """Says of streams that a node writes them which is gone by now."""

    is_outdated = False

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        found = await super().follow(after, limit=limit)
        if not self.is_outdated:
            return found
        gone = NodeId("x" * 22)
        return {name: each._replace(record=replace(each.record, node=gone)) for name, each in found.items()}


async def test_a_call_that_no_process_runs_in_this_moment_is_cancelled_later(shop: ToolServer) -> None:
    async with serve(shop.server, store=(store := Outdated()), answer_within=RULE) as site:
        peer = await site.join()
        call = call_in(await answered(peer, "wait", gate="g"))
        store.is_outdated = True
        told = (await answered(peer, CANCEL, call=call))["result"]
        assert (told["isError"], told["content"][0]["text"][:45]) == (
            True,
            "No process of the server runs the call now, s",
        )
        store.is_outdated = False
        assert text_of(await answered(peer, CANCEL, call=call)).startswith('"wait" is being cancelled')
        await until(lambda: "cancelled at g" in shop.seen)
