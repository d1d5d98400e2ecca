"""Stock clients, unchanged, against `perdure serve` through a proxy that loses their connections (R2-R4, P1, P5-P7).

Each story is told with every client. A client sees each progress report once and in order, and its answer, whatever was
lost in between (promises 2 and 3). A second client, which never goes through the proxy, opens the gates.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from tests.clients.node_clients import node_client
from tests.clients.python_clients import python_client, python_session
from tests.clients.stock_client import MODEL_SAYS, USER_SAYS, StockClient, named
from tests.support.processes.serving import BASIC_TOOLS, Served, serving
from tests.support.proxies.cutting_proxy import PRIMING, CuttingProxy, Loss, cutting_proxy

pytestmark = pytest.mark.anyio

#: Stock clients try twice, this far apart.
RETRY = 0.1

Connect = Callable[[str], AbstractAsyncContextManager[StockClient]]

CLIENTS: dict[str, Connect] = {
    "python-client": python_client,
    "python-session": python_session,
    "typescript-1": partial(node_client, "ts1.mjs"),
    "typescript-2": partial(node_client, "ts2.mjs"),
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One event loop for the module, so that its stories share a server; a process for each would take longer."""
    return "asyncio"


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Served]:
    async with serving(BASIC_TOOLS, "--retry", f"{int(RETRY * 1000)}ms") as it:
        yield it


@pytest.fixture
async def proxy(server: Served) -> AsyncIterator[CuttingProxy]:
    async with cutting_proxy(server.port) as it:
        yield it


@pytest.fixture(scope="module")
async def keeper(server: Served) -> AsyncIterator[StockClient]:
    """The keeper of the gates; nobody cuts its connections."""
    async with python_client(server.url) as it:
        yield it


@pytest.fixture
def gate() -> str:
    """A gate of this story alone."""
    return secrets.token_hex(4)


@pytest.fixture(params=named("python-client", "typescript-1", in_all=["python-session", "typescript-2"]))
async def client(request: pytest.FixtureRequest, proxy: CuttingProxy, packages: None) -> AsyncIterator[StockClient]:
    async with CLIENTS[request.param](proxy.url) as it:
        await proxy.answered("GET")  # the standalone stream is there
        yield it
        proxy.release()


def numbers(last: int) -> list[int]:
    return list(range(1, last + 1))


def notices(last: int) -> list[str]:
    return [f"notice://{number}" for number in numbers(last)]


async def test_a_plain_call_reports_its_progress_and_answers(client: StockClient) -> None:
    """P1, A33."""
    call = await client.call("count", n=12)
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)
    assert client.protocol == "2025-11-25"


async def test_what_a_call_says_while_its_client_is_away_arrives_after_the_cut(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """R2, R3, A18."""
    call = await client.call("count", n=12, gate=gate, pauses=[4])
    await client.saw(call, numbers(4))
    proxy.hold()
    proxy.cut()
    await keeper.result("open_gate", name=f"{gate}/4")
    await keeper.result("gate", name=f"{gate}/done")
    proxy.release()
    await proxy.answered("GET", times=3)  # both streams are back
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)


async def test_a_resumed_call_goes_on_live(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """R4, P5, A14."""
    call = await client.call("count", n=12, gate=gate, pauses=[4, 8])
    await client.saw(call, numbers(4))
    proxy.cut(only="POST")
    await proxy.answered("GET", times=2)
    await keeper.result("open_gate", name=f"{gate}/4")
    await client.saw(call, numbers(8))
    await keeper.result("open_gate", name=f"{gate}/8")
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)


async def test_a_cut_in_the_middle_of_an_event_loses_nothing(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """Promise 2."""
    call = await client.call("count", n=12, gate=gate, pauses=[4])
    await client.saw(call, numbers(4))
    cut = proxy.cut_after(re.compile(rb'"progress": ?7'))
    await keeper.result("open_gate", name=f"{gate}/4")
    await cut.passed()
    await proxy.answered("GET", times=2)
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)


async def test_a_cut_right_after_the_priming_event_loses_nothing(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """A9."""
    primed = proxy.passing(PRIMING, only="POST")
    call = await client.call("count", n=12, gate=gate, pauses=[0])
    await primed.passed()
    await client.knows(call, positions=1)
    proxy.cut(only="POST")
    await keeper.result("open_gate", name=f"{gate}/0")
    await proxy.answered("GET", times=2)
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)


async def test_a_resumed_call_that_is_cut_again_right_after_its_priming_event_loses_nothing(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """A9: a resumed stream is primed too, or TypeScript clients forget where they were."""
    call = await client.call("count", n=12, gate=gate, pauses=[4])
    await client.saw(call, numbers(4))
    known = len(call.tokens)
    primed = proxy.passing(PRIMING, only="GET")
    proxy.cut(only="POST")
    await primed.passed()
    await client.knows(call, positions=known + 1)
    assert proxy.cut(only="GET") == 2  # the standalone stream and the resumed one
    await keeper.result("open_gate", name=f"{gate}/4")
    await proxy.answered("GET", times=4)
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)


async def test_a_connection_that_the_server_still_believes_in_is_taken_over(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """R4, A17."""
    call = await client.call("count", n=12, gate=gate, pauses=[4, 8])
    await client.saw(call, numbers(4))
    proxy.cut(only="POST", loss=Loss.CLIENT)
    await proxy.answered("GET", times=2)
    await keeper.result("open_gate", name=f"{gate}/4")
    await client.saw(call, numbers(8))
    await keeper.result("open_gate", name=f"{gate}/8")
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)


@pytest.mark.parametrize("client", named("typescript-1", in_all=["typescript-2"]), indirect=True)
async def test_a_call_that_is_cut_over_and_over_loses_nothing(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    # Not with the Python client: it resumes from the position of its first loss each time, and gives up after two.
    pauses = [2, 4, 6, 8, 10]
    call = await client.call("count", n=12, gate=gate, pauses=pauses)
    for number in pauses:
        await client.saw(call, numbers(number))
        proxy.cut()
        await keeper.result("open_gate", name=f"{gate}/{number}")
    assert await client.answer(call) == "counted to 12"
    assert call.progress == numbers(12)
    assert proxy.requests["GET"] > len(pauses)


async def test_a_tool_that_closes_its_own_connection_is_resumed(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """P7, A10."""
    call = await client.call("close_early", n=12, gate=gate)
    await proxy.answered("GET", times=2)
    await client.saw(call, numbers(6))
    await keeper.result("open_gate", name=gate)
    assert await client.answer(call) == "closed after 6 of 12"
    assert call.progress == numbers(12)


async def test_notices_sent_while_the_standalone_stream_is_cut_arrive(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """R4, S2."""
    await client.result("announce", n=3)
    await client.until(lambda: client.notices == notices(3))
    primed = proxy.passing(PRIMING, only="POST")
    call = await client.call("announce", n=4, start=4, gate=gate)
    await primed.passed()
    proxy.hold()
    assert proxy.cut(only="GET") == 1
    await keeper.result("open_gate", name=gate)
    await keeper.result("gate", name=f"{gate}/done")
    proxy.release()
    await client.until(lambda: client.notices == notices(7))
    assert await client.answer(call) == "announced 4"
    await client.result("announce", n=3, start=8)
    await client.until(lambda: client.notices == notices(10))


async def test_a_standalone_stream_that_is_cut_before_its_first_notice_loses_none(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """A9, on the GET stream."""
    primed = proxy.passing(PRIMING, only="POST")
    call = await client.call("announce", n=3, gate=gate)
    await primed.passed()
    await client.result("count", n=1)  # a round trip: what came before it on the standalone stream was taken in
    proxy.hold()
    assert proxy.cut(only="GET") == 1
    await keeper.result("open_gate", name=gate)
    await keeper.result("gate", name=f"{gate}/done")
    proxy.release()
    await client.until(lambda: client.notices == notices(3))
    assert await client.answer(call) == "announced 3"


async def test_a_standalone_stream_that_the_server_still_believes_in_is_taken_over(
    client: StockClient, proxy: CuttingProxy
) -> None:
    """R4: no 409 because of a connection that reads no more."""
    await client.result("announce", n=3)
    await client.until(lambda: client.notices == notices(3))
    assert proxy.cut(only="GET", loss=Loss.CLIENT) == 1
    await proxy.answered("GET", times=2)
    await client.result("announce", n=3, start=4)
    await client.until(lambda: client.notices == notices(6))


@pytest.mark.parametrize(
    ("tool", "argument", "says"), [("ask", "question", USER_SAYS), ("sample", "prompt", MODEL_SAYS)]
)
async def test_the_answer_to_a_question_finds_the_waiting_call(
    client: StockClient, tool: str, argument: str, says: str
) -> None:
    """P6."""
    assert await client.result(tool, **{argument: "what is six by seven?"}) == says
    assert client.asked == ["what is six by seven?"]


async def test_a_question_whose_connection_is_cut_as_it_arrives_is_asked_once(
    client: StockClient, proxy: CuttingProxy, keeper: StockClient, gate: str
) -> None:
    """P6, promise 2."""
    primed = proxy.passing(PRIMING, only="POST")
    call = await client.call("ask", question="are you there?", gate=gate)
    await primed.passed()
    await client.knows(call, positions=1)
    cut = proxy.cut_after(re.compile(rb"elicitation/create[^\n]*\n\r?\n"))
    await keeper.result("open_gate", name=gate)
    await cut.passed()
    assert await client.answer(call) == USER_SAYS
    assert client.asked == ["are you there?"]


@pytest.mark.parametrize("code", [0, -32050], ids=["result", "jsonrpc-error"])
async def test_a_tool_that_raises_is_answered_once_and_the_session_goes_on(
    client: StockClient, proxy: CuttingProxy, code: int
) -> None:
    """P4."""
    assert (await client.result("boom", code=code)).startswith("error: ")
    await asyncio.sleep(4 * RETRY)  # time in which a client that thinks the answer is still missing asks again
    assert await client.result("count", n=1) == "counted to 1"
    # One more GET at most: TypeScript 1.x does not take a JSON-RPC error for an answer, and asks until it is told 405.
    assert proxy.requests["GET"] <= 2
