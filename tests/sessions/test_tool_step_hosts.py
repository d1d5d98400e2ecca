"""Steps of tools in every kind of server, in both eras, with their metrics, spans and log lines.

A tool does its steps and stands still; its process is stopped; the next one on the same file goes on.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.from_thread
import mcp_types as types
import pytest
from fastmcp import FastMCP
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

import perdure
from perdure.store.interface import Store
from perdure.store.steps import Append, OpenStream, PutCall, PutToolStep, Refusals, Step
from tests.support.clients.modern_peer import ALL_ASKS, TAKES_TASKS, CallPeer, accept, result_of
from tests.support.clients.task_client import Balancer, TaskClient, said
from tests.support.clients.wire_client import Peer, Wire, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.stores.faulty_store import FaultyStore
from tests.support.stores.shared_store import SharedStore
from tests.telemetry.tracing import traced

pytestmark = pytest.mark.anyio


@dataclass
class Shop:
    """What a tool `order` does: two steps and a sleep, and in the first run it stands still behind them."""

    effects: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    standing: asyncio.Event = field(default_factory=asyncio.Event)

    def effect(self, name: str) -> str:
        self.effects[name] += 1
        return f"{name} {self.runs}"

    async def slow_effect(self, name: str) -> str:
        await asyncio.sleep(0)
        return self.effect(name)

    async def order(self) -> str:
        self.runs += 1
        price = await perdure.step("price", self.slow_effect, "price", again=True)
        charge = await perdure.step("charge", self.effect, "charge")
        await perdure.sleep(0.01)
        await self.stand()
        mails = await asyncio.gather(*(perdure.step(name, self.effect, name) for name in ("to me", "to you")))
        return ", ".join([price, charge, *mails])

    def order_sync(self) -> str:
        self.runs += 1
        price = perdure.step_sync("price", self.effect, "price", again=True)
        charge = perdure.step_sync("charge", self.effect, "charge")
        anyio.from_thread.run(self.stand)
        mails = [perdure.step_sync(name, self.effect, name) for name in ("to me", "to you")]
        return ", ".join([price, charge, *mails])

    async def stand(self) -> None:
        if self.runs == 1:
            self.standing.set()
            await asyncio.Event().wait()


def of_sdk(shop: Shop) -> object:
    server = MCPServer("sdk", version="1", log_level="CRITICAL")

    @server.tool(meta=perdure.RESUMABLE)
    async def order() -> str:
        return await shop.order()

    return server


def of_sdk_in_a_thread(shop: Shop) -> object:
    server = MCPServer("sdk", version="1", log_level="CRITICAL")

    @server.tool(meta=perdure.RESUMABLE)
    def order() -> str:
        return shop.order_sync()

    return server


def of_fastmcp(shop: Shop) -> object:
    server: FastMCP = FastMCP("fast", version="1")

    @server.tool(meta=perdure.RESUMABLE)
    async def order() -> str:
        return await shop.order()

    return server


def of_fastmcp_in_a_thread(shop: Shop) -> object:
    server: FastMCP = FastMCP("fast", version="1")

    @server.tool(meta=perdure.RESUMABLE)
    def order() -> str:
        return shop.order_sync()

    return server


def low_level(shop: Shop) -> object:
    tool = types.Tool.model_validate({"name": "order", "inputSchema": {"type": "object"}, "_meta": perdure.RESUMABLE})

    async def list_tools(ctx: ServerRequestContext[Any, Any], _: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool])

    async def call_tool(ctx: ServerRequestContext[Any, Any], _: Any) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(type="text", text=await shop.order())])

    return Server("low", version="1", on_list_tools=list_tools, on_call_tool=call_tool)


async def as_task(server: object, shop: Shop, path: Path) -> str:
    balancer = Balancer(ports=[])
    client = TaskClient(balancer=balancer)
    async with serve(server, store=SharedStore(path), task_after=0.0, drain_timeout=0.0) as site:
        balancer.ports[:] = [site.port]
        task = await client.task("order")
        await shop.standing.wait()
    async with serve(server, store=SharedStore(path)) as site:
        balancer.ports[:] = [site.port]
        return str(said(await client.outcome(task)))


async def in_a_session(server: object, shop: Shop, path: Path) -> str:
    async with serve(server, store=SharedStore(path), drain_timeout=0.0) as site:
        peer = await site.join()
        wire = await peer.call("order")
        position = (await wire.event()).id
        await shop.standing.wait()
    async with serve(server, store=SharedStore(path)) as site:
        [*_, answer] = await (await peer.through(site).get(position)).rest()
        return text_of(answer)


@pytest.mark.parametrize("call", [as_task, in_a_session])
@pytest.mark.parametrize("server", [of_sdk, of_sdk_in_a_thread, of_fastmcp, of_fastmcp_in_a_thread, low_level])
async def test_a_tool_of_any_server_goes_on_in_either_era(
    server: Callable[[Shop], object], call: Callable[[object, Shop, Path], Awaitable[str]], tmp_path: Path
) -> None:
    shop = Shop()
    assert await call(server(shop), shop, tmp_path / "log.db") == "price 1, charge 1, to me 2, to you 2"
    assert shop.effects == {"price": 1, "charge": 1, "to me": 1, "to you": 1}


# What operators see


async def test_steps_have_spans_below_their_call_and_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps that return have no span: nothing is done."""
    caplog.set_level("INFO", logger="perdure")
    shop = Shop()
    server = of_sdk(shop)
    with traced() as trace:
        async with serve(server, store=SharedStore(tmp_path / "log.db"), drain_timeout=0.0) as site:
            peer = await site.join()
            wire = await peer.call("order")
            position = (await wire.event()).id
            await shop.standing.wait()
            counted = await counts(site)
        [*_, first, second] = trace.named("perdure.step")
        await until(lambda: trace.named("tools/call order"))
        [handler] = trace.named("tools/call order")
        assert handler.context is not None
        for span, name in ((first, "price"), (second, "charge")):
            assert span.attributes == {"perdure.step": name}
            assert span.parent is not None
            assert span.parent.span_id == handler.context.span_id
        assert counted == {("step", "ended"): 2, ("step", "failed"): 0, ("sleep", "ended"): 1, ("ask", "ended"): 0}
        async with serve(server, store=SharedStore(tmp_path / "log.db")) as site:
            await (await peer.through(site).get(position)).rest()
            assert (await counts(site))["step", "ended"] == 2
            assert "perdure_tool_steps_replayed_total" in (await page_of(site))
        later = [(span.attributes or {})["perdure.step"] for span in trace.named("perdure.step")[2:]]
        assert sorted(map(str, later)) == ["to me", "to you"]  # which of two at once ends first is not certain
    [again] = [record.getMessage() for record in caplog.records if getattr(record, "action", "") == "call.rerun"]
    assert again.endswith("3 steps return")


async def page_of(site: Site) -> str:
    return str((await site.http.get(f"http://127.0.0.1:{site.port}/metrics")).text)


async def counts(site: Site) -> dict[tuple[str, str], int]:
    found = re.findall(r'perdure_tool_steps_total\{.*kind="(\w+)",outcome="(\w+)"\} (\d+)', await page_of(site))
    return {(kind, outcome): int(number) for kind, outcome, number in found}


class Watched(FaultyStore):
    """Remembers the commits that concern calls: each as the names of its steps."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.commits: list[list[str]] = []

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        refusals = super().commit_now(steps)
        if refusals is not None:
            self._note(steps)
        return refusals

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        self._note(steps)
        return await self._inner.commit(steps)

    def _note(self, steps: Sequence[Step]) -> None:
        kinds = (OpenStream, Append, PutCall, PutToolStep)
        if of_calls := [type(step).__name__ for step in steps if isinstance(step, kinds)]:
            self.commits.append(of_calls)


async def test_a_tool_without_steps_writes_no_row_and_commits_as_often_as_any_other(tmp_path: Path) -> None:
    """Its request, and its answer."""
    server = MCPServer("plain", version="1", log_level="CRITICAL")

    @server.tool(meta=perdure.RESUMABLE)
    async def plain() -> str:
        return "done"

    store = Watched(SharedStore(tmp_path / "log.db"))
    async with serve(server, store=store) as site:
        peer = await site.join()
        store.commits.clear()
        await (await peer.call("plain")).rest()
        assert store.commits == [["OpenStream"], ["Append"]]
        assert site.app.counters.snapshot()["tool_steps_ended"] == 0


# Questions


def asking(got: list[list[str]], standing: asyncio.Event) -> MCPServer[Any]:
    """A tool that asks the person, the model and for roots, and stands still in its first run."""
    server = MCPServer("asks", version="1", log_level="CRITICAL")

    @server.tool(meta=perdure.RESUMABLE)
    async def ask(ctx: Context) -> str:
        told = [str((await ctx.elicit("Why?", Answer)).data)]  # type: ignore[union-attr]
        message = types.SamplingMessage(role="user", content=types.TextContent(type="text", text="Write!"))
        sampling = types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[message], max_tokens=9))
        sampled = await ctx.session.send_request(sampling, types.CreateMessageResult)
        assert isinstance(sampled.content, types.TextContent)
        roots = await ctx.session.send_request(types.ListRootsRequest(), types.ListRootsResult)
        got.append([*told, sampled.content.text, *(str(root.uri) for root in roots.roots)])
        if len(got) == 1:
            standing.set()
            await asyncio.Event().wait()
        return "done"

    return server


class Answer(BaseModel):
    answer: str


SAID = ["answer='so'", "a poem", "file:///home"]


def answer_to(ask: dict[str, Any], asked: list[str]) -> dict[str, Any]:
    asked.append(ask["method"])
    answers: dict[str, dict[str, Any]] = {
        "elicitation/create": {"action": "accept", "content": {"answer": "so"}},
        "sampling/createMessage": {"role": "assistant", "content": {"type": "text", "text": "a poem"}, "model": "m"},
        "roots/list": {"roots": [{"uri": "file:///home"}]},
    }
    return answers[ask["method"]]


ASKED = ["elicitation/create", "sampling/createMessage", "roots/list"]


async def test_no_kind_of_question_is_asked_again_in_a_session(tmp_path: Path) -> None:
    """Also what a tool asks on the session's own channel."""
    got, standing, asked = list[list[str]](), asyncio.Event(), list[str]()
    server = asking(got, standing)
    async with serve(server, store=SharedStore(tmp_path / "log.db"), drain_timeout=0.0) as site:
        peer = Peer(site, capabilities={"elicitation": {}, "sampling": {}, "roots": {}})
        await peer.initialize()
        wire, other = await peer.call("ask"), await peer.get()
        position = (await wire.event()).id

        async def answer(stream: Wire) -> None:
            async for message in stream:
                if "method" in message and "id" in message:
                    response = {"jsonrpc": "2.0", "id": message["id"], "result": answer_to(message, asked)}
                    assert (await peer.send(response)).status_code == 202

        answering = [asyncio.create_task(answer(stream)) for stream in (wire, other)]
        await standing.wait()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
    async with serve(server, store=SharedStore(tmp_path / "log.db")) as site:
        messages = await (await peer.through(site).get(position)).rest()
        assert text_of(messages[-1]) == "done"
    assert (got, asked) == ([SAID, SAID], ASKED)


@pytest.mark.parametrize("takes_tasks", [True, False])
async def test_no_kind_of_question_is_asked_again_in_a_task_or_a_round(takes_tasks: bool, tmp_path: Path) -> None:
    got, standing, asked = list[list[str]](), asyncio.Event(), list[str]()
    server = asking(got, standing)
    capabilities = {**ALL_ASKS, **(TAKES_TASKS if takes_tasks else {})}
    settings: dict[str, Any] = {"task_after": 0.0, "drain_timeout": 0.0}
    async with serve(server, store=SharedStore(tmp_path / "log.db"), **settings) as site:
        peer = CallPeer(port=site.port, capabilities=capabilities)
        state = result_of(await peer.call("ask"))
        for _ in ASKED:
            if takes_tasks:
                questions = await peer.until_asked(state["taskId"])
                await peer.update(state["taskId"], {name: answer_to(ask, asked) for name, ask in questions.items()})
            else:
                responses = {name: answer_to(ask, asked) for name, ask in state["inputRequests"].items()}
                waiting = asyncio.create_task(peer.round("ask", state, responses))
                await asyncio.wait((waiting, asyncio.create_task(standing.wait())), return_when="FIRST_COMPLETED")
                state = result_of(waiting.result()) if waiting.done() else state
        await standing.wait()
    async with serve(server, store=SharedStore(tmp_path / "log.db")) as site:
        peer = peer.through(site.port)
        if takes_tasks:
            assert (await peer.until_over(state["taskId"]))["status"] == "completed"
        else:
            await waiting  # the server that stopped asks to come again
            assert result_of(await peer.round("ask", state, responses))["resultType"] == "complete"
    assert (got, asked) == ([SAID, SAID], ASKED)


def in_rounds(shop: Shop) -> MCPServer[Any]:
    """A tool that does its steps in each round, asks twice the same by its results, and then does one more."""
    server = MCPServer("rounds", version="1", log_level="CRITICAL")
    form = {"type": "object", "properties": {"answer": {"type": "string"}}}
    question = types.ElicitRequest(params=types.ElicitRequestFormParams(message="Buy it?", requested_schema=form))

    @server.tool(meta=perdure.RESUMABLE)
    async def order(ctx: Context) -> str | types.InputRequiredResult:
        shop.runs += 1
        values = [await perdure.step(name, shop.effect, name) for name in ("price", "charge")]
        await perdure.sleep(0)
        told = {name: getattr(answer, "content", None) for name, answer in (ctx.input_responses or {}).items()}
        if "last" not in told:
            return types.InputRequiredResult(input_requests={"last" if "first" in told else "first": question})
        values.append(await perdure.step("mail", shop.effect, "mail"))
        if shop.runs == 3:
            shop.standing.set()
            await asyncio.Event().wait()
        return ", ".join([*values, str(told)])

    return server


async def test_a_tool_that_asks_by_its_result_does_each_step_once_in_all_rounds(tmp_path: Path) -> None:
    """Also in the next process, which plays the rounds again with what was answered."""
    shop, asked = Shop(), list[str]()
    server = in_rounds(shop)
    async with serve(server, store=SharedStore(tmp_path / "log.db"), task_after=0.0, drain_timeout=0.0) as site:
        peer = CallPeer(port=site.port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        task = result_of(await peer.call("order"))["taskId"]
        questions: dict[str, Any] = {}
        for number in range(2):
            questions = await peer.until_asked(task, other_than=questions)
            asked += [ask["params"]["message"] for ask in questions.values()]
            await peer.update(task, {name: accept(answer=str(number)) for name in questions})
        await shop.standing.wait()
    async with serve(server, store=SharedStore(tmp_path / "log.db")) as site:
        view = await peer.through(site.port).until_over(task)
    assert said(view) == "price 1, charge 1, mail 3, {'last': {'answer': '1'}}"
    assert asked == ["Buy it?", "Buy it?"]
    assert shop.effects == {"price": 1, "charge": 1, "mail": 1}
