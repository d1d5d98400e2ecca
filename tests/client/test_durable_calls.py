"""`perdure.connect` at 2026-07-28, request by request: what is sent again, under which id and key, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import mcp_types as types
import pytest
from mcp.client.session import ClientRequestContext, ClientSession
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import JSONRPCRequest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

import perdure
from perdure._core.codes import UNSUPPORTED_VERSION
from perdure._core.envelope import CANCEL, KEY
from perdure.client.connect import limits_of
from perdure.client.incoming import CallbackLimit, Incoming
from perdure.client.memory import Memory, decode
from perdure.client.modern_era import ModernEra
from perdure.client.transport import Transport
from perdure.remote.call import MOST_RUNS
from perdure.remote.endpoint import Endpoint, http_client
from tests.client.conftest import text
from tests.client.sdk_task_server import SdkTaskServer
from tests.client.test_tasks import BRIEF, EAGER, Person, behind_proxy
from tests.support.clients.modern_requests import MODERN
from tests.support.proxies.cutting_proxy import Loss, cutting_proxy
from tests.support.servers.in_process import under_uvicorn, until
from tests.support.servers.round_tools import server as rounds

pytestmark = pytest.mark.anyio


async def called(task_server: SdkTaskServer, times: int) -> None:
    await until(lambda: len(task_server.requests("tools/call")) == times)


def keys_of(task_server: SdkTaskServer) -> list[str | None]:
    return [params["_meta"].get(KEY) for params in task_server.requests("tools/call")]


async def test_a_call_with_a_key_is_sent_again_until_it_is_answered_and_runs_once(tmp_path: Path) -> None:
    """Each time under a new id. The key was on disk before the request left."""
    task_server = SdkTaskServer(keys=True)
    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(proxy.url, mode=MODERN, state=tmp_path / "s", patience=EAGER) as client,
    ):
        proxy.hold()
        call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
        await until(lambda: decode((tmp_path / "s").read_bytes()).durable_calls)
        [kept] = decode((tmp_path / "s").read_bytes()).durable_calls.values()
        assert task_server.requests("tools/call") == []
        proxy.release()
        for times in (1, 2, 3):
            await called(task_server, times)
            proxy.cut(loss=Loss.CLIENT if times == 2 else Loss.BOTH)
        await until(lambda: len(task_server.requests("tools/call")) == 4)
        task_server.gates["g"].set()
        assert text(await call) == "worked at g"
        await until(lambda: decode((tmp_path / "s").read_bytes()).durable_calls == {})
    assert task_server.runs == ["work"]
    assert keys_of(task_server) == [kept.key] * 4
    assert len(set(task_server.ids("tools/call"))) == 4


async def test_a_refused_connection_costs_no_call_and_never_the_client() -> None:
    """Calls that were not sent wait; when patience ends they fail as not run, and the client continues."""
    task_server = SdkTaskServer(keys=True)
    async with under_uvicorn(task_server.app, complaint=".*") as port, AsyncExitStack() as gate:
        proxy = await gate.enter_async_context(cutting_proxy(port))
        async with perdure.connect(proxy.url, mode=MODERN, patience=BRIEF) as client:
            await gate.aclose()  # from now on no socket listens at the address
            with pytest.raises(perdure.Unreachable):
                await client.call_tool("quick")
            with pytest.raises(perdure.Unreachable):
                await client.list_tools()
            call = asyncio.create_task(client.call_tool("quick"))
            await asyncio.sleep(0)
            proxy.accept()
            async with await asyncio.start_server(proxy.serve, "127.0.0.1", proxy.port):
                assert text(await call) == "done"
                proxy.refuse()  # accepted and reset: it may have arrived
                proxy.cut()
                with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "did not come back" in error.reason):
                    await client.call_tool("quick")
            await proxy.aclose()
    assert task_server.runs == ["quick"]


async def test_without_keys_only_a_tool_that_says_so_is_called_again() -> None:
    task_server = SdkTaskServer()
    async with behind_proxy(task_server) as proxy, perdure.connect(proxy.url, mode=MODERN, patience=EAGER) as client:
        safe = asyncio.create_task(client.call_tool("safe", {"gate": "s"}))
        await until(lambda: task_server.runs == ["safe"])
        proxy.cut()
        await until(lambda: task_server.runs == ["safe"] * 2)
        work = asyncio.create_task(client.call_tool("work", {"gate": "w"}))
        await until(lambda: task_server.runs == ["safe", "safe", "work"])
        proxy.cut()
        with pytest.raises(perdure.OutcomeUnknown) as unknown:
            await work
        assert (unknown.value.tool, unknown.value.arguments) == ("work", {"gate": "w"})
        await until(lambda: len(task_server.runs) == 4)
        task_server.gates["s"].set()
        assert text(await safe) == "worked at s"
    assert task_server.runs == ["safe", "safe", "work", "safe"]
    assert keys_of(task_server) == [None] * 4


async def test_a_tool_that_may_run_twice_does_not_run_for_ever_and_not_at_all_if_the_caller_says_no() -> None:
    task_server = SdkTaskServer()
    async with behind_proxy(task_server) as proxy:
        async with perdure.connect(proxy.url, mode=MODERN, patience=EAGER) as client:
            call = asyncio.create_task(client.call_tool("safe", {"gate": "s"}))
            for run in range(1, MOST_RUNS + 1):
                await called(task_server, run)
                proxy.cut()
            with pytest.raises(perdure.OutcomeUnknown):
                await call
        async with perdure.connect(proxy.url, mode=MODERN, rerun_safe_tools=False) as client:
            call = asyncio.create_task(client.call_tool("safe", {"gate": "s"}))
            await until(lambda: len(task_server.runs) == MOST_RUNS + 1)
            proxy.cut()
            with pytest.raises(perdure.OutcomeUnknown):
                await call
    assert len(task_server.runs) == MOST_RUNS + 1


async def test_reads_are_sent_again_whatever_happens_to_their_connections() -> None:
    """`server/discover` as well, before there is a client at all."""
    task_server = SdkTaskServer()
    async with behind_proxy(task_server) as proxy:
        proxy.cut_after(b"HTTP/1.1 200")
        async with perdure.connect(proxy.url, mode=MODERN, patience=EAGER) as client:
            mark = proxy.cut_after(b"HTTP/1.1 200")
            assert {tool.name for tool in (await client.list_tools()).tools} >= {"work", "safe"}
            await mark.passed()
    for method in ("server/discover", "tools/list"):
        assert len(set(task_server.ids(method))) == 2, method


@pytest.mark.parametrize("kind", ["tasks", "keys"])
async def test_a_cancelled_call_is_cancelled_at_the_server_by_its_task_or_its_key(tmp_path: Path, kind: str) -> None:
    """A broken connection does not cancel it. It is over for the next process as well."""
    task_server = SdkTaskServer(**{kind: True})
    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(proxy.url, mode=MODERN, state=tmp_path / "s") as client,
    ):
        call = asyncio.create_task(client.call_tool("work", {"gate": "g"}))
        await until(lambda: task_server.runs if kind == "keys" else task_server.requests("tasks/get"))
        call.cancel()
        await until(lambda: task_server.cancelled == ["work"])
        with pytest.raises(asyncio.CancelledError):
            await call
    assert kind == "tasks" or [params["key"] for params in task_server.requests(CANCEL)] == keys_of(task_server)
    assert decode((tmp_path / "s").read_bytes()).durable_calls == {}


async def test_a_key_of_the_callers_own_makes_two_calls_one() -> None:
    task_server = SdkTaskServer(keys=True)
    async with behind_proxy(task_server) as proxy, perdure.connect(proxy.url, mode=MODERN) as client:
        meta = cast("types.RequestParamsMeta", {KEY: "order-17"})
        calls = [asyncio.create_task(client.call_tool("work", {"gate": "g"}, meta=meta)) for _ in range(2)]
        await until(lambda: len(task_server.requests("tools/call")) == 2)
        task_server.gates["g"].set()
        assert [text(await call) for call in calls] == ["worked at g"] * 2
    assert task_server.runs == ["work"]
    assert keys_of(task_server) == ["order-17"] * 2


async def test_all_rounds_of_a_call_have_its_key_and_a_lost_one_is_sent_again(tmp_path: Path) -> None:
    """Between two rounds, while the person is asked, the call is on disk."""
    task_server, person = SdkTaskServer(keys=True), Person(one="1", two="2")
    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(
            proxy.url, mode=MODERN, state=tmp_path / "s", elicitation_callback=person, patience=EAGER
        ) as client,
    ):
        call = asyncio.create_task(client.call_tool("ask", {"questions": ["one", "two"]}))
        await until(lambda: len(person.asked) == 2)
        assert len(decode((tmp_path / "s").read_bytes()).durable_calls) == 1
        mark = proxy.cut_after(b"HTTP/1.1 200")
        person.gate.set()
        await mark.passed()
        assert text(await call) == "1 2"
        await until(lambda: decode((tmp_path / "s").read_bytes()).durable_calls == {})
    assert task_server.runs == ["ask"]
    assert len(set(keys_of(task_server))) == 1
    assert len(keys_of(task_server)) == 3
    assert sorted(person.asked) == ["one", "two"]


async def test_a_call_that_is_given_up_between_its_rounds_is_cancelled(tmp_path: Path) -> None:
    task_server, person = SdkTaskServer(keys=True), Person(one="1")
    async with (
        behind_proxy(task_server) as proxy,
        perdure.connect(proxy.url, mode=MODERN, state=tmp_path / "s", elicitation_callback=person) as client,
    ):
        call = asyncio.create_task(client.call_tool("ask", {"questions": ["one"]}))
        await until(lambda: person.asked)
        call.cancel()
        await until(lambda: task_server.cancelled == ["ask"])
    assert decode((tmp_path / "s").read_bytes()).durable_calls == {}


async def test_rounds_of_a_plain_sdk_server_work_as_with_the_sdks_client() -> None:
    async def choose(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"loaf": "rye"})

    async with (
        under_uvicorn(rounds.streamable_http_app(), complaint=".*") as port,
        perdure.connect(f"http://127.0.0.1:{port}/mcp", mode=MODERN, elicitation_callback=choose) as client,
    ):
        assert text(await client.call_tool("order")) == "a rye loaf"


async def test_a_server_without_the_revision_is_told_in_its_own_words() -> None:
    async def legacy_only(scope: Scope, receive: Receive, send: Send) -> None:
        if (b"mcp-protocol-version", MODERN.encode()) in scope.get("headers", ()):
            error = {"code": UNSUPPORTED_VERSION, "message": "too new", "data": {"supported": ["2025-11-25"]}}
            response = JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)
            await response(scope, receive, send)
        else:
            await app(scope, receive, send)

    app = SdkTaskServer().app
    async with under_uvicorn(legacy_only, complaint=".*") as port:
        with pytest.raises(MCPError, match="too new"):
            async with perdure.connect(f"http://127.0.0.1:{port}/mcp", mode=MODERN):
                raise AssertionError("another revision")
    with pytest.raises(perdure.Unreachable):
        async with perdure.connect(f"http://127.0.0.1:{port}/mcp", mode=MODERN):
            raise AssertionError("no server")
    with pytest.raises(perdure.Misuse, match="mode is '2024'"):
        async with perdure.connect(f"http://127.0.0.1:{port}/mcp", mode="2024"):
            raise AssertionError("no such revision")


async def test_a_slow_discovery_is_waited_for_though_the_sdks_client_has_given_it_up() -> None:
    """A person may have to log in. What the SDK's client does after its ten seconds is played here without them."""
    task_server = SdkTaskServer(keys=True)
    async with behind_proxy(task_server) as proxy, perdure.connect(proxy.url, mode=MODERN) as model:
        told = task_server.requests("server/discover")[0]
        info = model.session.discover_result
        assert info is not None
        async with (
            http_client(proxy.url) as http,
            transport_to(Endpoint(http, proxy.url, on_401="")) as (inbound, outbound),
        ):
            proxy.hold()
            ask = JSONRPCRequest(jsonrpc="2.0", id=1, method="server/discover", params=told)
            headers = {"mcp-protocol-version": MODERN, "mcp-method": "server/discover"}
            await outbound.send(SessionMessage(ask, ClientMessageMetadata(headers=headers)))
            handshake = JSONRPCRequest(jsonrpc="2.0", id=2, method="initialize", params={})
            await outbound.send(SessionMessage(handshake))
            proxy.release()
            answers = [(await inbound.receive()).message for _ in range(2)]
            await outbound.send(SessionMessage(ask.model_copy(update={"id": 3})))
            answers.append((await inbound.receive()).message)
    first, refused, again = answers
    assert (first.id, again.id, first.result) == (1, 3, again.result)
    assert (refused.id, refused.error.code) == (2, UNSUPPORTED_VERSION)
    assert refused.error.data["supported"] == info.supported_versions
    assert len(task_server.requests("server/discover")) == 2


@asynccontextmanager
async def transport_to(endpoint: Endpoint) -> AsyncIterator[tuple[Any, Any]]:
    def none() -> ClientSession:
        raise AssertionError("no question")

    incoming = Incoming(Memory(None, endpoint.url), CallbackLimit(), None)
    era = ModernEra(incoming, incoming.route(endpoint, limits_of(EAGER)), session=none, reruns=True)
    async with Transport(era).streams() as streams:
        yield streams


async def test_the_state_says_which_way_the_next_client_goes(tmp_path: Path) -> None:
    """A server of both eras is spoken to in sessions, unless the state was left without one."""
    task_server, state = SdkTaskServer(keys=True), tmp_path / "s"
    async with behind_proxy(task_server) as proxy:
        async with perdure.connect(proxy.url, state=state) as client:
            assert client.session_id is not None
        state.unlink()
        async with perdure.connect(proxy.url, state=state, mode=MODERN) as client:
            assert client.session_id is None
        async with perdure.connect(proxy.url, state=state) as client:
            assert client.protocol_version == MODERN
        async with perdure.connect(proxy.url, state=state, mode="legacy") as client:
            assert client.session_id is not None
