"""A client of 2026-07-28 that writes its requests byte by byte: calls with and without keys, tasks, rounds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure._core.envelope import CALLS, KEY
from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.raw_http import Answer, Exchange, Peer

Json = dict[str, Any]

TAKES_TASKS: Json = {"extensions": {TASKS: {}}}
REPEATS: Json = {"extensions": {TASKS: {}, CALLS: {}}}
"""It asks again if a poll that is held breaks, and says so."""
FORM: Json = {"elicitation": {"form": {}}}
ALL_ASKS: Json = {**FORM, "sampling": {}, "roots": {}}

_ENDS = ("completed", "failed", "cancelled")


@dataclass(kw_only=True)
class CallPeer(Peer):
    """A client that calls tools. Each request has an id of its own."""

    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """What it declares with every request that says nothing else."""
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def through(self, port: int) -> CallPeer:
        """The same client at another node."""
        return CallPeer(
            port=port, headers=self.headers, address=self.address, capabilities=self.capabilities, _ids=self._ids
        )

    async def send(
        self,
        method: str,
        params: Mapping[str, Any],
        *,
        capabilities: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        id: int | str | None = None,  # noqa: A002
    ) -> Exchange:
        declared = self.capabilities if capabilities is None else capabilities
        number = next(self._ids) if id is None else id
        body, named = modern(method, params, id=number, capabilities=declared)
        return await self.begin("POST", body, headers={**named, **(headers or {})})

    async def rpc(self, method: str, params: Mapping[str, Any], **options: Any) -> Answer:
        async with await self.send(method, params, **options) as exchange:
            return await exchange.answer()

    async def call(self, tool: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> Answer:
        """Call a tool. `key`: the call's key; `params`: what the request says beside."""
        return await self.rpc("tools/call", call_params(tool, arguments, options), **options)

    async def begin_call(self, tool: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> Exchange:
        return await self.send("tools/call", call_params(tool, arguments, options), **options)

    async def round(self, tool: str, before: Json, responses: Json, *, arguments: Json | None = None) -> Answer:
        """Come again with answers to what an `input_required` asked for."""
        params = {"requestState": before["requestState"], "inputResponses": responses}
        return await self.call(tool, arguments, params=params)

    # Tasks

    async def get(self, task: str) -> Json:
        answer = await self.rpc("tasks/get", {"taskId": task})
        return result_of(answer)

    async def update(self, task: str, responses: Json) -> Json:
        return result_of(await self.rpc("tasks/update", {"taskId": task, "inputResponses": responses}))

    async def cancel(self, task: str) -> Json:
        return result_of(await self.rpc("tasks/cancel", {"taskId": task}))

    async def until_asked(self, task: str, *, count: int = 1, other_than: Mapping[str, Any] | None = None) -> Json:
        """Poll until a task asks so many questions, under new keys; returns its questions."""
        while True:
            view = await self.get(task)
            assert view["status"] not in _ENDS, view
            asked: Json = view.get("inputRequests", {})
            if len(asked) == count and not set(asked) & set(other_than or ()):
                return asked
            await asyncio.sleep(0.01)

    async def until_over(self, task: str) -> Json:
        """Poll until a task has ended; returns its last view."""
        while (view := await self.get(task))["status"] not in _ENDS:
            pass
        return view


def call_params(tool: str, arguments: Mapping[str, Any] | None, options: dict[str, Any]) -> Json:
    """Return the params of a call, and remove the options that they need."""
    params: Json = {"name": tool, "arguments": dict(arguments or {}), **options.pop("params", {})}
    if (key := options.pop("key", None)) is not None:
        params["_meta"] = {**params.get("_meta", {}), KEY: key}
    return params


def result_of(answer: Answer) -> Json:
    """The result of an answer, which has to have one."""
    message = message_of(answer)
    assert "result" in message, message
    result: Json = message["result"]
    return result


def message_of(answer: Answer) -> Json:
    """The response itself, whether it came as JSON or at the end of an event stream."""
    streams = (answer.header("content-type") or "").startswith("text/event-stream")
    message: Json = answer.messages[-1] if streams else answer.json
    return message


def said(result: Json) -> str:
    """What the tool says."""
    text: str = result["content"][0]["text"]
    return text


def accept(**content: Any) -> Json:
    return {"action": "accept", "content": content}
