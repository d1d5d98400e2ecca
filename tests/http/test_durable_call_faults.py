"""Calls of 2026-07-28 while the store fails, while others take them over, and from clients that mean no good."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
from mcp.server.mcpserver import Context

from perdure._core.codes import INVALID_PARAMS, LIMIT_REACHED, STOPPING, STORE_UNAVAILABLE
from perdure._core.durable_calls import MAX_KEY, STATE_PREFIX
from perdure._core.envelope import CANCEL, KEY
from perdure._core.ids import NodeId, RecordKind, SessionId, new_session_id
from perdure.errors import StoreUnavailable
from perdure.http.durable_calls import MAX_RESPONSES
from perdure.store import MemoryStore
from perdure.store.records import CallSnapshot, SessionRecord
from perdure.store.steps import ChangeSession, OpenAsk, OpenStream, Refusals, Step
from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Exchange, Peer
from tests.support.clients.task_client import OUTCOME_UNKNOWN, TAKES_TASKS, Message, call_params, response_in, said
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import Guests, ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.outages import FAILS

pytestmark = pytest.mark.anyio

CAN_BE_ASKED: dict[str, Any] = {"elicitation": {}}
AT_ONCE = 0.0
LATER = 3600.0


async def begin(
    site: Site, method: str, params: Message, capabilities: Any = None, *, token: str | None = None
) -> Exchange:
    body, headers = modern(method, params, capabilities=capabilities)
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return await Peer(port=site.port).begin("POST", body, headers=headers)


async def ask(site: Site, method: str, params: Message, capabilities: Any = None, **how: Any) -> Message:
    async with await begin(site, method, params, capabilities, **how) as exchange:
        return response_in(exchange, await exchange.answer())


async def call(
    site: Site, tool: str, capabilities: Any = None, *, under: str | None = None, **arguments: Any
) -> Message:
    return await ask(site, "tools/call", call_params(tool, under, **arguments), capabilities)


def with_progress(tool: str, **arguments: Any) -> Message:
    return {"name": tool, "arguments": arguments, "_meta": {"progressToken": "how far"}}


class StopsAt(FaultyStore):
    """Holds the steps of one kind until a test says `goes_on`; or fails at them, until a test says otherwise."""

    def __init__(self, kind: type[Step], *, fails: bool = False) -> None:
        super().__init__(MemoryStore())
        self._kind = kind
        self.fails = fails
        self.reached, self.goes_on = asyncio.Event(), asyncio.Event()
        if fails:
            self.goes_on.set()

    def _meets(self, steps: Sequence[Step]) -> bool:
        met = [step for step in steps if isinstance(step, self._kind)]
        return any(not isinstance(step, OpenStream) or bool(step.calls) for step in met)

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        return None if self._meets(steps) else super().commit_now(steps)

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        if self._meets(steps):
            if self.fails:
                raise StoreUnavailable("the disk is full")
            self.reached.set()
            await self.goes_on.wait()
        return await super().commit(steps)


# The store fails


async def test_a_key_is_free_again_if_the_store_failed_before_it_could_tell_whether_the_key_is_taken(
    shop: ToolServer,
) -> None:
    """Live traffic goes on from memory, but for this request: its row may not be held, and its tool does not run."""
    store = FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, complaint=FAILS, on_store_failure="hold") as site:
        store.writes = Fault.RAISES
        refused = await call(site, "count", under="k", n=2)
        assert (refused["status"], said(refused), shop.seen) == (503, STORE_UNAVAILABLE, [])
        assert not site.app.is_busy
        store.works()
        await until(lambda: shop.seen or _tried(site))
        assert shop.seen == ["counted 2"]


async def _tried(site: Site) -> bool:
    response = await call(site, "count", under="k", n=2)
    return response["status"] == 200 and said(response) == "counted to 2"


@pytest.mark.parametrize("mode", ["hold", "refuse"])
async def test_a_client_whose_handle_cannot_be_written_gets_the_answer_itself(shop: ToolServer, mode: str) -> None:
    """Its tool runs: a refusal would make it ask again for what happens already."""
    store = StopsAt(ChangeSession, fails=True)
    async with serve(
        shop.server, store=store, complaint=FAILS, on_store_failure=mode, task_after=0.05, cleanup_interval=LATER
    ) as site:
        params = with_progress("count", n=2, gate="g", pauses=[1])
        async with await begin(site, "tools/call", params, TAKES_TASKS) as exchange:
            await exchange.until_messages(1)
            await until(lambda: site.app.counters.outages)
            shop.open("g/1")
            store.fails = False
            response = response_in(exchange, await exchange.answer())
            assert [message.get("params", {}).get("progress") for message in exchange.messages] == [1, 2, None]
        assert said(response) == "counted to 2"
        assert site.app.counters.tasks_handed_out == 0


async def test_a_refusal_behind_progress_ends_the_event_stream_in_order(shop: ToolServer) -> None:
    store = StopsAt(ChangeSession, fails=True)
    async with serve(shop.server, store=store, complaint=FAILS, on_store_failure="refuse") as site:
        params = with_progress("quiz", question="Why?", gate="g")
        async with await begin(site, "tools/call", params, CAN_BE_ASKED) as exchange:
            await exchange.until_messages(2)
            shop.open("g")
            response = response_in(exchange, await exchange.answer())
        assert (response["id"], said(response)) == (1, STORE_UNAVAILABLE)
        store.fails = False  # or what is left unwritten when it stops would be a complaint


# Another process, and the same moment


async def test_a_call_that_another_process_takes_over_is_answered_as_one_of_unknown_outcome(shop: ToolServer) -> None:
    """Nothing of it can be kept here, and it has neither handle nor key."""
    async with serve(shop.server) as site:
        params = with_progress("count", n=3, gate="g", pauses=[1, 2])
        async with await begin(site, "tools/call", params, CAN_BE_ASKED) as exchange:
            await exchange.until_messages(1)
            [node] = await site.store.nodes()
            [stream] = await site.store.written_by(node.id)
            assert await site.store.claim(stream.id, node=NodeId("x" * 22), held=stream.fence) is not None
            shop.open("g/1")
            response = response_in(exchange, await exchange.answer())
        assert said(response) == OUTCOME_UNKNOWN


async def test_an_answer_right_behind_a_question_is_written_whole(shop: ToolServer) -> None:
    """The question ends the wait for the answer. By then the answer is on its way, to a connection that takes its time
    between the head and the body."""
    store, sent = StopsAt(OpenAsk), list[MutableMapping[str, Any]]()  # what follows the ask is written with it

    @shop.server.tool()
    async def ask_in_vain(ctx: Context) -> str:
        asking = asyncio.create_task(shop.ask("Why?", ctx))
        await store.reached.wait()
        asking.cancel()
        await asyncio.wait({asking})
        asyncio.get_running_loop().call_later(0.05, store.goes_on.set)
        return "never mind"

    async def send(message: MutableMapping[str, Any]) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        sent.append(message)

    body, headers = modern("tools/call", {"name": "ask_in_vain", "arguments": {}}, capabilities=CAN_BE_ASKED)
    accepted = {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "host": "localhost",
    }
    lines = [(name.encode(), value.encode()) for name, value in {**headers, **accepted}.items()]
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": lines, "query_string": b"", "client": None}
    async with serve(shop.server, store=store) as site:
        await site.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert b"never mind" in sent[1]["body"]


# Clients that mean no good


async def test_a_key_that_no_client_may_give_is_refused_and_any_other_taken(site: Site) -> None:
    """Of 1 to 255 characters, none of them a control character."""
    wrong: list[Any] = ["\0", "a\nb", "\x7f", "", "x" * (MAX_KEY + 1), 7]
    for key in wrong:
        refused = await ask(site, "tools/call", {"name": "count", "arguments": {"n": 1}, "_meta": {KEY: key}})
        assert (refused["status"], said(refused)) == (400, INVALID_PARAMS)
        assert f"_meta['{KEY}'] must be a string of 1 to {MAX_KEY} characters" in refused["error"]["message"]
        cancelled = await ask(site, CANCEL, {"key": key})
        assert (cancelled["status"], said(cancelled)) == (400, INVALID_PARAMS)
    for key in (" ", "\u00e9\u0301\U0001f600", "x" * MAX_KEY):
        assert said(await call(site, "count", under=key, n=1)) == "counted to 1"


async def test_a_request_brings_so_many_answers_at_the_most(shop: ToolServer) -> None:
    """Each may be looked for in the store."""
    async with serve(shop.server, task_after=AT_ONCE) as site:
        task = (await call(site, "wait", TAKES_TASKS, gate="g"))["result"]["taskId"]
        for number, status in ((MAX_RESPONSES, 200), (MAX_RESPONSES + 1, 400)):
            given = {f"ask-{'A' * 22}-{each}": {"action": "decline"} for each in range(number)}
            answer = await ask(site, "tasks/update", {"taskId": task, "inputResponses": given}, TAKES_TASKS)
            assert answer["status"] == status
        shop.open("g")


async def test_requests_that_wait_for_a_call_of_another_request_count_as_work(shop: ToolServer) -> None:
    """Else a client could have as many large bodies kept as it has connections."""
    async with serve(shop.server, max_work=300_000, max_share=100) as site:
        params = {**call_params("wait", "k", gate="g"), "ballast": "x" * 50_000}
        joined = [await begin(site, "tools/call", params)]
        await until(lambda: shop.seen)
        joined.append(await begin(site, "tools/call", params))
        await until(lambda: site.app.counters.calls_joined)
        refused = await ask(site, "tools/call", params)
        assert (refused["status"], refused["error"]["code"]) == (503, LIMIT_REACHED)
        shop.open("g")
        for exchange in joined:
            async with exchange:
                assert said(response_in(exchange, await exchange.answer())) == "went through g"


async def test_what_is_done_with_a_task_that_has_ended_leaves_nothing_in_memory(shop: ToolServer) -> None:
    async with serve(shop.server, task_after=AT_ONCE) as site:
        task = (await call(site, "wait", TAKES_TASKS, gate="g"))["result"]["taskId"]
        shop.open("g")
        await until(lambda: site.app.session_info(task) is None)
        given = {"taskId": task, "inputResponses": {"ask-1": {"action": "decline"}}}
        for method, params in (("tasks/update", given), ("tasks/cancel", {"taskId": task})):
            assert "result" in await ask(site, method, params, TAKES_TASKS)
            assert site.app.session_info(task) is None


class Counting(FaultyStore):
    """Writes down what is asked of a call."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.questions: list[str] = []

    async def session(self, session: SessionId) -> SessionRecord | None:
        self.questions.append("session")
        return await super().session(session)

    async def durable_call(self, session: SessionId, *, recent: int) -> CallSnapshot | None:
        self.questions.append("durable_call")
        return await super().durable_call(session, recent=recent)


async def test_a_foreign_call_is_answered_as_one_that_is_not_there_after_the_same_work(shop: ToolServer) -> None:
    """As a task and as a state, in memory and not, while the store works and while it does not."""
    store = Counting()
    async with serve(shop.server, store=store, auth=Guests(), task_after=AT_ONCE) as site:
        call_of_ann = call_params("wait", gate="g")
        handle = await ask(site, "tools/call", call_of_ann, TAKES_TASKS, token="ann")
        foreign, unknown = handle["result"]["taskId"], new_session_id(lambda size: b"?" * size)

        async def refusals(of: str) -> list[tuple[Message, list[str]]]:
            found = []
            for method, params in (
                ("tasks/get", {"taskId": of}),
                ("tools/call", {**call_of_ann, "requestState": STATE_PREFIX + of}),
            ):
                store.questions.clear()
                refused = await ask(site, method, params, TAKES_TASKS, token="bob")
                found.append((refused, list(store.questions)))
            return found

        assert await refusals(foreign) == await refusals(unknown)
        store.reads = Fault.RAISES
        assert await refusals(foreign) == await refusals(unknown)
        store.works()
        shop.open("g")
        await until(lambda: site.app.session_info(foreign) is None)
        assert await refusals(foreign) == await refusals(unknown)


# The server stops


async def test_a_server_that_drains_waits_for_a_call_whose_row_is_being_written(shop: ToolServer) -> None:
    store = StopsAt(OpenStream)
    async with serve(shop.server, store=store) as site:
        calling = asyncio.create_task(call(site, "count", under="k", n=2))
        await store.reached.wait()
        assert site.app.is_busy
        draining = asyncio.create_task(site.app.drain())
        store.goes_on.set()
        await draining
        assert shop.seen == ["counted 2"]
        assert said(await calling) == "counted to 2"


async def test_a_call_whose_row_is_being_written_when_the_server_stops_never_runs(shop: ToolServer) -> None:
    """What runs was ended without it. It is refused, and its key is free at the next process."""
    store = StopsAt(OpenStream)
    async with serve(shop.server, store=store) as site:
        calling = asyncio.create_task(call(site, "count", under="k", n=2))
        await store.reached.wait()
        site.app.begin_stop()
        await until(lambda: site.app._ending is not None and site.app._ending.done())
        store.goes_on.set()
        refused = await calling
        assert (refused["status"], said(refused)) == (503, STOPPING)
    assert shop.seen == []
    assert not await store.count_states(RecordKind.CALL)
