"""A runtime without the SDK: three tools, answered by hand. It shows what a session needs of a runtime, and no more."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from perdure._core.jsonrpc import Envelope, Notification, Request
from perdure._core.limits import Caller
from perdure.runtime.base import CallEnded, Outlet, Runtime
from perdure.store.records import SessionRecord


class Broken(BaseException):
    """Ends a runtime from within."""


@dataclass(eq=False)
class FakeRuntime(Runtime):
    """Answers the requests of one session, each in a task of its own."""

    _outlet: Outlet
    _gates: defaultdict[str, asyncio.Event]
    _running: dict[Any, asyncio.Task[None]] = field(default_factory=dict)
    _asked: dict[Any, asyncio.Future[Any]] = field(default_factory=dict)
    _closed: bool = False

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        if isinstance(message, Request):
            self._running[message.id] = asyncio.create_task(self._run(message))
        elif not isinstance(message, Notification):
            self._asked.pop(message.id).set_result(message.raw.get("result"))
        elif message.method == "notifications/cancelled":
            self._running[(message.params or {})["requestId"]].cancel()
        if size:
            self._outlet.handled(size)

    def follow(self, call: Request, state: dict[str, Any], *, origin: object) -> None:
        raise NotImplementedError

    async def aclose(self, *, ended: bool) -> None:
        self._closed = True
        for task in (others := set(self._running.values()) - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _run(self, request: Request) -> None:
        number = int(request.id)
        try:
            result = await self._result(number, request.method, request.params or {})
        except (LookupError, CallEnded):
            self._outlet.answer(number, b'{"code":-32601,"message":"cannot be answered"}', failed=True)
        except asyncio.CancelledError:
            if not self._closed:
                self._outlet.interrupted(number)
        except Broken:
            self._outlet.interrupted(number)
        else:
            self._outlet.answer(number, json.dumps(result).encode(), failed=False)

    async def _result(self, number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            info = {"name": "fake", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        if method != "tools/call":
            raise LookupError
        tool = {"count": self._count, "ask": self._ask}.get(params["name"])
        if tool is None:
            raise Broken
        return {"content": [{"type": "text", "text": await tool(number, params["arguments"])}]}

    async def _count(self, number: int, given: dict[str, Any]) -> str:
        for step in range(1, given["n"] + 1):
            if given.get("gate") and step == given.get("first", 0) + 1:
                await self._gates[given["gate"]].wait()
            params = {"progressToken": number, "progress": step}
            flow = self._outlet.notify("notifications/progress", params, call=number)
            if flow is not None:
                await flow.wait_for_room()
        return f"counted to {given['n']}"

    async def _ask(self, number: int, given: dict[str, Any]) -> str:
        name = self._outlet.new_ask_id()
        self._asked[name] = answer = asyncio.get_running_loop().create_future()
        self._outlet.ask(name, "roots/list", None, call=number)
        return f"{len((await answer)['roots'])} roots"


@dataclass(frozen=True)
class FakeRuntimes:
    """Loads fake runtimes, whose calls wait at `gates` until a test opens them."""

    gates: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    needs_principal = waits_for_readers = True
    runs_at_home = repeats_sticky = outlives_runtimes = False

    answers_within = 10.0

    def admitting(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def may_run_again(self, record: SessionRecord, tool: str) -> None: ...

    def load(self, record: SessionRecord, outlet: Outlet) -> FakeRuntime:
        return FakeRuntime(outlet, self.gates)

    async def tools(self, record: SessionRecord, origin: object) -> dict[str, Any]:
        return {}
