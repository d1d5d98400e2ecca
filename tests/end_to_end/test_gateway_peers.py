"""What other gateways do when a process dies, run beside Perdure, so that docs/comparison.md stays true.

Each gateway serves the same program, which keeps no promise of its own, and meets the same deaths. `SEEN` is the table
of the page. The test fails where a gateway does something else, so that the page follows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest

from perdure._core.sse import Decoder
from tests.support.clients.wire_client import EVENTS, Ended, Message, Peer, Web, Wire, progress_of
from tests.support.peers.gateways import GATEWAY_PEERS, NotInstalled
from tests.support.processes.starting import ROOT
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import until
from tests.support.stores.postgres import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.long]

#: Seconds after which a client is taken to wait for ever: Perdure, and each gateway that answers at all, needs a tenth.
PATIENCE = 20.0
NO_ANSWER = "no answer"

SEEN = {
    "Perdure": {
        "two clients": "a process each",
        "progress": "[1, 2, 3]",
        "killed between calls": "result",
        "the other client": "result",
        "a new client": "result",
        "killed in a call, plain": "-31001",
        "the next call, plain": "result",
        "killed in a call, idempotent": "result",
        "the next call, idempotent": "result",
        "programs left": "0",
        "gateway killed in a call": "result",
        "its session": "result",
    },
    "mcp-proxy": {
        "two clients": "one process",
        "progress": "[]",
        "killed between calls": "tool error",
        "the other client": "tool error",
        "a new client": "tool error",
        "killed in a call, plain": "tool error",
        "the next call, plain": "tool error",
        "killed in a call, idempotent": "tool error",
        "the next call, idempotent": "tool error",
        "programs left": "1",
        "gateway killed in a call": NO_ANSWER,
        "its session": "404",
    },
    "supergateway": {
        "two clients": "a process each",
        "progress": "[1, 2, 3]",
        "killed between calls": "404",
        "the other client": "result",
        "a new client": "result",
        "killed in a call, plain": "-32603",
        "the next call, plain": "404",
        "killed in a call, idempotent": "-32603",
        "the next call, idempotent": "404",
        "programs left": "1",
        "gateway killed in a call": NO_ANSWER,
        "its session": "404",
    },
    "FastMCP": {
        "two clients": "one process",
        "progress": "[1, 2, 3]",
        "killed between calls": "result",
        "the other client": "result",
        "a new client": "result",
        "killed in a call, plain": "tool error",
        "the next call, plain": "result",
        "killed in a call, idempotent": "tool error",
        "the next call, idempotent": "result",
        "programs left": "1",
        "gateway killed in a call": NO_ANSWER,
        "its session": "404",
    },
}
RESTARTED = {"Perdure": "result", "FastMCP": "result"}
"""A call after an HTTP upstream was restarted, of the gateways that have such upstreams."""


class Running:
    """A gateway process that serves the scripted program."""

    def __init__(self, folder: Path, command: list[str], port: int) -> None:
        self._folder = folder
        self._command = command
        self.web = Web(f"http://127.0.0.1:{port}/mcp")
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        quiet = asyncio.subprocess.DEVNULL
        # A log would fill a pipe that is not read.
        self.process = await asyncio.create_subprocess_exec(
            *self._command, cwd=self._folder, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        await until(lambda: answers(self.web))

    def noted(self, name: str) -> list[str]:
        file = self._folder / name
        return file.read_text().splitlines() if file.exists() else []

    async def kill(self) -> None:
        """Kill the gateway: its whole tree but the programs behind it, as a crash of the gateway does."""
        assert self.process is not None
        behind = {int(pid) for pid in self.noted("starts")}
        for one in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            if one.pid not in behind and "reaper" not in str(one.cmdline()):
                one.kill()
        await self.process.wait()

    async def program_of(self, peer: Peer) -> int:
        """The process that answers a session."""
        return int((await called(peer, {"pid": True}))["result"]["content"][0]["text"])


@asynccontextmanager
async def running(folder: Path, gateway: str, upstream: Sequence[str]) -> AsyncIterator[Running]:
    """A gateway, and no process of it left after that."""
    port = free_port()
    if gateway == "Perdure":
        own = ["serve", f"--port={port}", "--store", f"sqlite:{folder / 'log.db'}", "--retry=100ms"]
        target = upstream if len(upstream) == 1 else ["--", *upstream]
        command = [sys.executable, "-m", "perdure", *own, *target]
    else:
        try:
            command = GATEWAY_PEERS[gateway].command(upstream, port)
        except NotInstalled as why:
            pytest.skip(str(why))
    served = Running(folder, command, port)
    try:
        await served.start()
        yield served
    finally:
        await served.web.aclose()
        if served.process is not None and served.process.returncode is None:
            await served.kill()
        for pid in map(int, served.noted("starts")):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def program_in(folder: Path) -> list[str]:
    """The scripted program, which notes in this folder what it does. It does not end with its input."""
    folder.mkdir(exist_ok=True)
    notes = (f"starts={folder / 'starts'}", f"runs={folder / 'runs'}", "eof=ignore")
    return [sys.executable, "-I", "-S", scripted_stdio.__file__, *notes]


@asynccontextmanager
async def upstream_at(port: int) -> AsyncIterator[str]:
    """The official SDK's HTTP server, which keeps its sessions in memory."""
    server = "examples.hello:server.streamable_http_app"
    command = [sys.executable, "-m", "uvicorn", "--factory", server, "--port", str(port), "--log-level=critical"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        web = Web(f"http://127.0.0.1:{port}/mcp")
        await until(lambda: answers(web))
        await web.aclose()
        yield web.url
    finally:
        process.kill()
        await process.wait()


async def answers(web: Web) -> bool:
    try:
        await web.http.get(web.url, headers={"accept": EVENTS}, timeout=5)
    except httpx2.TransportError:
        return False
    return True


def messages_of(response: httpx2.Response) -> list[Message]:
    """The messages of a whole response: JSON is one, whatever the tool has said before."""
    if response.headers["content-type"] != EVENTS:
        return [response.json()]
    return [json.loads(event.data) for event in Decoder().feed(response.content) if event.data]


async def called(peer: Peer, *steps: Message, tool: str = "plain") -> Message:
    response = await peer.send(peer.tool(tool, do=list(steps)))
    if response.status_code != 200:
        return {"status": response.status_code}
    return messages_of(response)[-1]


async def seen(answer: Awaitable[Message]) -> str:
    """An answer in a word."""
    try:
        async with asyncio.timeout(PATIENCE):
            message = await answer
    except TimeoutError:
        return NO_ANSWER
    except (httpx2.TransportError, Ended, IndexError):  # an event stream that ends without an answer
        return NO_ANSWER
    if "status" in message:
        return str(message["status"])
    if "error" in message:
        return str(message["error"]["code"])
    return "tool error" if message["result"].get("isError") else "result"


async def dying(served: Running, peer: Peer, tool: str) -> str:
    """The answer of a call whose program is killed in its middle."""
    count, pid = len(served.noted("runs")), await served.program_of(peer)
    answer = asyncio.create_task(seen(called(peer, {"sleep": 1}, tool=tool)))
    await until(lambda: len(served.noted("runs")) > count + 1)  # the question for the pid has run as well
    os.kill(pid, signal.SIGKILL)
    return await answer


async def cut_off(peer: Peer, body: Message, positions: list[str]) -> None:
    """Make a call whose connection breaks, and note its positions."""
    with contextlib.suppress(httpx2.TransportError):
        async with peer.site.http.stream("POST", peer.site.url, headers=peer.headers(), json=body) as response:
            decoder = Decoder()
            async for chunk in response.aiter_raw():
                decoder.feed(chunk)
                if decoder.last_event_id:
                    positions.append(decoder.last_event_id)


async def resumed(peer: Peer, positions: list[str]) -> Message:
    """The answer of a call whose connection broke, as a client asks for it."""
    if not positions:
        raise Ended
    response = await peer.begin_get(positions[-1])
    if response.status_code != 200:
        return {"status": response.status_code}
    return (await Wire(response).rest())[-1]


async def survey(folder: Path, gateway: str) -> dict[str, str]:
    """What one gateway does."""
    rows = {}
    async with running(folder, gateway, program_in(folder)) as served:
        ada, bob = await served.web.join(), await served.web.join()
        pids = await served.program_of(ada), await served.program_of(bob)
        rows["two clients"] = "one process" if pids[0] == pids[1] else "a process each"
        rows["progress"] = str(
            progress_of(messages_of(await ada.send(ada.tool("plain", token=7, do=[{"progress": 3}]))))
        )
        os.kill(pids[0], signal.SIGKILL)
        rows["killed between calls"] = await seen(called(ada))
        rows["the other client"] = await seen(called(bob))
        rows["a new client"] = await seen(newcomer(served))
    for tool in ("plain", "idempotent"):
        own = folder / tool
        async with running(own, gateway, program_in(own)) as served:
            rows[f"killed in a call, {tool}"] = await dying(served, peer := await served.web.join(), tool)
            rows[f"the next call, {tool}"] = await seen(called(peer))
    last = folder / "gateway"
    async with running(last, gateway, program_in(last)) as served:
        peer = await served.web.join()
        body = peer.tool("idempotent", token=7, do=[{"progress": 2}, {"sleep": 1}])
        positions: list[str] = []
        calling = asyncio.create_task(cut_off(peer, body, positions))
        await until(lambda: served.noted("runs"))
        await served.kill()
        await calling
        left = [pid for pid in map(int, served.noted("starts")) if await outlives(pid)]
        rows["programs left"] = str(len(left))
        await served.start()
        rows["gateway killed in a call"] = await seen(resumed(peer, positions))
        rows["its session"] = await seen(called(peer))
    return rows


async def newcomer(served: Running) -> Message:
    return await called(await served.web.join())


async def outlives(pid: int) -> bool:
    """Whether a program still runs some seconds after its gateway's death."""
    try:
        async with asyncio.timeout(5):
            await until(lambda: not psutil.pid_exists(pid))
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("gateway", SEEN)
async def test_what_a_gateway_does_when_its_program_or_itself_dies(gateway: str, tmp_path: Path) -> None:
    assert await survey(tmp_path, gateway) == SEEN[gateway]


@pytest.mark.parametrize("gateway", RESTARTED)
async def test_what_a_gateway_does_when_its_http_upstream_was_restarted(gateway: str, tmp_path: Path) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        async with upstream_at(port) as url:
            served = await stack.enter_async_context(running(tmp_path, gateway, [url]))
            peer = await served.web.join()
            assert await seen(greeted(peer)) == "result"
        async with upstream_at(port):
            assert await seen(greeted(peer)) == RESTARTED[gateway]


async def greeted(peer: Peer) -> Message:
    return messages_of(await peer.send(peer.tool("greet", name="Ada")))[-1]
