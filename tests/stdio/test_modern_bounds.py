"""Limits of the bridge without sessions, with the bridge in the test's own process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from perdure._core import listening
from perdure._core.envelope import SUBSCRIPTION
from perdure._core.reconnect import Course, Patience
from perdure.remote import stream
from perdure.remote.endpoint import Endpoint
from perdure.stdio import host_side, modern_host
from perdure.stdio.bridge import Bridge
from perdure.stdio.pipes import Output
from perdure.stdio.resume_broker import ResumeBroker
from perdure.stdio.resume_slot import Slot
from perdure.stdio.state_files import KeysFile, PositionsFile
from tests.stdio.stdio_bridges import Message
from tests.stdio.test_modern_host import params
from tests.support.servers.in_process import serve
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio

WANTED = {"toolsListChanged": True}


class Pipe:
    """A host and a bridge in this process."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        heard, self.said = os.pipe()
        self._heard = os.fdopen(heard, "rb")

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    def say(self, request_id: Any, method: str, given: Message) -> None:
        said = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params(given, elicitation={})}
        self._lines.put_nowait(json.dumps(said).encode())

    def call(self, request_id: Any, tool: str, **arguments: Any) -> None:
        self.say(request_id, "tools/call", {"name": tool, "arguments": arguments})

    async def answer(self) -> Message:
        """The next one."""
        return dict(json.loads(await asyncio.to_thread(self._heard.readline)))

    def close(self) -> None:
        self._lines.put_nowait(None)

    def free(self) -> None:
        self._heard.close()
        os.close(self.said)


async def run(pipe: Pipe, url: str) -> None:
    async with httpx2.AsyncClient() as client:
        endpoint = Endpoint(client, url, on_401="wants a token")
        broker = ResumeBroker(endpoint, Slot())
        bridge = Bridge(endpoint, Output(pipe.said), broker, PositionsFile(None), KeysFile(), patience=Patience())
        await bridge.run(pipe.lines(), lambda: None)
    pipe.free()


async def test_as_many_requests_as_may_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_side, "MAX_RUNNING", 2)
    shop, pipe = ToolServer(), Pipe()
    async with serve(shop.server) as site, asyncio.TaskGroup() as tasks:
        tasks.create_task(run(pipe, site.url))
        for number in range(3):
            pipe.call(number, "wait", gate=str(number))
        refused = await pipe.answer()
        assert (refused["id"], refused["error"]["code"]) == (2, -31022)
        for number in range(2):
            shop.open(str(number))
            assert (await pipe.answer())["id"] == number
        pipe.call(3, "wait", gate="0")
        assert "result" in await pipe.answer()
        pipe.close()


async def test_the_oldest_question_is_given_up_and_its_answer_still_reaches_the_tool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given up is its key: the state that the host brings names the task. One of no task has an unknown outcome."""
    monkeypatch.setattr(modern_host, "MAX_ASKING", 1)
    shop, pipe = ToolServer(), Pipe()
    async with serve(shop.server) as site, asyncio.TaskGroup() as tasks:
        tasks.create_task(run(pipe, site.url))
        states = []
        for number in range(2):
            pipe.call(number, "ask", question=str(number))
            states.append((await pipe.answer())["result"])
        states.append({**states[0], "requestState": "perdure-stdio.none"})
        for number, found in enumerate(states):
            answers = {key: {"action": "accept", "content": {"answer": "yes"}} for key in found["inputRequests"]}
            again = {"name": "ask", "arguments": {"question": str(number)}, "requestState": found["requestState"]}
            pipe.say(10 + number, "tools/call", {**again, "inputResponses": answers})
            answer = await pipe.answer()
            text = answer.get("result", {}).get("content", [{}])[0].get("text")
            assert text == "yes" if number < 2 else answer["error"]["code"] == -31001, answer
        pipe.close()


async def test_a_server_that_ends_subscriptions_at_once_is_come_back_to_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that says something before it ends them is come back to as soon as after the first time."""
    barren: list[int] = []

    def delay(course: Course, *_: object, **__: object) -> float:
        barren.append(course.barren)
        return 0.0

    monkeypatch.setattr(stream, "delay", delay)

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        key = json.loads(await reader.readexactly(length))["id"]
        meta = {"_meta": {SUBSCRIPTION: key}}
        said: list[Message] = [{"method": listening.ACKNOWLEDGED, "params": {"notifications": WANTED, **meta}}]
        if len(barren) == 3:
            said.append({"method": listening.LISTS["toolsListChanged"], "params": meta})
        said.append({"id": key, "result": {"resultType": "complete", **meta}})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for one in said:
            writer.write(b"data: %b\n\n" % json.dumps({"jsonrpc": "2.0", **one}).encode())
        await writer.drain()
        writer.close()

    pipe = Pipe()
    async with await asyncio.start_server(answering, "127.0.0.1", 0) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(run(pipe, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"))
        pipe.say(1, "subscriptions/listen", {"notifications": WANTED})
        while len(barren) < 6:
            await pipe.answer()
        pipe.close()
    assert barren[:6] == [1, 2, 3, 1, 2, 3]
