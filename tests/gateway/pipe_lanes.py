"""Children of the scripted server, and a receiver that records what a lane brings."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from perdure._core.jsonrpc import JsonObject
from perdure.gateway.child import ChildProgram
from perdure.gateway.children import Children, Reaper
from perdure.gateway.lane import AskKey, Lost, RequestKey
from perdure.gateway.pipe import PipeLane
from perdure.gateway.upstream import Program, Upstream
from perdure.runtime.base import Flow
from tests.support.processes.marked_processes import MARK
from tests.support.servers import scripted_stdio

CLIENT: JsonObject = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"roots": {}, "sampling": {}, "elicitation": {}},
    "clientInfo": {"name": "test", "version": "1"},
}


def scripted(*settings: str, **more: Any) -> ChildProgram:
    """The scripted server as a program; its settings are words, all else are the program's."""
    argv = (sys.executable, "-I", "-S", scripted_stdio.__file__, *settings)
    env = {MARK: os.environ.get(MARK, str(os.getpid())), **more.pop("env", {})}
    return child_program("scripted", **{"argv": argv, "env": env, "grace": 1.0, "start_timeout": 30.0, **more})


def child_program(
    name: str, *, env: Mapping[str, str] = {}, grace: float = 2.0, secrets: Sequence[str] = (), **more: Any
) -> ChildProgram:
    upstream = Upstream(name=name, program=Program(**{"cwd": Path.cwd(), **more}), secrets=frozenset(secrets))
    return ChildProgram(upstream=upstream, env=env, grace=grace)


@asynccontextmanager
async def children_of(program: ChildProgram, **options: Any) -> AsyncIterator[Children]:
    reaper = Reaper()
    children = Children(program, reaper=reaper, **options)
    try:
        yield children
    finally:
        await children.aclose()
        await reaper.aclose()


class Recorder:
    """A receiver: the reports of a lane in their order, each as its name and what was reported."""

    def __init__(self) -> None:
        self.reports: list[tuple[Any, ...]] = []
        self._reported = asyncio.Event()
        self.flow: Flow | None = None
        """What notifications return."""

    def _report(self, *report: Any) -> None:
        self.reports.append(report)
        self._reported.set()

    def on_notification(self, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        self._report("notification", key, method, params)
        return self.flow

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        self._report("ask", ask, method, params)
        return None

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None:
        self._report("withdrawn", ask, reason)

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        self._report("failed" if failed else "answer", key, body)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        self._report("lost", key, lost)

    def on_position(self, key: RequestKey, state: JsonObject) -> None:
        raise AssertionError("a pipe has no positions")

    def on_closed(self, why: str) -> None:
        self._report("closed", why)

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [report for report in self.reports if report[0] in kinds]

    async def until(self, state: Callable[[], object]) -> None:
        """Wait until the reports make it so."""
        while not state():
            self._reported.clear()
            await self._reported.wait()

    async def end_of(self, key: RequestKey) -> Any:
        """What became of a request: the text of its answer, its error object, or why it was lost."""
        await self.until(lambda: any(report[1] == key for report in self.of("answer", "failed", "lost")))
        [(kind, _, what)] = [report for report in self.of("answer", "failed", "lost") if report[1] == key]
        if kind == "answer":
            return json.loads(what)["content"][0]["text"]
        return json.loads(what) if kind == "failed" else what


class Lane(PipeLane):
    """A lane with its recorder, and with calls of the scripted server's tools."""

    def __init__(self, children: Children, **options: Any) -> None:
        self.heard = Recorder()
        super().__init__(children, self.heard, **options)

    def begin(self, key: RequestKey, *steps: JsonObject, tool: str = "plain", token: object = None) -> None:
        meta = {} if token is None else {"_meta": {"progressToken": token}}
        self.request(key, "tools/call", {"name": tool, "arguments": {"do": list(steps)}, **meta})

    async def call(self, *steps: JsonObject, token: object = None) -> Any:
        key = object()
        self.begin(key, *steps, token=token)
        return await self.heard.end_of(key)


@asynccontextmanager
async def lane_to(program: ChildProgram, **options: Any) -> AsyncIterator[Lane]:
    """An open lane."""
    async with children_of(program) as children:
        lane = Lane(children, **options)
        await lane.open(CLIENT)
        lane.notify("notifications/initialized", None)
        yield lane
        await lane.aclose(ended=True)
