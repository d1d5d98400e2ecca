"""A desktop host, and an MCP server over stdio that `perdure stdio -- COMMAND` keeps alive for it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.stdio import tiny_server
from tests.stdio.served_hosts import FIRST, RESUMED
from tests.stdio.stdio_bridges import PATIENCE, Host, HostedBridge, Message, a_host, text_of
from tests.stdio.test_modern_host import MODERN, begin_call, params, saw_progress
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

MARK = "OF_TEST"
"""A variable by which the processes of a test are found, also those that have lost their parents."""
CHANGED = "notifications/tools/list_changed"


@dataclass(kw_only=True)
class Workbench:
    """A host, and what its programs leave in a folder."""

    host: Host
    folder: Path

    @property
    def starts(self) -> list[int]:
        """The pids of the programs that were started."""
        found = self.folder / "starts"
        return [int(line) for line in found.read_text().split()] if found.exists() else []

    def runs(self, tool: str) -> int:
        found = self.folder / "runs"
        return found.read_text().split().count(tool) if found.exists() else 0

    def command(self, **settings: object) -> list[str]:
        given = {"starts": self.folder / "starts", "runs": self.folder / "runs", **settings}
        words = [f"{name}={value}" for name, value in given.items()]
        return [sys.executable, "-S", str(scripted_stdio.__file__), *words]

    async def start(self, *options: str, command: Sequence[str] = (), **settings: Any) -> HostedBridge:
        command = command or self.command(**settings)
        return await self.host.start(*options, command=command, OF_TEST=str(self.folder))

    async def session(self, *options: str, **settings: Any) -> HostedBridge:
        bridge = await self.start(*options, **settings)
        assert "serverInfo" in await bridge.handshake()
        return bridge

    def processes(self) -> list[int]:
        """All processes of this test that were started for it: programs, what they have started, reapers."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    async def gone(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await until(lambda: not self.processes())


@asynccontextmanager
async def a_workbench(folder: Path) -> AsyncIterator[Workbench]:
    async with a_host(folder, "") as host:
        bench = Workbench(host=host, folder=folder)
        yield bench
    await bench.gone()


def do(*steps: Message) -> Message:
    return {"do": list(steps)}


async def begin(bridge: HostedBridge, tool: str, *steps: Message, token: Any = "t") -> Any:
    """Begin a call, and wait until it has sent progress."""
    seen = bridge.progress().count((token, 1))
    call = bridge.begin_call(tool, token=token, **do({"progress": 1}, *steps))
    await bridge.until(lambda: bridge.progress().count((token, 1)) > seen, "progress")
    return call


async def test_a_program_is_served(folder: Path) -> None:
    """With progress, notifications, questions, and its words on stderr, which are shown under its name."""
    async with a_workbench(folder) as bench:
        bridge = await bench.start()
        assert (await bridge.handshake(elicitation={}))["serverInfo"]["name"] == "scripted"
        assert {tool["name"] for tool in (await bridge.request("tools/list"))["result"]["tools"]} >= {"plain"}
        assert await bridge.call("plain", **do({"stderr": "it is warm"}, {"log": "hot"}, {"say": "hello"})) == "hello"
        call = bridge.begin_call("plain", token=7, **do({"progress": 3}))
        assert text_of(await bridge.answer(call)) == "done"
        assert bridge.progress() == [(7, 1), (7, 2), (7, 3)]
        call = bridge.begin_call("plain", **do({"ask": "elicitation/create", "params": {"message": "who?"}}))
        await bridge.until(lambda: bool(bridge.asked()), "a question")
        bridge.say({"jsonrpc": "2.0", "id": bridge.asked()[0]["id"], "result": {"action": "decline"}})
        assert text_of(await bridge.answer(call)) == '{"action": "decline"}'
        assert "hot" in [message["params"].get("data") for message in bridge.heard if "data" in message["params"]]
        await bridge.logged("perdure: scripted_stdio: it is warm")
        assert await bridge.call("plain", **do({"giant": 5 << 20})) == "x" * (5 << 20)
        assert len(await bridge.call("plain", padding="x" * (5 << 20), **do({"say": "large"}))) == 5
        assert await bridge.end() == 0
        assert len(bench.starts) == 1


async def test_variables_and_the_folder_are_those_of_the_host(folder: Path) -> None:
    """A host passes the variables of an entry to `perdure stdio`."""
    async with a_workbench(folder) as bench:
        bridge = await bench.host.start(
            "--cwd", str(folder), command=bench.command(), OF_TEST=str(folder), GITHUB_TOKEN="secret"
        )
        await bridge.handshake()
        found = await bridge.call("plain", **do({"environment": True}))
        assert '"GITHUB_TOKEN": "secret"' in found
        assert "PERDURE_" not in found
        assert psutil.Process(bench.starts[0]).cwd() == str(folder)
        assert not any("secret" in line for line in bridge.told())


@pytest.mark.parametrize(("tool", "runs"), [("idempotent", 2), ("plain", 1)])
async def test_the_program_is_killed_in_a_call(folder: Path, tool: str, runs: int) -> None:
    """A tool that may run again does, any other has an unknown outcome; log level and subscriptions are repeated."""
    async with a_workbench(folder) as bench:
        bridge = await bench.session()
        await bridge.request("logging/setLevel", {"level": "error"})
        await bridge.request("resources/subscribe", {"uri": "note://a"})
        call = await begin(bridge, tool, {"wait": str(folder / "go")}, {"pid": True})
        os.kill(bench.starts[-1], signal.SIGKILL)
        (folder / "go").touch()
        answer = await bridge.answer(call)
        if tool == "plain":
            assert answer["error"]["code"] == -31001
            assert "SIGKILL" in answer["error"]["message"] + str(answer["error"].get("data"))
        else:
            await until(lambda: len(bench.starts) == 2)
            assert text_of(answer) == str(bench.starts[1])
        assert bench.runs(tool) == runs
        heard = await bridge.call("plain", **do({"log": "quiet"}, {"update": "note://a"}, {"heard": True}))
        assert '"logging/setLevel", "params": {"level": "error"}' in heard
        await bridge.until(lambda: bridge.order.count("notifications/resources/updated") == 2, "updates")
        assert "quiet" not in str(bridge.heard)
        assert CHANGED not in bridge.order, "the tools are the same"
        await bridge.end()


@pytest.mark.parametrize("kills", [30, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(240)])])
async def test_many_kills_of_the_program_lose_no_call(folder: Path, kills: int) -> None:
    """Killed within a call that may run again, between two calls, and within one that may not."""
    async with a_workbench(folder) as bench:
        command = [sys.executable, "-I", "-S", str(tiny_server.__file__), str(folder / "starts")]
        bridge = await bench.start(command=command)
        await bridge.handshake()
        outcomes: list[object] = []
        for number in range(kills):
            gate, tool = folder / f"gate-{number}", "once" if number % 3 == 2 else "safe"
            if number % 3 == 1:
                os.kill(bench.starts[-1], signal.SIGKILL)
                call = bridge.begin_call(tool)
            else:
                call = bridge.begin_call(tool, token=number, gate=str(gate))
                await saw_progress(bridge, number, 1)
                os.kill(bench.starts[-1], signal.SIGKILL)
            gate.touch()
            answer = await bridge.answer(call)
            outcomes.append(answer["error"]["code"] if "error" in answer else text_of(answer))
            if tool == "safe":
                assert outcomes[-1] == str(bench.starts[-1])
        assert [outcome for outcome in outcomes if isinstance(outcome, int)] == [-31001] * (kills // 3)
        answers = {outcome for outcome in outcomes if isinstance(outcome, str)}
        assert len(answers) == kills - kills // 3, "each of another process"
        living = [pid for pid in bench.processes() if pid in bench.starts]
        assert living in ([], bench.starts[-1:])
        assert await bridge.end() == 0


async def test_the_next_bridge_goes_on_with_the_session(folder: Path) -> None:
    """The host ends the bridge, or kills it: session, log level, subscriptions and running calls are kept."""
    async with a_workbench(folder) as bench:
        bridge = await bench.session()
        await bridge.request("logging/setLevel", {"level": "info"})
        await bridge.request("resources/subscribe", {"uri": "note://a"})
        for tool in ("idempotent", "plain"):
            await begin(bridge, tool, {"wait": str(folder / "go")}, {"say": f"{tool} is done"}, token=tool)
        await bridge.logged(FIRST)
        assert await bridge.end() == 0
        await bench.gone()
        bridge = await bench.session()
        await bridge.logged(RESUMED)
        (folder / "go").touch()
        await bridge.until(lambda: len(bridge.reports()) == 2, "the calls of the earlier process")
        found = {report["tool"]: report for report in bridge.reports()}
        assert found["idempotent"]["result"]["content"][0]["text"] == "idempotent is done"
        assert found["plain"]["error"]["code"] == -31001
        heard = await bridge.call("plain", **do({"heard": True}))
        assert '"resources/subscribe", "params": {"uri": "note://a"}' in heard
        await bridge.kill()
        await bench.gone()
        bridge = await bench.session()
        await bridge.logged(RESUMED)
        assert await bridge.call("plain") == "done"


async def test_the_next_bridge_does_not_wait_for_the_last_one(folder: Path) -> None:
    """Its program takes its time to end. Sessions and calls go on in the new one meanwhile."""
    async with a_workbench(folder) as bench:
        first = await bench.session(eof="ignore", term="ignore")
        call = do({"progress": 1}, {"wait": str(folder / "go")}, {"pid": True})
        first.begin_call("idempotent", token="t", **call)
        await saw_progress(first, "t", 1)
        first.close_input()
        second = await bench.session(eof="ignore", term="ignore")
        await second.logged(RESUMED)
        (folder / "go").touch()
        await second.until(lambda: len(second.reports()) == 1, "the call of the first bridge")
        assert second.reports()[0]["result"]["content"][0]["text"] == await second.call("plain", **do({"pid": True}))
        assert not first.ended, "its program takes four seconds"
        assert await first.wait() == 0


async def test_a_log_that_is_taken_away_ends_the_bridge(folder: Path) -> None:
    """The host starts it again, and it begins afresh."""
    async with a_workbench(folder) as bench:
        bridge = await bench.session()
        shutil.rmtree(next(bench.host.tokens.glob("log-*")))
        bridge.begin_call("plain")
        assert await bridge.wait() == 143
        assert any("this process can serve nothing more" in line for line in bridge.told())
        assert await (await bench.session()).call("plain") == "done"


@pytest.mark.parametrize("how", ["the pipe is closed", "SIGTERM", "SIGKILL"])
async def test_nothing_is_left(folder: Path, how: str) -> None:
    """Neither a program that ignores the end of its input and SIGTERM, nor what it has started, nor the reaper."""
    async with a_workbench(folder) as bench:
        bridge = await bench.session(eof="ignore", term="ignore", tree=600)
        await begin(bridge, "plain", {"hang": True})
        assert len(bench.processes()) == 3
        if how == "the pipe is closed":
            assert await bridge.end() == 0
        else:
            sign = signal.Signals[how]
            assert await bridge.kill(sign) == (143 if sign is signal.SIGTERM else -9)
        await bench.gone()


async def test_noise_and_a_slow_start(folder: Path) -> None:
    async with a_workbench(folder) as bench:
        bridge = await bench.start(banner="Welcome!", wait=folder / "ready", stderr="loading")
        greeting = asyncio.create_task(bridge.handshake())
        await bridge.logged("scripted_stdio: loading")
        assert not greeting.done()
        (folder / "ready").touch()
        assert (await greeting)["serverInfo"]["name"] == "scripted"
        await bridge.logged("scripted_stdio writes something to stdout that is not a message: Welcome!")
        assert await bridge.call("plain", **do({"print": "nonsense"}, {"say": "fine"})) == "fine"
        await bridge.end()


async def test_a_program_that_cannot_be_used(folder: Path) -> None:
    """The host's `initialize` is answered with the reason, and works once the reason is gone."""
    async with a_workbench(folder) as bench:
        bridge = await bench.start(command=[str(folder / "server")])
        refused = await bridge.handshake()
        assert (refused["error"]["code"], refused["error"]["data"]["reason"]) == (-31010, "no_program")
        (folder / "server").write_text(f"#!/bin/sh\nexec {' '.join(bench.command())}\n")
        (folder / "server").chmod(0o755)
        assert "serverInfo" in await bridge.handshake()
        await bridge.end()
        bridge = await bench.start(exit=3, stderr="the oven is cold")
        refused = await bridge.handshake()
        assert (refused["error"]["code"], refused["error"]["data"]["reason"]) == (-31010, "died")
        assert "the oven is cold" in refused["error"]["message"]
        await bridge.end()


async def test_two_bridges_alike_have_a_log_and_their_sessions(folder: Path) -> None:
    async with a_workbench(folder) as bench:
        bridges = [await bench.session() for _ in range(2)]
        pids = [await bridge.call("plain", **do({"pid": True})) for bridge in bridges]
        assert sorted(map(int, pids)) == sorted(bench.starts)
        assert len(list(bench.host.tokens.glob("log-*/log.db"))) == 1
        for bridge in bridges:
            assert await bridge.end() == 0


async def test_nothing_is_kept_on_disk_without_resume(folder: Path) -> None:
    async with a_workbench(folder) as bench:
        bridge = await bench.session("--no-resume")
        assert await bridge.call("plain") == "done"
        await bridge.end()
        assert not bench.host.tokens.exists()


async def test_a_log_that_cannot_be_used(folder: Path) -> None:
    """The server works, and its session ends with the bridge."""
    async with a_workbench(folder) as bench:
        await (await bench.session()).end()
        [log] = bench.host.tokens.glob("log-*/log.db")
        log.write_bytes(b"no database " * 1000)
        bridge = await bench.session()
        await bridge.logged("the log is kept in memory, and ends with this process")
        assert await bridge.call("plain") == "done"
        await bridge.end()


async def test_a_host_with_sessions_does_not_wait_for_the_sdk(folder: Path) -> None:
    """To import it takes longer than all else at the start, and only requests of 2026-07-28 need it."""
    command = [sys.executable, "-S", str(scripted_stdio.__file__)]
    imports = folder / "imports"
    with imports.open("wb") as errors:
        bridge = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "importtime", "-m", "perdure", "stdio", "--no-resume", "--", *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    assert bridge.stdin is not None
    assert bridge.stdout is not None
    client = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "host", "version": "1"}}
    requests = {"initialize": client, "tools/list": {}, "tools/call": {"name": "plain", "arguments": {"do": []}}}
    try:
        for method, given in requests.items():
            request = {"jsonrpc": "2.0", "id": method, "method": method, "params": given}
            bridge.stdin.write(json.dumps(request).encode() + b"\n")
            while (answer := json.loads(await bridge.stdout.readline())).get("id") != method:
                pass  # a notification
            assert "result" in answer
    finally:
        bridge.stdin.close()
        await bridge.wait()
    lines = imports.read_text().splitlines()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    assert "perdure" in imported
    assert imported.isdisjoint({"mcp", "mcp_types", "pydantic", "jwt", "cryptography", "uvicorn"})


# 2026-07-28


async def test_a_call_of_2026_07_28_outlives_the_program_and_the_bridge(folder: Path) -> None:
    """The program has sessions, and the host has none. A retry of the host joins the call."""
    async with a_workbench(folder) as bench:
        bridge = await bench.start()
        assert MODERN in (await bridge.request("server/discover", params()))["result"]["supportedVersions"]
        steps = do({"progress": 1}, {"wait": str(folder / "go")}, {"say": "well done"})
        call = begin_call(bridge, "idempotent", token="t", **steps)
        await saw_progress(bridge, "t", 1)
        os.kill(bench.starts[-1], signal.SIGKILL)
        await until(lambda: bench.runs("idempotent") == 2)
        plain = begin_call(bridge, "plain", token="p", **do({"progress": 1}, {"kill": True}))
        assert (await bridge.answer(plain))["error"]["code"] == -31001
        (folder / "go").touch()
        assert text_of(await bridge.answer(call)) == "well done"
        (folder / "go").unlink()
        call = begin_call(bridge, "read_only", token="r", **steps)
        await saw_progress(bridge, "r", 1)
        await bridge.kill()
        await bench.gone()
        bridge = await bench.start()
        again = begin_call(bridge, "read_only", **steps)
        await until(lambda: bench.runs("read_only") == 2)
        (folder / "go").touch()
        assert text_of(await bridge.answer(again)) == "well done"
        assert bench.runs("read_only") == 2
        await bridge.end()


async def test_a_host_that_is_started_again_finds_its_task(folder: Path) -> None:
    """It declares tasks, keeps the handle, and asks for it as another process."""
    tasks: Message = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
    async with a_workbench(folder) as bench:
        bridge = await bench.start()
        steps = do({"wait": str(folder / "go")}, {"say": "baked"})
        asked = params({"name": "idempotent", "arguments": steps}, **tasks)
        handle = (await bridge.request("tools/call", asked))["result"]["taskId"]
        await bridge.end()
        async with a_host(folder, "") as other:
            bridge = await Workbench(host=other, folder=folder).start()
            (folder / "go").touch()
            status = ""
            while status != "completed":
                task = (await bridge.request("tasks/get", params({"taskId": handle}, **tasks)))["result"]
                status = task["status"]
            assert task["result"]["content"][0]["text"] == "baked"
            await bridge.end()


# --watch

SERVER = """\
import runpy, sys
sys.argv[1:] = ["tools=%s", "starts=%s"]
runpy.run_path(%r, run_name="__main__")
"""


def save(bench: Workbench, tools: str, *, text: str = "") -> None:
    """Write as many editors do: another file, which takes the name of the first."""
    text = text or SERVER % (tools, bench.folder / "starts", str(scripted_stdio.__file__))
    (bench.folder / "code" / "server.py~").write_text(text)
    (bench.folder / "code" / "server.py~").replace(bench.folder / "code" / "server.py")


async def tools_of(bridge: HostedBridge) -> set[str]:
    return {tool["name"] for tool in (await bridge.request("tools/list"))["result"]["tools"]}


@pytest.mark.parametrize("watched", ["code", "code/server.py"])
async def test_new_code_is_loaded_and_the_session_goes_on(folder: Path, watched: str) -> None:
    """The host is notified that tools have changed. A call that runs has a moment; then its hint decides. Code that
    cannot run is not the end."""
    async with a_workbench(folder) as bench:
        (folder / "code").mkdir()
        save(bench, "old")
        bridge = await bench.start(
            "--watch", str(folder / watched), command=[sys.executable, str(folder / "code" / "server.py")]
        )
        await bridge.handshake()
        assert "old" in await tools_of(bridge)
        await bridge.logged("is watched")
        slow = await begin(bridge, "idempotent", {"wait": str(folder / "go")}, {"pid": True}, token="slow")
        quick = await begin(bridge, "plain", {"wait": str(folder / "soon")}, {"say": "in time"}, token="quick")
        save(bench, "new")
        await bridge.logged("server.py changed; server is started again")
        (folder / "soon").touch()
        assert text_of(await bridge.answer(quick)) == "in time"
        await bridge.until(lambda: CHANGED in bridge.order, "a change of the tools")
        (folder / "go").touch()
        assert text_of(await bridge.answer(slow)) == str(bench.starts[1]), "it runs again with the new code"
        assert "new" in await tools_of(bridge)
        save(bench, "", text="oven = (\n")
        await bridge.logged("SyntaxError")
        for number in range(20):  # as a checkout of another branch does
            save(bench, f"newest-{number}")
        await bridge.until(lambda: bridge.order.count(CHANGED) >= 2, "another change")

        async def has_newest() -> bool:
            return "newest-19" in await tools_of(bridge)

        await until(has_newest)
        assert await bridge.end() == 0


async def test_a_host_of_2026_07_28_learns_of_new_code(folder: Path) -> None:
    async with a_workbench(folder) as bench:
        (folder / "code").mkdir()
        save(bench, "old")
        command = [sys.executable, str(folder / "code" / "server.py")]
        bridge = await bench.start("--watch", str(folder / "code"), command=command)
        listed = (await bridge.request("tools/list", params()))["result"]["tools"]
        assert "old" in {tool["name"] for tool in listed}
        bridge.begin("subscriptions/listen", params({"notifications": {"toolsListChanged": True}}))
        await bridge.until(lambda: "notifications/subscriptions/acknowledged" in bridge.order, "that it listens")
        await bridge.logged("is watched")
        save(bench, "new")
        while True:
            cues = bridge.order.count(CHANGED)
            listed = (await bridge.request("tools/list", params()))["result"]["tools"]
            if "new" in {tool["name"] for tool in listed}:
                break
            await bridge.until(lambda cues=cues: bridge.order.count(CHANGED) > cues, "a change of the tools")  # type: ignore[misc]
        await bridge.end()
