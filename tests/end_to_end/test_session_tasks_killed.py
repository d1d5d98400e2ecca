"""Tasks of 2025-11-25 over the deaths of their processes: none is lost, none runs twice that may not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.clients.recording_client import assert_answered_once, assert_sound, settled
from tests.support.clients.wire_client import Message, Peer, Web, answer_of, text_of
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.crash_points import POSTGRES_WRITER, STEPS, at
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import ON_POSTGRES, shared_address

pytestmark = pytest.mark.anyio

OUTCOME_UNKNOWN = -31001
RULES = ("--task", "put=optional", "--task", "pay=optional", "--retry", "100ms")


def address_of(kind: str, path: Path) -> str:
    return store_url() if kind == "postgres" else shared_address(path / "log.db")


async def begin(peer: Peer, tool: str, /, **arguments: Any) -> str:
    message = peer.tool(tool, **arguments)
    message["params"]["task"] = {}
    found: str = answer_of(await peer.send(message))["result"]["task"]["taskId"]
    return found


async def ask(peer: Peer, method: str, task: str) -> Message:
    return answer_of(await peer.send(peer.request(method, {"taskId": task})))


async def ended(peer: Peer, task: str) -> Message:
    view: Message = {"status": "working"}
    while view["status"] == "working":
        view = (await ask(peer, "tasks/get", task))["result"]
    return view


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_task_whose_process_is_killed_ends_as_its_tool_allows(tmp_path: Path, kind: str) -> None:
    """K8, K12, K24, promise 3: a request for a result that was held goes on in the next process under its id, however
    often its process dies. An unmarked tool runs once; a marked one that dies twice is of unknown outcome."""
    options = ("--store", address_of(kind, tmp_path), *RULES)
    log, gate = tmp_path / "diary", tmp_path / "gate"
    async with serving(GATE_FILE_TOOLS, *options) as server:
        peer = await (web := Web(server.url)).join()
        arguments = {"n": 1, "gate": str(gate), "pauses": [1], "log": str(log)}
        put, pay = [await begin(peer, tool, key=tool, **arguments) for tool in ("put", "pay")]
        twice = await begin(peer, "put", key="twice", **{**arguments, "gate": f"{gate}-twice"})
        await until(lambda: len(diary(log)) == 3)
        held = await peer.post(peer.request("tasks/result", {"taskId": put}, id="held"))
        long = await peer.post(peer.request("tasks/result", {"taskId": twice}, id="long"))
        positions = [(await wire.event()).id for wire in (held, long)]
        await server.kill()
        await web.aclose()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        later = peer.through(web := Web(server.url))
        standalone = await later.get()
        resumed = await later.get(positions[0])
        over = await ended(later, pay)
        assert (over["status"], "outcome unknown" in over["statusMessage"]) == ("failed", True)
        assert (await ask(later, "tasks/result", pay))["error"]["code"] == OUTCOME_UNKNOWN
        while (told := await standalone.message()).get("method") != "notifications/tasks/status":
            pass
        assert (told["params"]["taskId"], told["params"]["status"]) == (pay, "failed")
        await until(lambda: len(diary(log)) == 5)
        open_gate(f"{gate}.1")
        *_, last = await resumed.rest()
        assert (last["id"], text_of(last)) == ("held", "counted to 1")
        await server.kill()
        await web.aclose()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        again = peer.through(web := Web(server.url))
        *_, last = await (await again.get(positions[1])).rest()
        assert (last["id"], last["error"]["code"]) == ("long", OUTCOME_UNKNOWN)
        assert (await ended(again, twice))["status"] == "failed"
        assert text_of(await ask(again, "tasks/result", put)) == "counted to 1"
        assert sorted(key for key, _ in diary(log)) == ["pay", "put", "put", "twice", "twice"]
        await web.aclose()


POINTS = {
    "before the row": at("perdure.sessions.session", "Intake.accept", "enter"),
    "when the early answer is written and not sent": at("perdure.sessions.runtime_link", "RuntimeLink.start", "enter"),
    "when the early answer is on its way": at("perdure.log.reader", "Reader._send", "enter", 2),
    "when the tool has ended and its answer is not written": at("perdure.log.stream", "Stream.append", "enter"),
    "when the final answer is written and its request is not answered": at(
        "perdure.sessions.calls_by_id", "final_answer", "enter"
    ),
}
STORE_POINTS = (
    {"when the row is written and the process does not know": at(POSTGRES_WRITER, "_refusals", "enter")}
    if ON_POSTGRES
    else {
        "in the transaction of the row": at(STEPS, "StreamSteps.open_stream", "leave"),
        "in the transaction of the early answer": at(STEPS, "StreamSteps.append", "leave"),
    }
)
LONG = {"before the row", "in the transaction of the row", "when the early answer is on its way"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in {**POINTS, **STORE_POINTS}]
)
async def test_a_process_that_dies_on_the_way_of_a_task_leaves_none_without_an_end(tmp_path: Path, name: str) -> None:
    """K6, promises 3 and 4: row and early answer are one, an id that was given out resolves, and no tool runs twice."""
    address, log = shared_address(tmp_path / "log.db"), tmp_path / "diary"
    options = ("--store", address, *RULES)
    given, results = list[str](), list[Message]()
    async with serving(GATE_FILE_TOOLS, *options, point={**POINTS, **STORE_POINTS}[name]) as doomed:
        peer = await (web := Web(doomed.url)).join()
        await doomed.arm()
        try:
            given.append(await begin(peer, "pay", n=0, log=str(log), key="pay"))
            results.append(await ask(peer, "tasks/result", given[0]))
        except (httpx2.TransportError, KeyError, IndexError):
            pass  # it died before, or while it answered
        assert await doomed.has_died(), "the point was not reached"
        await web.aclose()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        later = peer.through(web := Web(server.url))
        for task in given:
            over = await ended(later, task)
            told = await ask(later, "tasks/result", task)
            assert over["status"] == ("completed" if "result" in told else "failed")
            assert "result" in told or told["error"]["code"] == OUTCOME_UNKNOWN
        await settled(address)
        await web.aclose()
    assert not results or results[0]["result"]["content"][0]["text"] == "counted to 0"
    assert len(diary(log)) <= 1
    assert_answered_once(address)
    assert_sound(address)


@pytest.mark.long
async def test_a_cancellation_that_its_node_has_not_read_is_done_by_the_next(tmp_path: Path) -> None:
    """K19: meanwhile the client is told that it is on its way."""
    options = ("--store", shared_address(tmp_path / "log.db"), *RULES)
    log = tmp_path / "diary"
    async with serving(GATE_FILE_TOOLS, *options) as doomed, serving(GATE_FILE_TOOLS, *options) as other:
        peer = await (web := Web(doomed.url)).join()
        task = await begin(peer, "put", n=1, gate=str(tmp_path / "gate"), pauses=[1], log=str(log), key="put")
        await until(lambda: len(diary(log)) == 1)
        await until_known(peer.through(second := Web(other.url)), task)
        doomed.send(signal.SIGSTOP)
        there = peer.through(second)
        assert (await ask(there, "tasks/cancel", task))["error"]["code"] == -32603
        await doomed.kill()
        assert (await ended(there, task))["status"] == "cancelled"
        assert len(diary(log)) == 1
        await web.aclose()
        await second.aclose()


async def until_known(peer: Peer, task: str) -> None:
    """Until another node answers for the session."""
    assert (await ask(peer, "tasks/get", task))["result"]["status"] == "working"
