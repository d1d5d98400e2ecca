"""Stopping gently: what runs may finish, what is new goes elsewhere, what does not stop is left behind.

Each test sends real signals to a real process that serves `tests.support.servers.slow_tools`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp_types import TextContent

from tests.support.clients.raw_http import VERSION, Answer, Exchange, Peer, SessionPeer, message
from tests.support.processes.serving import Line, Served, log_lines, serving
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

VERSION_WITHOUT_SESSION = "2026-07-28"
STUBBORN = "tests.support.servers.slow_tools:server"
CUT = Line("ERROR", "serve.cut", "ended without waiting for what does not stop")
#: What a second signal may take on a busy machine: less than the drain. The process itself allows 1.9 seconds.
PROMPT_SECONDS = 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUBBORN_FOLDER", str(tmp_path))
    return tmp_path


@asynccontextmanager
async def started(*options: str) -> AsyncIterator[tuple[Served, Peer]]:
    async with serving(STUBBORN, "--store", "memory:", *options) as served:
        yield served, Peer(port=served.port)


async def drain(served: Served, peer: Peer, how: signal.Signals = signal.SIGTERM) -> None:
    """Send the first signal, and wait until it is heard."""
    served.send(how)
    while (answer := await peer.ask("GET", path="/healthz")).status == 200:
        pass
    assert (answer.status, answer.json) == (503, {"status": "stopping"})


async def running(session: SessionPeer, tool: str, **arguments: Any) -> Exchange:
    """A call whose tool has begun."""
    call = await session.begin_call(tool, **arguments)
    await call.until_messages(1)
    return call


def result_of(answer: Answer) -> str:
    text: str = answer.messages[-1]["result"]["content"][0]["text"]
    return text


async def test_a_running_call_finishes_and_its_reader_gets_the_answer(folder: Path) -> None:
    async with (
        started() as (served, peer),
        await running(await peer.session(), "until_there", name="bread") as call,
    ):
        await drain(served, peer)
        (folder / "bread").touch()
        assert result_of(await call.answer()) == "bread is there"
        assert await served.wait() == 0


@pytest.mark.parametrize("mode", ["auto", VERSION_WITHOUT_SESSION])
async def test_a_stock_client_gets_the_answer_that_a_stop_waits_for(folder: Path, mode: str) -> None:
    """The Python SDK's client asks for `tools/list` after the answer of a tool that it does not know."""
    async with started() as (served, peer), Client(served.url, mode=mode) as client:
        begun = asyncio.Event()

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            begun.set()

        call = asyncio.create_task(client.call_tool("until_there", {"name": "bread"}, progress_callback=on_progress))
        await begun.wait()
        await drain(served, peer)
        (folder / "bread").touch()
        [content] = (await call).content
        assert isinstance(content, TextContent)
        assert content.text == "bread is there"
        assert await served.wait() == 0


async def test_a_stop_says_what_is_waited_for_and_what_a_second_signal_does(folder: Path) -> None:
    async with (
        started("--drain-timeout", "90s") as (served, peer),
        await running(session := await peer.session(), "until_there", name="bread"),
        await running(session, "until_there", name="cake"),
    ):
        await drain(served, peer, signal.SIGINT)
        for name in ("bread", "cake"):
            (folder / name).touch()
        assert await served.wait() == 0
    said = (
        "the server stops and waits for 2 running calls (until_there), up to 90 s; a second Ctrl-C or SIGTERM does not"
    )
    assert log_lines(served.output) == [Line("WARNING", "serve.stopping", f"{said} wait")]


async def test_new_sessions_and_calls_are_refused_while_it_drains(folder: Path) -> None:
    async with started() as (served, peer):
        session = await peer.session()
        async with await running(session, "until_there", name="bread"):
            await drain(served, peer)
            standalone = await session.ask("GET")
            for answer in [await peer.initialize(), await session.call("until_there", name="cake"), standalone]:
                assert (answer.status, answer.header("retry-after")) == (503, "1")
                assert answer.error["code"] == -31006
            (folder / "bread").touch()
            assert await served.wait() == 0


async def test_idle_connections_are_closed_and_answers_close_theirs_while_it_drains(folder: Path) -> None:
    """So a client goes to another process with its next request."""
    async with started() as (served, peer):
        session = await peer.session()
        async with (
            await running(session, "until_there", name="bread") as call,
            await peer.begin("GET", path="/healthz") as idle,
        ):
            assert (await idle.answer()).status == 200
            await drain(served, peer)
            await idle.again(peer.request("GET", path="/healthz"))
            while await idle.read():
                pass
            assert idle.ended
            answer = await session.call("until_there", name="cake")
            assert (answer.status, answer.header("retry-after"), answer.header("connection")) == (503, "1", "close")
            (folder / "bread").touch()
            assert result_of(await call.answer()) == "bread is there"
            assert await served.wait() == 0


async def test_an_idle_reader_is_told_when_to_come_back_and_ended(folder: Path) -> None:
    async with started("--retry", "1500ms") as (served, peer):
        session = await peer.session()
        async with (
            await running(session, "until_there", name="bread") as call,
            await session.begin("GET") as idle,
        ):
            assert await idle.head() == 200
            await drain(served, peer)
            assert (await idle.answer()).body.endswith(b"retry: 1500\n\n")
            assert not call.parser.complete
            (folder / "bread").touch()
            assert await served.wait() == 0


async def test_a_reader_of_a_running_call_may_come_back_while_it_drains(folder: Path) -> None:
    async with started() as (served, peer):
        session = await peer.session()
        async with await running(session, "until_there", name="bread") as call:
            await drain(served, peer)
            call.cut()
            async with await session.resume(call.position) as again:
                assert await again.head() == 200
                (folder / "bread").touch()
                assert result_of(await again.answer()) == "bread is there"
                assert await served.wait() == 0


async def test_an_ask_may_be_answered_while_it_drains() -> None:
    async with started() as (served, peer):
        session = await opened(peer, {"elicitation": {}})
        async with await session.begin_call("ask") as call:
            [ask] = await call.until_messages(1)
            await drain(served, peer)
            result = {"action": "accept", "content": {"answer": "Yes."}}
            answer = json.dumps({"jsonrpc": "2.0", "id": ask["id"], "result": result}).encode()
            assert (await session.ask("POST", answer)).status == 202
            assert result_of(await call.answer()) == "Yes."
            assert await served.wait() == 0


async def test_a_call_may_be_cancelled_while_it_drains() -> None:
    async with started() as (served, peer):
        session = await peer.session()
        async with await running(session, "until_there", id=7, name="bread") as call:
            await drain(served, peer)
            cancelled = message("notifications/cancelled", {"requestId": 7})
            assert (await session.ask("POST", cancelled)).status == 202
            assert (await call.answer()).messages[-1]["error"]["code"] == -32800
            assert await served.wait() == 0


@pytest.mark.parametrize("timeout", ["0", "300ms"])
async def test_what_still_runs_after_the_drain_time_is_settled(timeout: str) -> None:
    async with (
        started("--drain-timeout", timeout) as (served, peer),
        await running(await peer.session(), "until_there", name="bread") as call,
    ):
        served.send(signal.SIGTERM)
        assert (await call.answer()).messages[-1]["error"]["code"] == -31001
        assert await served.wait() == 0


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 0),
        ((signal.SIGINT, signal.SIGTERM), 0),
        ((signal.SIGINT, signal.SIGINT), 1),
    ],
)
async def test_a_second_signal_settles_at_once(signals: tuple[signal.Signals, signal.Signals], status: int) -> None:
    async with (
        started() as (served, peer),
        await running(await peer.session(), "until_there", name="bread") as call,
    ):
        await drain(served, peer, signals[0])
        told = time.monotonic()
        served.send(signals[1])
        assert (await call.answer()).messages[-1]["error"]["code"] == -31001
        ended = await served.wait()
        assert time.monotonic() - told < PROMPT_SECONDS
    # On a machine that is too busy to end in time it is cut off, and says so.
    assert ended == status or (ended, log_lines(served.output)[-1]) == (1, CUT)


async def test_a_second_signal_ends_a_process_whose_event_loop_is_blocked() -> None:
    async with (
        started() as (served, peer),
        await (await peer.session()).begin_call("block") as call,
    ):
        await blocked(peer)
        served.send(signal.SIGTERM)
        # Of two that come within the same moment the system may give one to another thread, and nothing wakes this one.
        await asyncio.sleep(0.3)
        served.send(signal.SIGINT)
        told = time.monotonic()
        assert await served.wait() == 1
        assert time.monotonic() - told < PROMPT_SECONDS
        call.cut()
    assert log_lines(served.output)[-1] == CUT


async def test_a_thread_that_does_not_stop_does_not_hold_the_process() -> None:
    async with (
        started("--drain-timeout", "0") as (served, peer),
        await running(await peer.session(), "thread") as call,
    ):
        served.send(signal.SIGTERM)
        assert (await call.answer()).messages[-1]["error"]["code"] == -31001
        assert await served.wait() == 0
    assert log_lines(served.output)[-1] == CUT


# SIGHUP without workers

#: Starts a program as the leader of a session: without a terminal, or with the one that is named.
LEADER = (
    "import os, sys; os.setsid(); sys.argv[1] and os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
)


@asynccontextmanager
async def led(terminal: str) -> AsyncIterator[tuple[Served, Peer]]:
    argv = (sys.executable, "-c", LEADER, terminal, sys.executable, "-m", "perdure", "serve")
    async with serving(STUBBORN, "--store", "memory:", argv=argv) as served:
        yield served, Peer(port=served.port)


async def test_a_process_without_a_terminal_goes_on_after_a_hangup_and_says_what_to_do() -> None:
    """As systemd's reload does, where the unit says so."""
    async with led("") as (served, peer):
        session = await peer.session()
        served.send(signal.SIGHUP)
        await until(lambda: len(served.output) == 2)
        assert (await session.call("until_there", name=".")).status == 200
        assert await served.stop() == 0
    sentence = "SIGHUP loads no new code without --workers: restart this process"
    assert log_lines(served.output) == [Line("WARNING", "serve.hangup", sentence)]


async def test_a_process_whose_terminal_is_closed_drains(folder: Path) -> None:
    master, slave = os.openpty()
    async with led(os.ttyname(slave)) as (served, peer):
        os.close(slave)
        async with await running(await peer.session(), "until_there", name="bread") as call:
            os.close(master)
            while (await peer.ask("GET", path="/healthz")).status == 200:
                pass
            (folder / "bread").touch()
            assert result_of(await call.answer()) == "bread is there"
            assert await served.wait() == 0


# What others say of a process that is gone


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGTERM, Line("INFO", "node.departed", "node {} has left; its calls are taken over")),
        (signal.SIGKILL, Line("WARNING", "node.dead", "node {} has died; its calls are being settled")),
    ],
)
async def test_a_process_that_left_in_good_order_is_not_called_dead(
    folder: Path, how: signal.Signals, said: Line
) -> None:
    options = ("--store", f"sqlite:{folder}/log.db", "--drain-timeout", "0", "--log-level", "info")
    async with serving(STUBBORN, *options) as first, serving(STUBBORN, *options) as second:
        session = await Peer(port=first.port).session()
        async with await running(session, "look_for", name="bread") as call:
            first.send(how)
            await first.wait()
            (folder / "bread").touch()
            next_life = SessionPeer(port=second.port, headers=session.headers, id=session.id)
            async with await next_life.resume(call.position) as resumed:
                assert result_of(await resumed.answer()) == "bread is there"
        [told] = [line for line in log_lines(second.output) if line.action in ("node.departed", "node.dead")]
        [node] = re.findall("node=(.*)", told.ids)
        assert replace(told, sentence=told.sentence.replace(node, "{}")) == said


async def test_a_call_goes_from_process_to_process_as_they_are_stopped_one_after_the_other(folder: Path) -> None:
    """As in a deploy, of which no process knows that it is the next one."""
    options = ("--store", f"sqlite:{folder}/log.db", "--drain-timeout", "0", "--log-level", "info")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(STUBBORN, *options))
        session = await Peer(port=first.port).session()
        call = await stack.enter_async_context(await running(session, "look_for", name="bread"))
        served = first
        for _ in range(3):
            newer = await stack.enter_async_context(serving(STUBBORN, *options))
            assert await served.stop() == 0
            await until(partial(runs_again, newer))
            served = newer
        (folder / "bread").touch()
        last_life = SessionPeer(port=served.port, headers=session.headers, id=session.id)
        async with await last_life.resume(call.position) as resumed:
            assert result_of(await resumed.answer()) == "bread is there"


def runs_again(served: Served) -> bool:
    return any(line.action == "call.rerun" for line in log_lines(served.output))


async def opened(peer: Peer, capabilities: dict[str, object]) -> SessionPeer:
    """A session of a client that has these abilities."""
    params = {
        "protocolVersion": VERSION,
        "capabilities": capabilities,
        "clientInfo": {"name": "peer", "version": "1"},
    }
    answer = await peer.ask("POST", message("initialize", params, id=0))
    known = answer.header("mcp-session-id")
    assert known
    session = SessionPeer(port=peer.port, headers={"mcp-session-id": known, "mcp-protocol-version": VERSION}, id=known)
    assert (await session.ask("POST", message("notifications/initialized"))).status == 202
    return session


async def blocked(peer: Peer) -> None:
    """Wait until nothing is answered any more."""
    while True:
        try:
            async with asyncio.timeout(0.5):
                await peer.health()
        except TimeoutError:
            return
