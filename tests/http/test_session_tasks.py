"""Tasks of 2025-11-25 in sessions: one story for each rule of that revision, named after it in the docstring."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server

from perdure._core.envelope import KEY
from perdure._core.ids import new_stream_id
from perdure.store import MemoryStore
from perdure.store.interface import Store
from tests.http.test_heartbeats import new_stores
from tests.support.clients.wire_client import Message, Peer, Wire, answer_of, text_of
from tests.support.servers.fastmcp_asking_tools import server as fastmcp_tools
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import Guests, ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import FAILS

pytestmark = pytest.mark.anyio

RELATED = "io.modelcontextprotocol/related-task"
IMMEDIATE = "io.modelcontextprotocol/model-immediate-response"
NOBODYS = new_stream_id(lambda n: b"1" * n)
RULES = ("wait=optional", "ask=optional", "quiz=optional", "boom=optional", "count=optional", "whoami=required")


@pytest.fixture
async def tasked(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, tasks=RULES) as site:
        yield site


def task_call(peer: Peer, name: str, /, *, token: Any = None, task: Any = None, **arguments: Any) -> Message:
    message = peer.tool(name, token=token, **arguments)
    message["params"]["task"] = {} if task is None else task
    return message


async def begin(peer: Peer, name: str, /, **arguments: Any) -> Message:
    """Begin a task; its first view."""
    created = answer_of(await peer.send(task_call(peer, name, **arguments)))
    task: Message = created["result"]["task"]
    return task


async def ask(peer: Peer, method: str, **params: Any) -> Message:
    return answer_of(await peer.send(peer.request(method, params, id="asks")))


async def state(peer: Peer, task: str) -> Message:
    view: Message = (await ask(peer, "tasks/get", taskId=task))["result"]
    return view


async def ended(peer: Peer, task: str) -> Message:
    view: Message = {"status": "working"}
    while view["status"] in ("working", "input_required"):
        view = await state(peer, task)
    return view


async def result(peer: Peer, task: str) -> Message:
    return await ask(peer, "tasks/result", taskId=task)


async def until_heard(wire: Wire, method: str) -> Message:
    while (message := await wire.message()).get("method") != method:
        pass
    return message


class TellingServer:
    """A low-level server whose tools say themselves whether they run as tasks."""

    def __init__(self, **support: str | None) -> None:
        self.support = support
        self.given: list[Any] = []
        self.server: Server[Any] = Server("telling", version="1")
        self.server.add_request_handler("tools/list", types.PaginatedRequestParams, self._list)
        self.server.add_request_handler("tools/call", types.CallToolRequestParams, self._call)

    async def _list(self, ctx: ServerRequestContext[Any], params: Any) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=name,
                input_schema={"type": "object"},
                execution=None if said is None else types.ToolExecution.model_validate({"taskSupport": said}),
            )
            for name, said in self.support.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def _call(self, ctx: ServerRequestContext[Any], params: types.CallToolRequestParams) -> types.CallToolResult:
        self.given.append(params.model_dump(by_alias=True, exclude_none=True))
        return types.CallToolResult(content=[types.TextContent(type="text", text=f"{params.name} ran")])


async def test_a_server_with_such_tools_announces_tasks(shop: ToolServer, tasked: Site) -> None:
    """K1, K2: the list is for clients that are known."""
    wanted: Message = {"cancel": {}, "requests": {"tools": {"call": {}}}}
    assert (await tasked.join()).welcome["result"]["capabilities"]["tasks"] == wanted
    assert "tasks" not in (await tasked.join("2025-06-18")).welcome["result"]["capabilities"]
    async with serve(shop.server, auth=Guests(), tasks=RULES) as site:
        known = await site.join(token="ann-1")
        assert known.welcome["result"]["capabilities"]["tasks"] == {"list": {}, **wanted}
    async with serve(shop.server) as site:
        assert "tasks" not in (await site.join()).welcome["result"]["capabilities"]


async def test_a_call_with_a_task_is_answered_at_once_and_its_result_is_fetched(shop: ToolServer, tasked: Site) -> None:
    """K6, K8, K12, K13."""
    peer = await tasked.join()
    created = answer_of(await peer.send(task_call(peer, "wait", gate="g")))["result"]
    task = created["task"]["taskId"]
    assert created["_meta"] == {IMMEDIATE: '"wait" has begun, and goes on as a task. Its result comes later.'}
    assert (created["task"]["status"], (await state(peer, task))["status"]) == ("working", "working")
    waiting = await peer.post(peer.request("tasks/result", {"taskId": task}, id="r"))
    shop.open("g")
    [last] = await waiting.rest()
    plain = (await (await peer.call("wait", gate="g")).rest())[-1]
    assert last == {**plain, "id": "r", "result": {**plain["result"], "_meta": {RELATED: {"taskId": task}}}}
    assert (await result(peer, task))["result"] == last["result"]
    for view in (created["task"], over := await ended(peer, task)):
        assert "_meta" not in view
    assert over["status"] == "completed"
    assert (await state(peer, task))["status"] == "completed"


async def test_a_cancelled_task_is_cancelled_before_the_answer(shop: ToolServer, tasked: Site) -> None:
    """K19, K20: a task that has ended is not cancelled, and `notifications/cancelled` is not for tasks."""
    peer = await tasked.join()
    message = task_call(peer, "wait", gate="g")
    task = answer_of(await peer.send(message))["result"]["task"]["taskId"]
    await until(lambda: shop.seen == ["waiting at g"])
    await peer.cancel(message["id"])
    assert (await state(peer, task))["status"] == "working"
    cancelled = (await ask(peer, "tasks/cancel", taskId=task))["result"]
    assert (cancelled["status"], cancelled["taskId"]) == ("cancelled", task)
    assert (await result(peer, task))["error"]["code"] == -32800
    again = (await ask(peer, "tasks/cancel", taskId=task))["error"]
    assert (again["code"], again["message"]) == (-32602, "This task has ended, and cannot be cancelled")
    await until(lambda: shop.seen == ["waiting at g", "cancelled at g"])


async def test_tools_say_themselves_or_by_the_operator_whether_they_run_as_tasks() -> None:
    """K3: all others are untouched."""
    telling = TellingServer(may="optional", must="required", never="forbidden", silent=None)
    async with serve(telling.server, tasks=("silent=optional",)) as site, serve(telling.server) as plain:
        lists = []
        for peer in [await site.join(), await plain.join(), await site.join("2025-06-18")]:
            tools = (await ask(peer, "tools/list"))["result"]["tools"]
            lists.append({tool["name"]: tool.get("execution", {}).get("taskSupport") for tool in tools})
    assert lists[1] == {"may": "optional", "must": "required", "never": "forbidden", "silent": None}
    assert lists[0] == {**lists[1], "silent": "optional"}
    assert lists[2] == lists[1]


async def test_tools_without_a_word_are_not_announced() -> None:
    """K1: neither tasks nor anything else is added, and the request passes to the server as it is."""
    telling = TellingServer(silent=None, never="forbidden")
    async with serve(telling.server) as site:
        peer = await site.join()
        assert peer.welcome["result"].keys() == {"protocolVersion", "capabilities", "serverInfo"}
        assert "tasks" not in peer.welcome["result"]["capabilities"]
        assert text_of(answer_of(await peer.send(task_call(peer, "silent")))) == "silent ran"
        assert (await ask(peer, "tasks/get", taskId=NOBODYS))["error"]["code"] == -32601


async def test_a_task_where_it_is_forbidden_and_none_where_it_is_required_are_refused() -> None:
    """K4: clients of earlier revisions know no tasks, and get the plain answer."""
    telling = TellingServer(may="optional", must="required", never="forbidden", silent=None)
    async with serve(telling.server) as site:
        peer = await site.join()
        for name in ("never", "silent"):
            refused = answer_of(await peer.send(task_call(peer, name)))["error"]
            assert (refused["code"], refused["message"].partition(":")[0]) == (
                -32601,
                "This tool does not run as a task",
            )
        refused = answer_of(await peer.send(peer.tool("must")))["error"]
        assert (refused["code"], refused["message"].partition(":")[0]) == (-32601, "This tool runs only as a task")
        assert text_of(answer_of(await peer.send(peer.tool("may")))) == "may ran"
        earlier = await site.join("2025-06-18")
        for message in (earlier.tool("must"), task_call(earlier, "never")):
            assert text_of(answer_of(await earlier.send(message))).endswith(" ran")
        task = await begin(peer, "must")
        assert text_of(await result(peer, task["taskId"])) == "must ran"
    assert all("task" not in given for given in telling.given[-1:])


async def test_a_task_where_nothing_is_declared_is_ignored(shop: ToolServer, tasked: Site) -> None:
    """K5: the TypeScript client of 1.32 sends one with `tasks/get` and `tasks/result`."""
    shop.open("g")
    peer = await tasked.join()
    task = (await begin(peer, "wait", gate="g"))["taskId"]
    assert text_of(await ask(peer, "tasks/result", taskId=task, task={})) == "went through g"
    assert (await ask(peer, "tasks/get", taskId=task, task={}))["result"]["status"] == "completed"
    assert "tools" in (await ask(peer, "tools/list", task={}))["result"]
    message = peer.tool("wait", gate="g")
    message["params"]["task"] = "not an object"
    assert answer_of(await peer.send(message))["error"]["code"] == -32602  # as the server says


async def test_ids_are_the_servers_unique_and_cannot_be_guessed(tasked: Site) -> None:
    """K7."""
    peer = await tasked.join()
    message = task_call(peer, "wait", gate="g", task={"taskId": "mine"})
    ids = [answer_of(await peer.send({**message, "id": number}))["result"]["task"]["taskId"] for number in range(9)]
    assert len(set(ids)) == 9
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", name) for name in ids)


async def test_a_task_always_says_its_times_and_how_long_it_is_kept(shop: ToolServer) -> None:
    """K9, K10: whatever the client asks for, and however old it is."""
    async with serve(shop.server, tasks=RULES, task_ttl=7_200.0) as site:
        peer = await site.join()
        task = await begin(peer, "wait", gate="g", task={"ttl": 1, "pollInterval": 1})
        shop.open("g")
        last = await ended(peer, task["taskId"])
        for view in (task, last):
            assert view.keys() == {"taskId", "status", "createdAt", "lastUpdatedAt", "ttl", "pollInterval"}
            assert view["pollInterval"] == 2_000
            assert 7_200_000 <= view["ttl"] < 7_300_000
            assert "2020" < view["createdAt"] <= view["lastUpdatedAt"]


async def test_get_is_not_an_event_stream(tasked: Site) -> None:
    """K11: nor are `cancel` and its errors."""
    peer = await tasked.join()
    task = (await begin(peer, "wait", gate="g"))["taskId"]
    for method, name in (("tasks/get", task), ("tasks/get", NOBODYS), ("tasks/cancel", task), ("tasks/list", None)):
        response = await peer.send(peer.request(method, {"taskId": name}))
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        assert response.headers["mcp-session-id"] == peer.session


async def test_the_result_is_what_the_request_would_have_returned_or_its_error(shop: ToolServer, tasked: Site) -> None:
    """K12: also a JSON-RPC error."""
    peer = await tasked.join()
    failing = (await begin(peer, "boom", code=-32042))["taskId"]
    told = await result(peer, failing)
    plain = (await (await peer.call("boom", code=-32042, id="asks")).rest())[-1]
    assert (told, told["error"]["code"]) == (plain, -32042)
    assert (await ended(peer, failing))["statusMessage"] == "boom"


async def test_what_a_task_sends_names_it_and_comes_on_the_standalone_stream(shop: ToolServer, tasked: Site) -> None:
    """K13, K14, K15, K16, K17, K24: progress, log messages, asks and each change of the status."""
    peer = await tasked.join()
    standalone = await peer.get()
    task = (await begin(peer, "quiz", question="Why?", gate="g", token="t"))["taskId"]
    meta = {RELATED: {"taskId": task}}
    progress, logged = await standalone.message(), await standalone.message()
    assert progress["params"] == {"progressToken": "t", "progress": 1.0, "_meta": meta}
    assert (logged["params"]["data"], logged["params"]["_meta"]) == ("ready?", meta)
    shop.open("g")
    asked = await until_heard(standalone, "elicitation/create")
    assert (asked["params"]["message"], asked["params"]["_meta"]) == ("Why?", meta)
    told = await until_heard(standalone, "notifications/tasks/status")
    assert (told["params"]["status"], "_meta" in told["params"]) == ("input_required", False)
    assert (await state(peer, task))["status"] == "input_required"
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    statuses = [await until_heard(standalone, "notifications/tasks/status") for _ in range(2)]
    assert [each["params"]["status"] for each in statuses] == ["working", "completed"]
    assert {each["params"]["taskId"] for each in statuses} == {task}
    assert statuses[-1]["params"] == {**(over := await ended(peer, task)), **statuses[-1]["params"]}
    assert over["status"] == "completed"
    assert text_of(await result(peer, task)) == "because"


async def test_an_ask_without_a_reader_is_asked_on_an_open_request_for_the_result(
    shop: ToolServer, tasked: Site
) -> None:
    """K16: whether the ask or the request comes first."""
    peer = await tasked.join()
    first = (await begin(peer, "ask", question="Why?"))["taskId"]
    while (await state(peer, first))["status"] != "input_required":
        pass
    waiting = await peer.post(peer.request("tasks/result", {"taskId": first}))
    asked = await until_heard(waiting, "elicitation/create")
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    assert text_of((await waiting.rest())[-1]) == "because"
    second = (await begin(peer, "quiz", question="How?", gate="g"))["taskId"]
    waiting = await peer.post(peer.request("tasks/result", {"taskId": second}))
    await waiting.event()
    await until(lambda: tasked.app.running.count("tasks/result") == 1)
    shop.open("g")
    asked = await until_heard(waiting, "elicitation/create")
    assert asked["params"]["_meta"] == {RELATED: {"taskId": second}}
    await peer.answer(asked, {"action": "accept", "content": {"answer": "so"}})
    assert text_of((await waiting.rest())[-1]) == "so"


async def test_an_ask_is_not_asked_on_a_request_of_another_session(shop: ToolServer, tasked: Site) -> None:
    """K16, K22: an answer in that session would find no ask."""
    peer, later = await tasked.join(), await tasked.join()
    task = (await begin(peer, "quiz", question="Why?", gate="g"))["taskId"]
    waiting = await peer.post(peer.request("tasks/result", {"taskId": task}))
    await waiting.event()
    elsewhere = await later.post(later.request("tasks/result", {"taskId": task}))
    await elsewhere.event()
    await until(lambda: tasked.app.running.count("tasks/result") == 2)
    shop.open("g")
    asked = await until_heard(waiting, "elicitation/create")
    await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
    for wire in (waiting, elsewhere):
        [answer] = await wire.rest()
        assert text_of(answer) == "because"


async def test_progress_comes_until_the_end_and_not_behind_it(shop: ToolServer, tasked: Site) -> None:
    """K17: the token of the first request lives as long as its task."""
    peer = await tasked.join()
    standalone = await peer.get()
    task = (await begin(peer, "count", n=3, gate="c", pauses=[1], token=5))["taskId"]
    heard = [await until_heard(standalone, "notifications/progress")]
    shop.open("c/1")
    await ended(peer, task)
    while (message := await standalone.message())["method"] != "notifications/tasks/status":
        heard.append(message)
    assert [(each["params"]["progressToken"], each["params"]["progress"]) for each in heard] == [(5, 1), (5, 2), (5, 3)]


async def test_a_failed_task_says_the_tools_text(tasked: Site) -> None:
    """K18: at most 2,000 characters of it."""
    peer = await tasked.join()
    task = (await begin(peer, "boom"))["taskId"]
    over = await ended(peer, task)
    told = (await result(peer, task))["result"]
    assert (over["status"], told["isError"]) == ("failed", True)
    assert over["statusMessage"] == told["content"][0]["text"]


async def test_a_foreign_an_unknown_and_an_expired_task_are_one_to_the_byte(shop: ToolServer) -> None:
    """K21, K22: bound to the principal."""
    async with serve(shop.server, auth=Guests(), tasks=RULES) as site:
        ann, bob, gone = [await site.join(token=token) for token in ("ann-1", "bob-1", "bob-2")]
        task, expired = (await begin(ann, "wait", gate="g"))["taskId"], (await begin(gone, "wait", gate="g"))["taskId"]
        await gone.delete()
        for method in ("tasks/get", "tasks/result", "tasks/cancel"):
            told = [await ask(bob, method, taskId=name) for name in (task, expired, NOBODYS, "\x00", 5, None)]
            assert told == [told[0]] * len(told)
            assert told[0]["error"]["code"] == -32602
        shop.open("g")
        again = await site.join(token="ann-2")
        assert text_of(await result(again, task)) == "went through g"


async def test_without_a_principal_the_id_is_the_secret_from_any_session(shop: ToolServer, tasked: Site) -> None:
    """K22: a host that was restarted finds its task, and may cancel it."""
    first, later = await tasked.join(), await tasked.join()
    task, other = [(await begin(first, "wait", gate=gate))["taskId"] for gate in "gh"]
    assert (await ask(later, "tasks/cancel", taskId=other))["result"]["status"] == "cancelled"
    shop.open("g")
    assert text_of(await result(later, task)) == "went through g"
    assert (await ask(later, "tasks/list"))["error"]["code"] == -32601


async def test_a_known_caller_lists_its_tasks_page_by_page(shop: ToolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """K2, K23: everything that `tasks/get` finds; those of others are not there."""
    monkeypatch.setattr("perdure.http.session_tasks.PAGE", 2)
    async with serve(shop.server, auth=Guests(), tasks=RULES) as site:
        ann, bob = await site.join(token="ann-1"), await site.join(token="bob-1")
        tasks = [(await begin(ann, "wait", gate=f"g{number}"))["taskId"] for number in range(5)]
        await begin(bob, "wait", gate="b")
        shop.open("g0")
        await ended(ann, tasks[0])
        again, found, cursor = await site.join(token="ann-2"), list[Message](), Message()
        while True:
            page = (await ask(again, "tasks/list", **cursor))["result"]
            found += page["tasks"]
            if "nextCursor" not in page:
                break
            assert len(page["tasks"]) == 2
            cursor = {"cursor": page["nextCursor"]}
        assert [each["taskId"] for each in found] == tasks
        assert [each["status"] for each in found] == ["completed"] + 4 * ["working"]
        assert [{**each, "ttl": 0} for each in found] == [{**await state(ann, each), "ttl": 0} for each in tasks]
        for bad in ("", "x", 5, "nan~" + NOBODYS, "0x1.0p+1~\x00"):
            assert (await ask(ann, "tasks/list", cursor=bad))["error"]["code"] == -32602


async def test_tasks_count_as_the_calls_of_their_session(shop: ToolServer) -> None:
    """K25: with the one more, the request is refused, and there is no task."""
    async with serve(shop.server, tasks=RULES, max_calls=2) as site:
        peer = await site.join()
        for _ in range(2):
            await begin(peer, "wait", gate="g")
        refused = await peer.send(task_call(peer, "wait", gate="g"))
        assert (refused.status_code, answer_of(refused)["error"]["code"]) == (429, -31004)
        shop.open("g")
        await until(lambda: not site.app.running)
        assert (await begin(peer, "wait", gate="g"))["status"] == "working"


async def test_a_task_has_the_time_of_tasks_when_its_server_stops(shop: ToolServer) -> None:
    """K8: a plain call beside it is answered at once, of unknown outcome."""
    async with serve(shop.server, tasks=RULES, drain_timeout=0.0, task_drain=3_600.0) as site:
        peer = await site.join()
        task = (await begin(peer, "wait", gate="g"))["taskId"]
        plain = await peer.call("wait", gate="h")
        await until(lambda: len(shop.seen) == 2)
        stopping = asyncio.create_task(site.app.drain())
        assert (await plain.rest())[-1]["error"]["code"] == -31001
        assert (await state(peer, task))["status"] == "working"
        shop.open("g")
        await stopping
        assert (await state(peer, task))["status"] == "completed"


async def test_an_outage_is_not_an_unknown_task(shop: ToolServer) -> None:
    """K21: hosts take -32602 for a task that is gone. An open request for a result waits for the store."""
    store = FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, tasks=RULES, complaint=FAILS) as site:
        peer = await site.join()
        task = (await begin(peer, "wait", gate="g"))["taskId"]
        waiting = await peer.post(peer.request("tasks/result", {"taskId": task}))
        await waiting.event()
        store.reads = Fault.RAISES
        for method in ("tasks/get", "tasks/cancel"):
            assert (await ask(peer, method, taskId=task))["error"]["code"] == -31005
        store.works()
        store.writes = Fault.RAISES
        refused = answer_of(await peer.send(task_call(peer, "wait", gate="g")))["error"]
        assert refused["code"] == -31005
        assert (await state(peer, task))["status"] == "working"
        store.works()
        shop.open("g")
        assert text_of((await waiting.rest())[-1]) == "went through g"


async def test_a_fastmcp_server_has_tasks_as_well() -> None:
    """K1, K6, K16."""
    async with serve(fastmcp_tools, tasks=("ask_each=required",)) as site:
        peer = await site.join()
        tools = {tool["name"]: tool for tool in (await ask(peer, "tools/list"))["result"]["tools"]}
        assert tools["ask_each"]["execution"]["taskSupport"] == "required"
        standalone = await peer.get()
        task = (await begin(peer, "ask_each", questions=["Why?"]))["taskId"]
        asked = await until_heard(standalone, "elicitation/create")
        assert asked["params"]["_meta"][RELATED] == {"taskId": task}
        await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
        assert text_of(await result(peer, task)) == "because"


async def test_two_tasks_with_one_key_are_one_call(shop: ToolServer, tasked: Site) -> None:
    """K6, K12: each is a task of its own, and ends with the call's one answer."""
    peer = await tasked.join()
    tasks = []
    for _ in range(2):
        message = task_call(peer, "wait", gate="g")
        message["params"]["_meta"] = {KEY: "order-7"}
        tasks.append(answer_of(await peer.send(message))["result"]["task"]["taskId"])
    assert len(set(tasks)) == 2
    shop.open("g")
    assert [text_of(await result(peer, task)) for task in tasks] == ["went through g"] * 2
    assert [(await ended(peer, task))["status"] for task in tasks] == ["completed"] * 2
    assert shop.seen == ["waiting at g"]


async def test_a_json_server_has_tasks_as_well(shop: ToolServer) -> None:
    """K6, K12."""
    async with serve(shop.server, tasks=RULES, json_response=True) as site:
        peer = await site.join()
        task = (await begin(peer, "wait", gate="g"))["taskId"]
        shop.open("g")
        assert text_of(await result(peer, task)) == "went through g"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_task_is_followed_fetched_and_cancelled_at_another_node(
    shop: ToolServer, tmp_path: Path, kind: str
) -> None:
    """K12, K16, K19: what it says comes to the reader of the session's home; without one, its questions come on an open
    request for the result."""
    opened: Callable[[], Store] = new_stores(kind, tmp_path)
    async with AsyncExitStack() as stack:
        shops = (shop, ToolServer())
        sites = [await stack.enter_async_context(serve(each.server, store=opened(), tasks=RULES)) for each in shops]
        await until(lambda: all(len(site.app.other_nodes()) == 1 for site in sites))
        here = await sites[0].join()
        there = here.through(sites[1])
        unread = (await begin(here, "ask", question="How?"))["taskId"]
        waiting = await there.post(there.request("tasks/result", {"taskId": unread}))
        asked = await until_heard(waiting, "elicitation/create")
        await there.answer(asked, {"action": "accept", "content": {"answer": "so"}})
        assert text_of((await waiting.rest())[-1]) == "so"
        standalone = await here.get()
        asking = (await begin(there, "ask", question="Why?"))["taskId"]
        asked = await until_heard(standalone, "elicitation/create")
        assert asked["params"]["_meta"] == {RELATED: {"taskId": asking}}
        await here.answer(asked, {"action": "accept", "content": {"answer": "because"}})
        assert text_of(await result(here, asking)) == "because"
        first, second = [(await begin(here, "wait", gate=gate))["taskId"] for gate in "gh"]
        waiting = await there.post(there.request("tasks/result", {"taskId": first}))
        shop.open("g")
        assert text_of((await waiting.rest())[-1]) == "went through g"
        assert (await ended(there, first))["status"] == "completed"
        await until(lambda: "waiting at h" in shop.seen)
        assert (await ask(there, "tasks/cancel", taskId=second))["result"]["status"] == "cancelled"
        await until(lambda: "cancelled at h" in shop.seen)
