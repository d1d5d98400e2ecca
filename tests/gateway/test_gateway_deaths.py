"""The gateway's own process is killed or stopped: its children end with it, and the next process answers each call."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import pytest

from tests.gateway.gateways import OUTCOME_UNKNOWN, begin, error_of, has_process, heard, lines, methods_of, until_method
from tests.support.clients.modern_peer import TAKES_TASKS, CallPeer, message_of, result_of, said
from tests.support.clients.wire_client import Message, Web, progress_of, text_of
from tests.support.processes.serving import Served, serving
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import until
from tests.support.stores.shared_store import shared_address

pytestmark = pytest.mark.anyio


class Running(Protocol):
    def __call__(
        self, *words: str, options: tuple[str, ...] = ()
    ) -> AbstractAsyncContextManager[tuple[Served, Web]]: ...


@pytest.fixture
def address(tmp_path: Path) -> str:
    return shared_address(tmp_path / "log.db")


@pytest.fixture
def running(tmp_path: Path, address: str) -> Running:
    """`perdure serve --stdio …` with the scripted server. `words` are its settings."""
    return partial(_running, tmp_path, address)


@asynccontextmanager
async def _running(
    folder: Path, address: str, *words: str, options: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Served, Web]]:
    notes = (f"starts={folder / 'starts'}", f"runs={folder / 'runs'}")
    command = shlex.join([sys.executable, "-I", "-S", scripted_stdio.__file__, *notes, *words])
    store = ("--store", address, "--eras", "both")
    async with serving(f"--stdio={command}", *store, *options, cwd=folder) as process:
        web = Web(process.url)
        try:
            yield process, web
        finally:
            await web.aclose()


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty if it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def runs(folder: Path) -> list[str]:
    return sorted(lines(folder / "runs"))


async def has_run(folder: Path, count: int) -> None:
    await until(lambda: len(runs(folder)) >= count)


async def children_are_gone(folder: Path) -> None:
    groups = list(map(int, lines(folder / "starts")))
    await until(lambda: not any(map(has_process, groups)))


async def test_gateway_killed_in_a_stdio_call(tmp_path: Path, running: Running) -> None:
    """A session with a call of each kind. The child ignores the end of its input, and ends all the same. G6."""
    go, held = tmp_path / "go", tmp_path / "held"
    async with running("eof=ignore", f"hold=resources/read,{held}") as (process, web):
        peer = await web.join()
        plain = await begin(peer, "plain", {"progress": 3}, {"wait": str(go)})
        steps: list[Message] = [{"progress": 8}, {"wait": str(go)}, {"progress": 20}, {"say": "whole"}]
        marked = await begin(peer, "idempotent", *steps, token=2)
        reading = await peer.post(peer.request("resources/read", {"uri": "note://a"}))
        await reading.event()
        await plain.messages(3)
        shown = await marked.messages(8)
        await until((tmp_path / "held.held").exists)
        await process.kill()
        await children_are_gone(tmp_path)
    async with running() as (_, web):
        peer = peer.through(web)
        assert error_of((await (await peer.get(plain.last_id)).rest())[-1])["code"] == OUTCOME_UNKNOWN
        await has_run(tmp_path, 3)
        go.touch()
        rest = await (await peer.get(marked.last_id)).rest()
        assert progress_of([*shown, *rest]) == list(range(1, 21))
        assert text_of(rest[-1]) == "whole"
        read = (await (await peer.get(reading.last_id)).rest())[-1]
        assert read["result"]["contents"][0]["text"] == "this is note://a"
        assert runs(tmp_path) == ["idempotent", "idempotent", "plain"]


async def test_gateway_killed_in_tasks_and_calls_with_a_key(tmp_path: Path, running: Running) -> None:
    """Clients of 2026-07-28 in front of a server with sessions."""
    go = tmp_path / "go"
    waits: Message = {"do": [{"wait": str(go)}, {"say": "again"}]}
    async with running(options=("--task-after", "0.1")) as (process, _):
        peer = CallPeer(port=process.port)
        tasks = {
            tool: result_of(await peer.call(tool, waits, capabilities=TAKES_TASKS))["taskId"]
            for tool in ("plain", "idempotent")
        }
        keyed = [await peer.begin_call(tool, waits, key=tool) for tool in ("plain", "idempotent")]
        await has_run(tmp_path, 4)
        await process.kill()
        await children_are_gone(tmp_path)
        for exchange in keyed:
            await exchange.aclose()
    async with running() as (process, _):
        peer = CallPeer(port=process.port, capabilities=TAKES_TASKS)
        assert (await peer.until_over(tasks["plain"]))["error"]["code"] == OUTCOME_UNKNOWN
        await has_run(tmp_path, 6)
        go.touch()
        assert said((await peer.until_over(tasks["idempotent"]))["result"]) == "again"
        answers = {
            tool: message_of(await peer.call(tool, waits, key=tool, capabilities={}))
            for tool in ("plain", "idempotent")
        }
        assert error_of(answers["plain"])["code"] == OUTCOME_UNKNOWN
        assert said(answers["idempotent"]["result"]) == "again"
        assert runs(tmp_path) == ["idempotent"] * 4 + ["plain"] * 2


async def test_what_a_session_has_set_is_set_again_by_the_next_gateway(tmp_path: Path, running: Running) -> None:
    """A question, a subscription and a log level; the next process needs no request for it."""
    async with running() as (process, web):
        peer = await web.join()
        for method, params in (
            ("resources/subscribe", {"uri": "note://a"}),
            ("logging/setLevel", {"level": "warning"}),
        ):
            await (await peer.post(peer.request(method, params))).rest()
        wire = await begin(peer, "read_only", {"ask": "elicitation/create", "params": {"message": "name?"}})
        first = await until_method(wire, "elicitation/create")
        await process.kill()
        await children_are_gone(tmp_path)
    async with running() as (_, web):
        await has_run(tmp_path, 2)
        peer = peer.through(web)
        resumed = await peer.get(wire.last_id)
        withdrawn = await until_method(resumed, "notifications/cancelled")
        assert withdrawn["params"]["requestId"] == first["id"]
        second = await until_method(resumed, "elicitation/create")
        await peer.answer(second, {"action": "decline"})
        assert json.loads(text_of((await resumed.rest())[-1])) == {"action": "decline"}
        standalone = await peer.get()
        assert (await until_method(standalone, "notifications/resources/updated"))["params"] == {"uri": "note://a"}
        sent = methods_of(await heard(peer))
        assert sent[:2] == ["initialize", "notifications/initialized"]
        assert set(sent[2:4]) == {"logging/setLevel", "resources/subscribe"}
        assert len(lines(tmp_path / "starts")) == 2


async def test_a_hint_that_was_not_known_is_asked_for(tmp_path: Path, running: Running) -> None:
    """The server had not listed its tools when the gateway was killed, and the next one starts slowly."""
    async with running(f"hold=tools/list,{tmp_path / 'never'}") as (process, web):
        peer = await web.join()
        wire = await begin(peer, "read_only", {"progress": 1}, {"wait": str(tmp_path / "go")}, {"say": "asked"})
        await wire.messages(1)
        await process.kill()
    (tmp_path / "go").touch()
    async with running("sleep=0.5") as (_, web):
        assert text_of((await (await peer.through(web).get(wire.last_id)).rest())[-1]) == "asked"
        assert runs(tmp_path) == ["read_only", "read_only"]


@pytest.mark.long
@pytest.mark.timeout(90)
async def test_a_hint_of_a_server_that_starts_very_slowly(tmp_path: Path, running: Running) -> None:
    """No limit of a server in the same process cuts it. G27."""
    async with running(f"hold=tools/list,{tmp_path / 'never'}") as (process, web):
        peer = await web.join()
        wire = await begin(peer, "read_only", {"progress": 1}, {"wait": str(tmp_path / "go")}, {"say": "asked"})
        await wire.messages(1)
        await process.kill()
    (tmp_path / "go").touch()
    async with running("sleep=15") as (_, web):
        assert text_of((await (await peer.through(web).get(wire.last_id)).rest())[-1]) == "asked"


async def test_a_gateway_that_is_stopped_leaves_what_may_run_again(tmp_path: Path, running: Running) -> None:
    """SIGTERM: the rest gets its answer, no child is left, and the session goes on at the next process."""
    go = tmp_path / "go"
    async with running(options=("--drain-timeout", "0.2")) as (process, web):
        peer = await web.join()
        plain = await begin(peer, "plain", {"progress": 1}, {"wait": str(go)})
        marked = await begin(peer, "idempotent", {"progress": 1}, {"wait": str(go)}, {"say": "left"}, token=2)
        await plain.messages(1)
        await marked.messages(1)
        assert await process.stop() == 0
        assert error_of((await plain.rest())[-1])["code"] == OUTCOME_UNKNOWN
        await children_are_gone(tmp_path)
    go.touch()
    async with running() as (_, web):
        assert text_of((await (await peer.through(web).get(marked.last_id)).rest())[-1]) == "left"
        assert runs(tmp_path) == ["idempotent", "idempotent", "plain"]


@pytest.mark.parametrize("tool", ["plain", "idempotent"])
async def test_the_home_is_killed_in_a_call_that_another_node_accepted(
    tmp_path: Path, running: Running, tool: str
) -> None:
    """The node that accepted it settles it by its hint, and goes on as the home. G51."""
    go = tmp_path / "go"
    async with running() as (home, web), running() as (_, other):
        peer = await web.join()
        elsewhere = peer.through(other)
        wire = await begin(elsewhere, tool, {"progress": 3}, {"wait": str(go)}, {"progress": 5}, {"say": "whole"})
        shown = await wire.messages(3)
        [child] = map(int, lines(tmp_path / "starts"))
        assert psutil.Process(home.process.pid) in psutil.Process(child).parents()
        await home.kill()
        go.touch()
        rest = await wire.rest()
        if tool == "plain":
            assert (progress_of(rest), error_of(rest[-1])["code"]) == ([], OUTCOME_UNKNOWN)
        else:
            assert (progress_of([*shown, *rest]), text_of(rest[-1])) == ([1, 2, 3, 4, 5], "whole")
        assert runs(tmp_path) == [tool] * (1 if tool == "plain" else 2)
        assert await elsewhere.result("read_only", do=[{"say": "next"}]) == "next"


@pytest.mark.parametrize("tool", ["plain", "idempotent"])
async def test_the_home_is_killed_before_it_takes_a_call(tmp_path: Path, running: Running, tool: str) -> None:
    """It hangs when the other node hands the call over, and takes nothing any more, so the call did not run. G51."""
    async with running() as (home, web), running() as (_, other):
        peer = await web.join()
        assert await peer.result("plain", do=[{"say": "up"}]) == "up"
        home.process.send_signal(signal.SIGSTOP)
        wire = await begin(peer.through(other), tool, {"say": "whole"})
        await home.kill()
        assert text_of((await wire.rest())[-1]) == "whole"
        assert runs(tmp_path) == sorted(["plain", tool])  # it ran once, whatever its hint


SESSIONS = 24


async def test_no_process_is_left(tmp_path: Path) -> None:
    """Sessions that end in every way, at random, and others that have not ended when the gateway is stopped. Each child
    has started another process, and does not mind the end of its input. G30."""
    words = [scripted_stdio.__file__, f"starts={tmp_path / 'starts'}", "tree=600", "eof=ignore"]
    program = {"command": sys.executable, "args": ["-I", "-S", *words], "perdure": {"max_caller_processes": SESSIONS}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"scripted": program}}))
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    where = (f"--servers={tmp_path / 'mcp.json'}", "--store", "memory:", "--drain-timeout", "0.1")
    async with serving(*where, cwd=tmp_path) as process:
        web = Web(process.url)

        async def live(way: str) -> None:
            peer = await web.join()
            pid = int(await peer.result("plain", do=[{"pid": True}]))
            match way:
                case "deleted":
                    await peer.delete()
                case "killed" | "terminated":
                    os.kill(pid, signal.SIGKILL if way == "killed" else signal.SIGTERM)
                case "exits":
                    await begin(peer, "plain", {"exit": 3})
                case "deleted in a call":
                    await (await begin(peer, "plain", {"progress": 1}, {"hang": True})).messages(1)
                    await peer.delete()
                case "left in a call":
                    await (await begin(peer, "plain", {"progress": 1}, {"freeze": True})).drop()
                case "asks":
                    await until_method(await begin(peer, "plain", {"ask": "roots/list"}), "roots/list")
                case "floods":
                    await begin(peer, "plain", {"progress": 3_000, "size": 1000})

        ways = ["deleted", "killed", "terminated", "exits", "deleted in a call", "left in a call", "asks", "floods"]
        many = [way for way in ways for _ in range(SESSIONS // len(ways))]
        chance.shuffle(many)
        for few in (many[: SESSIONS // 2], many[SESSIONS // 2 :]):
            await asyncio.gather(*map(live, few))
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) > SESSIONS // 3  # of the sessions that go on
        assert sum("reaper.py" in command_of(one) for one in below) == 1
        await web.aclose()
        assert await process.stop() == 0
        groups = list(map(int, lines(tmp_path / "starts")))
        assert len(groups) >= SESSIONS
        assert not any(map(has_process, groups))
        assert not any(one.is_running() for one in below)
