"""Clients of 2026-07-28 without tasks, under a rule of `answer_within`: early answers, waits, rounds, and cut calls."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any

import mcp_types as types
import pytest
from anyio import wait_all_tasks_blocked
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve

from perdure._core.ids import new_session_id
from perdure.store.memory import MemoryStore
from tests.http.test_early_answers import CANCEL, RULE, WAIT, answered, call_in
from tests.support.clients.modern_peer import FORM, TAKES_TASKS, CallPeer, accept, message_of, result_of, said
from tests.support.clients.wire_client import text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import Answer, Guests, ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import FAILS

pytestmark = pytest.mark.anyio

Json = dict[str, Any]


@pytest.fixture
async def early(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, answer_within=RULE) as site:
        yield site


def peer_at(site: Site, *, token: str = "", **declared: Any) -> CallPeer:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return CallPeer(port=site.port, headers=headers, capabilities=declared)


async def call(peer: CallPeer, tool: str, /, *, id: int | str = 1, **arguments: Any) -> Json:  # noqa: A002
    return result_of(await peer.call(tool, arguments, id=id))


def id_in(result: Mapping[str, Any]) -> str:
    found: str = result["_meta"]["dev.perdure/call"]["id"]
    return found


async def test_a_call_that_takes_longer_is_answered_in_time_and_its_result_is_fetched(
    shop: ToolServer, early: Site
) -> None:
    peer = peer_at(early)
    first = await call(peer, "wait", gate="g")
    assert (first["resultType"], "isError" in first, "structuredContent" in first) == ("complete", False, False)
    assert said(first).startswith('"wait" is still running after 1 s, and goes on. To get its result, call the tool')
    again = await call(peer, WAIT, call=id_in(first))
    assert (said(again).startswith('"wait" is still running'), id_in(again)) == (True, id_in(first))
    async with await peer.begin_call(WAIT, {"call": id_in(first)}) as waiting:
        await wait_all_tasks_blocked()
        shop.open("g")
        last = result_of(await waiting.answer())
    assert last == await call(peer, "wait", gate="g")
    assert await call(peer, WAIT, call=id_in(first)) == last
    assert early.app.counters.calls_answered_early == 1


async def test_an_answer_within_the_time_is_the_tools_own_to_the_byte(shop: ToolServer, early: Site) -> None:
    shop.open("g")
    async with serve(shop.server) as plain:
        bodies = [message_of(await peer_at(site).call("wait", {"gate": "g"}, id=1)) for site in (early, plain)]
    assert json.dumps(bodies[0]) == json.dumps(bodies[1])


async def listed(site: Site, *, name: str = "peer", cursor: str | None = None, **declared: Any) -> Json:
    params: Json = {"_meta": {"io.modelcontextprotocol/clientInfo": {"name": name, "version": "1"}}}
    if cursor is not None:
        params["cursor"] = cursor
    return result_of(await peer_at(site, **declared).rpc("tools/list", params))


async def test_only_a_client_under_a_rule_sees_the_two_tools_and_no_output_schema(shop: ToolServer) -> None:
    """Its list is its own: no cache may show it to others."""
    async with serve(shop.server, answer_within=("Peer=45s",)) as site, serve(shop.server) as plain:
        mine, *others = [
            await listed(site),
            await listed(site, name="another"),
            await listed(site, **TAKES_TASKS),
            await listed(site, experimental={"dev.perdure/resumes": {}}),
        ]
        theirs = await listed(plain)
    assert others == [theirs] * 3
    assert [tool["name"] for tool in mine["tools"][-2:]] == [WAIT, CANCEL]
    assert "Waits up to 45 s" in mine["tools"][-2]["description"]
    assert any("outputSchema" in tool for tool in theirs["tools"])
    shown = [{name: value for name, value in tool.items() if name != "outputSchema"} for tool in theirs["tools"]]
    assert mine["tools"][:-2] == shown
    assert (mine["cacheScope"], mine["ttlMs"]) == ("private", theirs["ttlMs"])


async def test_a_server_that_lists_our_names_keeps_them_and_the_two_tools_stand_on_its_last_page() -> None:
    """A low-level server with three pages."""

    async def list_tools(_: ServerRequestContext[Any], params: types.PaginatedRequestParams | None) -> Any:
        page = int((params.cursor if params else None) or 0)
        names = (("slow", WAIT), (f"{WAIT}_2",), ("other",))[page]
        tools = [
            types.Tool(name=name, input_schema={"type": "object"}, output_schema={"type": "object"}) for name in names
        ]
        return types.ListToolsResult(tools=tools, next_cursor=str(page + 1) if page < 2 else None)

    release = asyncio.Event()

    async def call_tool(_: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name == "slow":
            await release.wait()
        text = types.TextContent(text=f"the server's own {params.name}")
        return types.CallToolResult(content=[text], structured_content={"name": params.name})

    server: Server[Any] = Server("pages", on_list_tools=list_tools, on_call_tool=call_tool)
    async with serve(server, answer_within=RULE) as site:
        pages = [await listed(site), await listed(site, cursor="1"), await listed(site, cursor="2")]
        names = [[tool["name"] for tool in page["tools"]] for page in pages]
        assert names == [["slow", WAIT], [f"{WAIT}_2"], ["other", f"{WAIT}_3", CANCEL]]
        assert not any("outputSchema" in tool for page in pages for tool in page["tools"])
        peer = peer_at(site)
        assert said(await call(peer, WAIT, call="x")) == f"the server's own {WAIT}"
        first = await call(peer, "slow")
        assert f"call the tool {WAIT}_3 with" in said(first)
        release.set()
        last = await call(peer, f"{WAIT}_3", call=id_in(first))
        assert (said(last), last["structuredContent"]) == ("the server's own slow", {"name": "slow"})


async def test_a_fastmcp_server_is_listed_and_answered_so_too() -> None:
    from fastmcp import FastMCP

    server, release = FastMCP("fast"), asyncio.Event()

    @server.tool
    async def slow() -> dict[str, int]:
        await release.wait()
        return {"n": 1}

    async with serve(server, answer_within=RULE) as site:
        tools = (await listed(site))["tools"]
        assert [(tool["name"], "outputSchema" in tool) for tool in tools] == [
            ("slow", False), (WAIT, False), (CANCEL, False),
        ]  # fmt: skip
        peer = peer_at(site)
        first = await call(peer, "slow")
        release.set()
        assert (await call(peer, WAIT, call=id_in(first)))["structuredContent"] == {"n": 1}


async def test_a_call_with_a_key_or_of_a_client_with_tasks_is_never_answered_early(shop: ToolServer) -> None:
    """A client that gives every call a key has the two tools all the same, as they are in its list."""
    async with serve(shop.server, answer_within=RULE, task_after=0.1) as site:
        handle = await call(peer_at(site, **TAKES_TASKS), "wait", gate="g")
        assert handle["resultType"] == "task"
        async with await peer_at(site).begin_call("wait", {"gate": "g"}, key="mine") as keyed:
            await until(lambda: shop.seen == ["waiting at g"] * 2)
            await asyncio.sleep(1.1)  # a rule that applied would have answered
            shop.open("g")
            assert said(result_of(await keyed.answer())) == "went through g"
        told = result_of(await peer_at(site).call(WAIT, {"call": "x"}, key="another"))
        assert said(told).startswith("There is no such call")


async def test_a_store_that_fails_when_the_answer_is_due_only_delays_it(shop: ToolServer) -> None:
    """Its id must lead to the call after a restart as well."""
    store = FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, answer_within=RULE, complaint=FAILS) as site:
        peer = peer_at(site)
        async with await peer.begin_call("wait", {"gate": "g"}) as waiting:
            await until(lambda: shop.seen)
            store.writes = Fault.RAISES
            await until(lambda: site.app.counters.outages)
            store.works()
            first = result_of(await waiting.answer())
        assert said(first).startswith('"wait" is still running')
        shop.open("g")
        assert said(await call(peer, WAIT, call=id_in(first))) == "went through g"


async def test_a_tool_that_never_runs_as_a_task_has_no_early_answer(shop: ToolServer) -> None:
    """`--task NAME=never` leaves its calls to the SDK's own handler."""
    async with serve(shop.server, answer_within=RULE, tasks=("wait=never",)) as site:
        plain = asyncio.create_task(call(peer_at(site), "wait", gate="g"))
        await until(lambda: shop.seen == ["waiting at g"])
        await asyncio.sleep(1.1)  # a rule that applied would have answered
        shop.open("g")
        assert said(await plain) == "went through g"


async def test_a_question_before_the_early_answer_is_a_round_and_one_behind_it_a_round_of_the_wait(
    shop: ToolServer, early: Site
) -> None:
    peer = peer_at(early, **FORM)
    asked = await call(peer, "ask", question="Why?")
    assert asked["resultType"] == "input_required"
    [question] = asked["inputRequests"]
    answer = await peer.round("ask", asked, {question: accept(answer="because")}, arguments={"question": "Why?"})
    assert said(result_of(answer)) == "because"

    first = await call(peer, "quiz", question="Why?", gate="g")
    shop.open("g")
    wait = {"call": id_in(first)}
    asked = await call(peer, WAIT, **wait)
    assert (asked["resultType"], asked["requestState"]) == ("input_required", f"perdure.wait.{id_in(first)}")
    [question] = asked["inputRequests"]
    lied = {**asked, "requestState": "perdure.wait.another"}
    refused = message_of(await peer.round(WAIT, lied, {question: accept(answer="no")}, arguments=wait))
    assert refused["error"]["code"] == -32602
    answer = await peer.round(WAIT, asked, {question: accept(answer="because")}, arguments=wait)
    assert said(result_of(answer)) == "because"


async def test_a_question_is_told_to_a_client_that_cannot_be_asked(shop: ToolServer, early: Site) -> None:
    first = await call(peer_at(early, **FORM), "quiz", question="Why?", gate="g")
    shop.open("g")
    told = await call(peer_at(early), WAIT, call=id_in(first))
    assert said(told).endswith("It waits for an answer from the user.")
    # Only a client of the call's own era can be asked.
    session, elsewhere = await early.join(), f"If that is gone, stop it with the tool {CANCEL}."
    in_session = call_in(await answered(session, "quiz", question="How?", gate="g"))
    assert said(await call(peer_at(early, **FORM), WAIT, call=in_session)).endswith(elsewhere)
    assert text_of(await answered(session, WAIT, call=id_in(first))).endswith(elsewhere)


async def test_a_request_that_brings_an_answer_is_answered_early_too() -> None:
    """The time counts from each request."""
    server, release = MCPServer("slow"), asyncio.Event()

    @server.tool()
    async def order(ctx: Context) -> str:
        answer = await ctx.elicit("Which sort?", Answer)
        await release.wait()
        return answer.data.answer if answer.action == "accept" else "nothing"

    async with serve(server, answer_within=RULE) as site:
        peer = peer_at(site, **FORM)
        asked = await call(peer, "order")
        [question] = asked["inputRequests"]
        first = result_of(await peer.round("order", asked, {question: accept(answer="rye")}))
        assert said(first).startswith('"order" is still running')
        release.set()
        assert said(await call(peer, WAIT, call=id_in(first))) == "rye"


async def test_a_round_of_the_tools_own_behind_the_early_answer_is_asked_by_the_wait() -> None:
    server, release = MCPServer("slow"), asyncio.Event()

    async def which() -> Elicit[Answer]:
        await release.wait()
        return Elicit("Which sort?", Answer)

    @server.tool()
    async def order(chosen: Annotated[Answer, Resolve(which)]) -> str:
        return chosen.answer

    async with serve(server, answer_within=RULE) as site:
        peer = peer_at(site, **FORM)
        wait = {"call": id_in(await call(peer, "order"))}
        release.set()
        asked = await call(peer, WAIT, **wait)
        [question] = asked["inputRequests"]
        answer = await peer.round(WAIT, asked, {question: accept(answer="rye")}, arguments=wait)
        assert said(result_of(answer)) == "rye"


async def test_errors_are_told_to_the_model(shop: ToolServer, early: Site) -> None:
    peer = peer_at(early)
    first = await call(peer, "wait", gate="g")
    assert said(await call(peer, CANCEL, call=id_in(first))).startswith('"wait" is being cancelled')
    told = await call(peer, WAIT, call=id_in(first))
    assert (told["isError"], told["resultType"]) == (True, "complete")
    assert said(told) == '"wait" was cancelled; it may have done a part of its work.'
    assert shop.seen == ["waiting at g", "cancelled at g"]
    assert "has ended already" in said(await call(peer, CANCEL, call=id_in(first)))


async def test_a_wait_whose_client_leaves_ends_alone(shop: ToolServer, early: Site) -> None:
    peer = peer_at(early)
    first = await call(peer, "wait", gate="g")
    waiting = await peer.begin_call(WAIT, {"call": id_in(first)})
    await wait_all_tasks_blocked()
    await waiting.aclose()
    shop.open("g")
    assert said(await call(peer, WAIT, call=id_in(first))) == "went through g"


async def test_a_foreign_id_is_an_unknown_id_to_the_byte(shop: ToolServer) -> None:
    async with serve(shop.server, auth=Guests(), answer_within=RULE) as site:
        ann, bob = [peer_at(site, token=token) for token in ("ann-1", "bob-1")]
        first = await call(ann, "wait", gate="g")
        given: tuple[Any, ...] = (id_in(first), new_session_id(lambda n: b"1" * n), "nothing", 5, {}, "a" * 22)
        for tool in (WAIT, CANCEL):
            told = [(await bob.call(tool, {"call": wanted}, id=1)).body for wanted in given]
            assert set(told) == {told[0]}
            assert b'"isError":true' in told[0]
        shop.open("g")
        assert said(await call(peer_at(site, token="ann-2"), WAIT, call=id_in(first))) == "went through g"


async def test_an_id_is_found_from_the_other_era(shop: ToolServer, early: Site) -> None:
    """A conversation may go on with another client."""
    peer, session = peer_at(early), await early.join()
    modern_call, in_session = await call(peer, "wait", gate="g"), await answered(session, "wait", gate="g")
    shop.open("g")
    late = await call(peer, WAIT, call=call_in(in_session))
    assert (late["resultType"], said(late)) == ("complete", "went through g")
    told = (await answered(session, WAIT, call=id_in(modern_call)))["result"]
    plain = (await answered(session, "wait", gate="g"))["result"]
    assert told == plain


async def test_progress_of_the_tool_comes_under_the_token_of_the_wait(shop: ToolServer, early: Site) -> None:
    peer = peer_at(early)
    first = await call(peer, "count", n=2, gate="g", pauses=[1])
    assert said(first).endswith("Last progress: 1 of 2.")
    params = {"_meta": {"progressToken": "mine"}}
    async with await peer.begin_call(WAIT, {"call": id_in(first)}, params=params) as waiting:
        await waiting.until_messages(1)
        shop.open("g/1")
        answer = await waiting.answer()
    shown = [m["params"] for m in answer.messages if m.get("method") == "notifications/progress"]
    assert {one["progressToken"] for one in shown} == {"mine"}
    assert shown[0]["progress"] == pytest.approx(1)
    assert said(answer.messages[-1]["result"]) == "counted to 2"


async def test_without_an_id_a_known_caller_gets_its_list_and_an_anonymous_one_a_sentence(shop: ToolServer) -> None:
    """What was cut is told as cancelled; what was fetched, or came in time, is not told again."""
    async with serve(shop.server, auth=Guests(), answer_within=RULE) as site:
        ann, bob = peer_at(site, token="ann-1"), peer_at(site, token="bob-1")
        shop.open("open")
        await call(ann, "wait", gate="open")
        running = await call(ann, "wait", gate="g")
        done = await call(ann, "count", n=1, gate="c", pauses=[0])
        cut = await ann.begin_call("wait", {"gate": "h"})
        await until(lambda: "waiting at h" in shop.seen)
        await cut.aclose()
        await until(lambda: "cancelled at h" in shop.seen)
        shop.open("c/0")
        await until(lambda: "counted 1" in shop.seen)
        lines = said(await call(ann, WAIT)).splitlines()
        assert [line.split(", ", 1)[0] for line in lines] == ['"wait"', '"count"', '"wait"']
        assert "cancelled after 0 s, may have done a part of its work: " in lines[0]
        assert lines[1].endswith(f"; its result is kept: {id_in(done)}")
        assert lines[2].endswith(f"still running: {id_in(running)}")
        told = await call(ann, WAIT, call=lines[0].rpartition(" ")[2])
        assert said(told) == '"wait" was cancelled; it may have done a part of its work.'
        await call(ann, WAIT, call=id_in(done))
        assert [line.rpartition(" ")[2] for line in said(await call(ann, WAIT)).splitlines()] == [id_in(running)]
        assert said(await call(bob, WAIT)).startswith("No call of yours runs")
        assert site.app.counters.calls_cut == 1
        shop.open("g")
    async with serve(shop.server, answer_within=RULE) as site:
        told = await call(peer_at(site), WAIT)
        assert (told["isError"], said(told)) == (True, 'Give the id that the answer "still running" contained.')


@pytest.mark.parametrize("able", [{}, FORM], ids=["the SDK's handler", "the log"])
async def test_a_plain_call_whose_connection_is_cut_is_cancelled_and_counted(shop: ToolServer, able: Json) -> None:
    async with serve(shop.server) as site:
        cut = await peer_at(site, **able).begin_call("wait", {"gate": "g"})
        await until(lambda: shop.seen == ["waiting at g"])
        await cut.aclose()
        await until(lambda: shop.seen == ["waiting at g", "cancelled at g"])
        await until(lambda: site.app.counters.calls_cut == 1)
        shop.open("g")
        await call(peer_at(site, **able), "wait", gate="g")
        assert site.app.counters.calls_cut == 1


async def test_a_json_answer_is_the_early_one(shop: ToolServer) -> None:
    async with serve(shop.server, answer_within=RULE, json_response=True) as site:
        peer = peer_at(site)
        answer = await peer.call("wait", {"gate": "g"})
        assert answer.header("content-type") == "application/json"
        shop.open("g")
        assert said(await call(peer, WAIT, call=id_in(result_of(answer)))) == "went through g"


async def test_a_wait_at_another_node_ends_with_the_call(shop: ToolServer) -> None:
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        sites = [
            await stack.enter_async_context(serve(each.server, store=store, answer_within=("*=2s",)))
            for each in (shop, ToolServer())
        ]
        first = await call(peer_at(sites[0]), "wait", gate="g")
        async with await peer_at(sites[1]).begin_call(WAIT, {"call": id_in(first)}) as waiting:
            await wait_all_tasks_blocked()
            shop.open("g")
            assert said(result_of(await waiting.answer())) == "went through g"


async def test_a_process_that_stops_answers_early_at_once(shop: ToolServer) -> None:
    async with serve(shop.server, answer_within=("*=1h",)) as site:
        held = asyncio.create_task(call(peer_at(site), "wait", gate="g"))
        await until(lambda: shop.seen == ["waiting at g"])
        draining = asyncio.create_task(site.app.drain())
        assert said(await held).startswith('"wait" is still running')
        shop.open("g")
        await draining


async def test_a_server_without_rules_shows_nothing(shop: ToolServer) -> None:
    async with serve(shop.server) as site:
        names = {tool["name"] for tool in (await listed(site))["tools"]}
        assert names.isdisjoint((WAIT, CANCEL))
        told = await call(peer_at(site), WAIT, call="x")
        assert told["isError"] is True  # the server's own word for a tool that it does not have
        assert "dev.perdure" not in json.dumps(told)
